"""Ask the built site's own search the questions of questions.txt, in Chromium: python docs/site/questions.py [SITE]

Exit codes: 0 the first hit of each is a page that answers it, or there is no Chromium; 1 one is not.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
STATIC = ("documentation_options", "doctools", "sphinx_highlight", "sections", "search", "searchtools", "language_data")
SCRIPTS = (*(f"_static/{name}.js" for name in STATIC), "searchindex.js")
ASK = """
<script>addEventListener("load", () => {
  const ask = (question) => Search._performSearch(...Search._parseQuery(question)).slice(-3).reverse();
  const hits = QUESTIONS.map((question) => ask(question).map((hit) => hit.slice(0, 3)));
  document.body.innerHTML = "<pre id=answer></pre>";
  document.getElementById("answer").textContent = JSON.stringify(hits);
});</script>"""


def questions() -> dict[str, set[str]]:
    """Return question -> names of the pages that answer it."""
    lines = (HERE / "questions.txt").read_text(encoding="utf-8").splitlines()
    parts = [line.rsplit(" | ", 1) for line in lines if not line.startswith("#")]
    return {question: set(pages.split()) for question, pages in parts}


def hits(site: Path, asked: list[str], browser: str) -> list[list[list[str]]]:
    """Return the first three hits of each question, each as page, title and anchor."""
    page = site / "_questions.html"
    scripts = "".join(f'<script src="{script}"></script>' for script in SCRIPTS)
    ask = ASK.replace("QUESTIONS", json.dumps(asked))
    page.write_text(f'<!DOCTYPE html><html data-content_root="./"><body>{scripts}{ask}</body></html>', encoding="utf-8")
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--dump-dom",
                   "--virtual-time-budget=20000", page.as_uri()]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    page.unlink()
    found = re.search('<pre id="answer">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stdout[-2000:] + done.stderr[-2000:]
    answer: list[list[list[str]]] = json.loads(html.unescape(found[1]))
    return answer


def main(site: Path) -> int:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        print("the search was not asked its questions: no Chromium here (apt-get install chromium)")
        return 0
    expected = questions()
    wrong = 0
    for (question, pages), found in zip(expected.items(), hits(site, list(expected), browser), strict=True):
        first = found[0][0].rpartition("/")[2] if found else "nothing"
        if first not in pages:
            wrong += 1
            titles = "; ".join(title for _, title, _ in found)
            print(f"{question}\n    {titles}\n    expected {', '.join(sorted(pages))}")
    print(f"{len(expected) - wrong} of {len(expected)} questions are answered by the first hit of the search")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/docs").resolve()))
