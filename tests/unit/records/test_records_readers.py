"""Events are read and written through their types: nobody outside of slurmddp/records names one by a string."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slurmddp.records import events
from tests.helpers import ROOT

#: How Python would read an event by string keys, or write one.
_BY_KEY = re.compile(r"""\.get\(["']event["']\)|\[["']event["']\]|["']event["']:|(?:events\.write|\.record)\(["']""")
#: An event's name as a text, compared or looked up. One word (`error`, `hang`) is also other people's.
_NAMES = re.compile("|".join(rf"""["']{name}["']""" for name in events.TYPES if "_" in name))
#: File -> why it may have one.
ALLOWED = {
    "slurmddp/report/progress.py": "a key of status --json: when the job started",
    "slurmddp/supervisor/release.py": "its text is run by itself, without a package beside it",
    "slurmddp/supervisor/files.py": "its answers travel as JSON: the names of events that it found",
}


def sources() -> list[Path]:
    found = sorted((ROOT / "slurmddp").rglob("*.py"))
    return [path for path in found if path.parent != ROOT / "slurmddp/records"]


@pytest.mark.parametrize("pattern", [_BY_KEY, _NAMES])
def test_no_event_is_named_by_a_string(pattern: re.Pattern[str]) -> None:
    found = {}
    for path in sources():
        name = str(path.relative_to(ROOT))
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if pattern.search(line)]
        if lines and name not in ALLOWED:
            found[name] = lines
    assert found == {}


def test_the_search_finds_what_it_looks_for() -> None:
    assert _BY_KEY.search('if record.get("event") == name:') and _BY_KEY.search('events.write("hang", ranks=[])')
    assert _NAMES.search('name == "attempt_ended"')
