"""tests/security.md has, for each section of docs/security.md, the tests of its claims, and the claims without one."""

import functools
import re

import pytest

from tests.helpers import ROOT


def sections(page: str) -> dict[str, str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))


PAGE, SECTIONS = sections("docs/security.md"), sections("tests/security.md")
#: These promise nothing: the first says what is open, the other whom the rest is about.
WITHOUT_CLAIMS = ("What is open", "Threat model")
TABLE = re.compile(r"^\| Claim \| Test \|\n\|---\|---\|\n((?:\|[^\n]+\n)+)\nNo test: [^\n]", re.MULTILINE)
CELLS = [
    (heading, claim, test)
    for heading, text in SECTIONS.items()
    for rows in TABLE.findall(text)
    for claim, _, test in (row.strip("| ").rpartition(" | ") for row in rows.splitlines())
]


def test_what_is_open_comes_first() -> None:
    assert next(iter(PAGE)) == WITHOUT_CLAIMS[0] and "| Gap | Who could use it |" in PAGE["What is open"]


def test_each_section_of_the_page_has_its_tests() -> None:
    assert [heading for heading in PAGE if heading not in WITHOUT_CLAIMS] == list(SECTIONS)


@pytest.mark.parametrize("heading", SECTIONS)
def test_a_section_names_its_tests_and_what_has_none(heading: str) -> None:
    assert len(TABLE.findall(SECTIONS[heading])) == 1, heading


@functools.cache
def found_in(file: str) -> frozenset[str]:
    text = (ROOT / "tests" / file).read_text(encoding="utf-8")
    return frozenset(re.findall(r"^ *def (test_\w+)\(", text, re.MULTILINE))


@pytest.mark.parametrize(("heading", "claim", "cell"), CELLS, ids=[claim for _, claim, _ in CELLS])
def test_the_tests_of_a_claim_exist(heading: str, claim: str, cell: str) -> None:
    """A file alone: all tests in it show the claim."""
    assert heading and claim
    for part in cell.split("; "):
        file, _, names = part.partition("::")
        assert re.fullmatch(r"(\w+/)+test_\w+\.py", file), part
        assert found_in(file) and (not names or set(names.split(", ")) <= found_in(file)), part
