"""Pages stay short enough to be read. Words of what is made from the code do not count."""

import re
from pathlib import Path

import pytest

from tests.helpers import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: In which a reader looks something up.
REFERENCE = {"job.md", "sites.md", "files.md"}
#: From a mark to the next one.
MADE = re.compile(r"<!-- (?:measured|made by|profiles|forms).*?<!-- (?:end|measured: end)[^\n]*", re.DOTALL)
TABLES = re.compile(r"^\| (?:rule|event) \|.*?\n(?!\|)", re.MULTILINE | re.DOTALL)


def words(page: Path) -> int:
    text = TABLES.sub("", MADE.sub("", page.read_text(encoding="utf-8")))
    if page.name == "doctor.md":
        text, _, made = text.partition("\n## Catalogue\n")
        assert len(made.split()) > 5000
    return len(text.split())


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in REFERENCE], ids=lambda page: page.name)
def test_a_page_has_at_most_1500_words(page: Path) -> None:
    assert words(page) <= 1500, f"{page.name}: say it on one page only, and only what a reader needs to decide or act"


def test_all_pages_have_at_most_35000_words() -> None:
    assert sum(map(words, PAGES)) <= 35_000


def test_the_readme_fits_on_two_screens() -> None:
    assert len(PAGES[0].read_text(encoding="utf-8").splitlines()) < 90


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_begins_with_its_question_and_a_command(page: Path) -> None:
    """README begins with what slurmddp promises."""
    title, _, rest = page.read_text(encoding="utf-8").partition("\n")
    assert title.startswith("# ")
    if page.name != "README.md":
        before = rest.split("\n    ")[0]
        assert "?" in before and len(before.split()) < 80, before
