"""Lines of events.jsonl are written and read through one type each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurmddp.records import events, json_lines
from slurmddp.records.events import Event, Unknown
from slurmddp.records.job_events import AttemptEnded, HoldReleased, Measured, Network, Preflight
from slurmddp.records.rank_events import Evaluated, FirstStep, Hang, RankStarted
from tests.helpers import ROOT


def filled(kind: Any) -> Any:
    """Facts of a type with a value in each field."""
    values = {
        "str": "x",
        "typing.Optional[str]": "x",
        "typing.Optional[int]": 3,
        "typing.Optional[float]": 2.5,
        "typing.Optional[bool]": True,
        "typing.Tuple[str, ...]": ("x", "y"),
        "typing.Tuple[int, ...]": (1, 2),
        "typing.Mapping[str, float]": {"x": 1.5},
        "typing.Mapping[str, typing.Any]": {"x": "y"},
    }
    made = []
    for hint in kind.__annotations__.values():
        name = getattr(hint, "__name__", "") if isinstance(hint, type) else str(hint)
        nested = next((each for each in getattr(hint, "__args__", ()) if hasattr(each, "_fields")), None)
        made.append(filled(nested) if nested else values[name])
    return kind(*made)


@pytest.mark.parametrize("name", events.TYPES)
def test_each_event_is_read_as_it_was_written(name: str) -> None:
    facts = filled(events.TYPES[name])
    own = {"node", "rank"} & set(facts._fields)
    event = Event(facts, 1.5, 2, "7", "x" if "node" in own else "n1", 3 if "rank" in own else 0)
    line = json.dumps(event.write()).encode()
    assert json.loads(line)["event"] == name == event.name
    assert events.parse(line) == event


@pytest.mark.parametrize("name", events.TYPES)
@pytest.mark.parametrize("value", [None, {}, [], "x", 10**400, float("nan"), True, [None, {}, 10**400]])
def test_a_field_that_is_not_sound_is_unknown_and_no_error(name: str, value: Any) -> None:
    kind = events.TYPES[name]
    keys = {field.rstrip("_"): value for field in kind._fields}
    event = events.read({"event": name, "time": value, "attempt": value, **keys})
    assert event is not None and isinstance(event.facts, kind)
    assert event.write()["event"] == name
    assert events.read({"event": name}) is not None


def test_an_unknown_event_is_kept() -> None:
    event = events.read({"event": "of a later version", "time": 1, "rank": 0, "more": [1]})
    assert event == Event(Unknown("of a later version", {"more": [1]}), 1.0, rank=0)
    assert event.write() == {"event": "of a later version", "time": 1, "rank": 0, "more": [1]}


@pytest.mark.parametrize("line", [b"", b"x", b"[]", b"{}", b'{"event": 1}', b'{"event": "x"', b'{"event": "\xff"}'])
def test_no_event(line: bytes) -> None:
    assert events.parse(line) is None


def test_what_is_absent_or_null_is_unknown() -> None:
    event = events.read({"event": "attempt_ended", "rank": None, "exit_code": "a", "decision": "next"})
    assert event == Event(AttemptEnded(None, "", "", None, "next"))
    assert "ended_by" not in event.write() and event.write()["rank"] is None
    read = events.read({"event": "preflight", "warnings": ["a", 1, "b"], "seconds": True})
    assert read and read.facts == Preflight(None, "", None, ("a", "b"))


def test_nested_facts_and_the_figures_of_a_task() -> None:
    network = events.read({"event": "network", "measured": {"result": "none"}})
    assert network and network.facts == Network(None, "", Measured("none"))
    assert network.write()["measured"] == {"result": "none"}
    evaluated = events.read({"event": "evaluated", "time": 1, "loss": 0.5, "count": 2, "accuracy": 0.75})
    assert evaluated and evaluated.facts == Evaluated(None, None, 0.5, 2, None, {"accuracy": 0.75})


def test_the_node_and_rank_of_facts_are_theirs() -> None:
    event = Event(AttemptEnded(1, "x", "n2", 5, "next"), 1, 0, "7", "n1")
    assert event.write()["node"] == "n2"
    assert events.read(event.write()) == event._replace(node="n2", rank=5)


def test_of_and_newest() -> None:
    hang = Hang("all", (), (), "step", 1, 2, 3)
    lines = [Event(RankStarted(1)), Event(hang, 1), Event(FirstStep(1, 1)), Event(hang._replace(step=4), 2)]
    assert [event.time for event, _ in events.of(lines, Hang)] == [1, 2]
    for order in (lines, iter(lines)):
        assert events.newest(order, Hang) == hang._replace(step=4)
    assert events.newest(lines, HoldReleased) is None


def old_python() -> str | None:
    found = sorted(Path.home().glob(".pyenv/versions/3.6.*/bin/python"))
    return str(found[0]) if found else None


@pytest.mark.skipif(old_python() is None, reason="no Python 3.6 here")
def test_python_3_6_reads_and_writes_the_same() -> None:
    program = (
        "import json, sys; sys.path.insert(0, sys.argv[1])\n"
        "from slurmddp.records import events, json_lines\n"
        "for line in sys.stdin.buffer: sys.stdout.buffer.write(json_lines.dump(events.parse(line).write()))"
    )
    lines = "".join(json.dumps(Event(filled(kind), 1.5, 2, "7").write()) + "\n" for kind in events.TYPES.values())
    for python in (old_python() or "", sys.executable):
        done = subprocess.run([python, "-c", program, ROOT], input=lines, capture_output=True, text=True, check=True)
        assert [json.loads(line) for line in done.stdout.splitlines()] == [
            json.loads(line) for line in lines.splitlines()
        ]


def test_a_lone_surrogate_is_no_error() -> None:
    assert json.loads(json_lines.dump({"a": "x\ud800y"})) == {"a": "x?y"}
    assert json_lines.dump({"a": "\udcff"}) == b'{"a": "\xff"}\n'
