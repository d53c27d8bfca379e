"""Each rule finds its bad script, stays silent on its good one, and is listed in docs/check.md."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from slurmddp.check.finding import RULES, Finding, Rule, check_script
from slurmddp.check.script import read
from slurmddp.errors import UserError

from . import page

FIXTURES = Path(__file__).parent / "fixtures"
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
#: Errors that come with another one: what bash reads is no srun then.
ALONG = {"invisible-character": {"one-node-only"}}


def found(path: Path) -> list[Finding]:
    return check_script(read(path))


@every_rule
def test_rule_finds_its_bad_script(rule: Rule) -> None:
    findings = found(FIXTURES / "bad" / f"{rule.id}.sbatch")
    assert rule.id in {each.rule.id for each in findings}
    errors = {each.rule.id for each in findings if each.severity == "error"}
    assert errors - ALONG.get(rule.id, set()) <= {rule.id}


@every_rule
def test_rule_is_silent_on_its_good_script(rule: Rule) -> None:
    findings = found(FIXTURES / "good" / f"{rule.id}.sbatch")
    assert not [each for each in findings if each.rule.id == rule.id or each.severity == "error"]


@pytest.mark.parametrize("path", sorted((FIXTURES / "fine").iterdir()), ids=lambda path: path.stem)
def test_a_way_to_launch_that_works_is_no_error(path: Path) -> None:
    assert not [each for each in found(path) if each.severity == "error"]


@pytest.mark.parametrize("path", sorted((FIXTURES / "broken").iterdir()), ids=lambda path: path.stem)
def test_a_way_to_launch_that_cannot_work_is_an_error(path: Path) -> None:
    """The name of the file begins with the rule that must find it."""
    assert path.stem.partition("--")[0] in {each.rule.id for each in found(path) if each.severity == "error"}


def test_every_fixture_belongs_to_a_rule() -> None:
    for folder in ("bad", "good"):
        assert {path.stem for path in (FIXTURES / folder).iterdir()} == {rule.id for rule in RULES}


@every_rule
def test_rule_is_explained(rule: Rule) -> None:
    assert re.fullmatch(r"https://\S+", rule.source)
    for sentence in (rule.reason, rule.fix):
        assert sentence[0].isupper() or sentence.startswith(("srun", "sbatch", "bash", "localhost", "hostname", "--"))
        assert sentence.isascii() and sentence.endswith((".", "'", "FILE"))


def test_the_page_has_the_table_of_the_code() -> None:
    """If it does not: python -m tests.unit.check.page"""
    assert page.table() in page.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "text",
    ["A=x\n" + "A=$A$A\n" * 60, "echo " + "$(" * 5000, "echo " + '"$(' * 5000, "cat <<EOF", "x='", "${", "srun", "`"],
)
def test_text_that_no_shell_can_read_is_no_traceback(tmp_path: Path, text: str) -> None:
    path = tmp_path / "odd.sbatch"
    path.write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
    with contextlib.suppress(UserError):
        found(path)
