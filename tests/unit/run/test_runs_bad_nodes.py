"""Which nodes a run's events blame, and how long that is remembered."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmddp.causes.events import raised
from slurmddp.errors import UserError
from slurmddp.run import index
from slurmddp.run.bad_nodes import add, bad_nodes, blamed, forget
from slurmddp.run.events import append_line
from slurmddp.run.layout import RunFolder
from tests.helpers import typed

NOW = 1_000_000.0
DAY = 86400
SLOW = "preflight: GPU 3 is slow - ask the site's support"


def excluded(
    node: str, reason: str = SLOW, time: float = NOW - 60, check: str = "preflight", fault: str = ""
) -> dict[str, Any]:
    facts = {"excluded": node, "reason": reason, "check": check, "fault": fault}
    return {"time": time, "event": "node_excluded", **facts}


def preflight(bad: str, checked: int, time: float = NOW - 60) -> dict[str, Any]:
    return {"time": time, "event": "preflight", "bad": bad, "checked": checked}


def names(*events: dict[str, Any]) -> list[str]:
    return [node for node, _, _ in blamed(typed(*events))]


def test_a_bad_node_among_good_ones() -> None:
    assert list(blamed(typed(excluded("n2"), preflight("n2", 4)))) == [("n2", SLOW, NOW - 60)]
    assert names(excluded("n1"), excluded("n2"), preflight("n1 n2", 4)) == ["n1", "n2"]


def test_what_most_nodes_have_is_no_node_s_fault() -> None:
    assert names(excluded("n1"), excluded("n2"), preflight("n1 n2", 3)) == []
    assert names(excluded("n1"), preflight("n1", 1)) == [], "nobody knows what another node would have said"
    assert names(excluded("n1"), {"time": NOW, "event": "preflight", "bad": "n1"}) == [], (
        "of how many nodes, it does not say"
    )
    assert names(excluded("n1")) == []


def test_each_preflight_counts_for_itself() -> None:
    first = [excluded("n1"), excluded("n2"), preflight("n1 n2", 2)]
    assert names(*first, excluded("n3"), preflight("n3", 3)) == ["n3"]


@pytest.mark.parametrize("check", ["preflight", ""])
@pytest.mark.parametrize("fault", ["user", "either"])
def test_what_may_be_the_fault_of_somebody_else_is_not_remembered(check: str, fault: str) -> None:
    assert names(excluded("n1", check=check, fault=fault), preflight("n1", 8)) == []


def test_recovery_blames_nodes_too() -> None:
    assert names(excluded("n4", "Slurm lost the node", check="")) == ["n4"]
    ecc = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    assert names({"time": NOW, "event": "attempt_ended", "node": "n5", "cause": ecc, "kind": "gpu"}) == ["n5"]
    assert names({"time": NOW, "event": "attempt_ended", "node": "n5", "cause": ecc, "kind": "exception"}) == []
    assert raised(0, "n5", "RuntimeError", ecc.partition(": ")[2]).kind == "gpu"
    assert names({"time": "x", "event": "node_excluded"}, {"event": "preflight"}, {}) == []


Runs = Callable[..., None]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Make a run of a site with these events, the last of them `age` seconds ago."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def make(name: str, *events: dict[str, Any], site: str = "alpha", age: float = 60) -> None:
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir()
        for event in events:
            append_line(folder.events, event)
        if events:
            os.utime(folder.events, (NOW - age, NOW - age))
        index.record(index.Entry(name, str(folder.path), f"2026-11-23T10:00:{len(name):02d}+00:00", name, site))

    return make


def test_the_nodes_of_a_site_s_runs_newest_first(runs: Runs) -> None:
    runs("old", excluded("n1", time=NOW - 2 * DAY), preflight("n1", 4), age=2 * DAY)
    runs("mixed", excluded("n2", time=NOW - 2 * DAY), preflight("n2", 4), excluded("n3"), preflight("n3", 4))
    runs("newest", excluded("n3", time=NOW - 9), preflight("n3", 4), excluded("n/4"), preflight("n/4", 4))
    runs("other", excluded("n5"), preflight("n5", 4), site="beta")
    runs("waiting")
    (found,) = bad_nodes("alpha", DAY, NOW)
    assert (found.node, found.run, found.reason) == ("n3", "newest", SLOW)
    assert (found.time, found.expires) == (NOW - 9, NOW - 9 + DAY)
    assert [each.node for each in bad_nodes("alpha", 4 * DAY, NOW)] == ["n3", "n2", "n1"]
    assert bad_nodes("alpha", 0, NOW) == []


def test_what_the_user_adds_and_forgets(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    runs("one", excluded("n2"), preflight("n2", 4))
    monkeypatch.setattr("time.time", lambda: NOW - 30)
    add("alpha", "n7", "its fan is broken")
    forget("alpha", "n2")
    add("beta", "n8", "x")
    (found,) = bad_nodes("alpha", DAY, NOW)
    assert (found.node, found.reason, found.run) == ("n7", "its fan is broken", None)
    runs("two", excluded("n2", time=NOW - 5), preflight("n2", 4))
    assert [each.node for each in bad_nodes("alpha", DAY, NOW)] == ["n2", "n7"], "found bad again"
    with pytest.raises(UserError, match="is not the name of a node"):
        add("alpha", "node[1-3]", "x")
