"""Ask the built site's own search the questions of questions.txt, in Chromium: python docs/site/questions.py [SITE]

Exit codes: 0 the first hit of each is a page that answers it, 1 one is not, or there is no Chromium.
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
SCRIPTS = ("_static/documentation_options.js", "_static/doctools.js", "_static/sphinx_highlight.js", "_static/sections.js",
           "_static/search.js",
           "_static/searchtools.js", "_static/language_data.js", "searchindex.js")  # fmt: skip
ASK = """
<script>addEventListener("load", () => {
  const hits = QUESTIONS.map((each) => Search._performSearch(...Search._parseQuery(each)).slice(-3).reverse());
  document.body.innerHTML = "<pre id=answer></pre>";
  document.getElementById("answer").textContent = JSON.stringify(hits.map((each) => each.map((hit) => hit.slice(0, 3))));
});</script>"""


def questions() -> dict[str, set[str]]:
    """Return question -> names of the pages that answer it."""
    lines = (HERE / "questions.txt").read_text(encoding="utf-8").splitlines()
    parts = [line.rsplit(" | ", 1) for line in lines if not line.startswith("#")]
    return {question: set(pages.split()) for question, pages in parts}


def hits(site: Path, asked: list[str]) -> list[list[tuple[str, str, str]]]:
    """Return the first three hits of each question, each as page, title and anchor."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        sys.exit("questions: no Chromium here: make system, or apt-get install chromium")
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
    return [[tuple(hit) for hit in each] for each in json.loads(html.unescape(found[1]))]


def main(site: Path) -> int:
    expected = questions()
    wrong = 0
    for (question, pages), found in zip(expected.items(), hits(site, list(expected)), strict=True):
        first = found[0][0].rpartition("/")[2] if found else "nothing"
        if first not in pages:
            wrong += 1
            print(f"{question}\n    {'; '.join(title for _, title, _ in found)}\n    expected {' or '.join(sorted(pages))}")
    print(f"{len(expected) - wrong} of {len(expected)} questions are answered by the first hit of the search")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/docs").resolve()))
