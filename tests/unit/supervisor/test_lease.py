"""The lease: of two that take over, one does, and who wakes up late learns it before it writes."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from slurmddp.supervisor import lease as leases
from slurmddp.supervisor.files import Files
from slurmddp.supervisor.lease import Lease, begin, newest, renew, take
from tests.unit.supervisor.test_supervisor_folder import play
from tests.unit.supervisor.test_supervisor_folder import python as python


def test_a_lease_is_renewed_and_taken(tmp_path: Path) -> None:
    folder = str(tmp_path / "lease")
    assert newest(folder) is None
    first = begin(folder, "aa.node1")
    assert newest(folder) == first == Lease(1, 0, "aa.node1") and first.host == "node1"
    renewed = renew(folder, first)
    assert renewed == first._replace(renewal=1)
    assert take(folder, first, "bb.node2") is None, "it was renewed since it was seen"
    assert renew(folder, renewed) == first._replace(renewal=2)
    assert renew(folder, first) == first._replace(renewal=3), "by another child of the same process"
    taken = take(folder, first._replace(renewal=3), "bb.node2")
    assert taken == Lease(2, 0, "bb.node2") and renew(folder, first) is None
    assert begin(folder, "cc.node4.x") == Lease(3, 0, "cc.node4.x"), "the next job of the run"
    assert os.listdir(folder) == ["3.0.cc.node4.x"]
    assert Lease(3, 0, "cc.node4.x").host == "node4.x"


def test_one_leads_in_whatever_order_they_act(tmp_path: Path) -> None:
    orders = set(itertools.permutations(["renew", "renew", "look 1", "take 1", "look 2", "take 2"]))
    for number, order in enumerate(sorted(orders)):
        folder = str(tmp_path / str(number))
        mine: Lease | None = begin(folder, "aa.node1")
        seen = {"1": mine, "2": mine}
        taken = []
        for action in order:
            what, _, who = action.partition(" ")
            if what == "renew":
                mine = mine and renew(folder, mine)
                assert (mine is None) is bool(taken), f"a leader knows at once that it leads no more: {order}"
            elif what == "look":
                seen[who] = newest(folder)
            elif (new := take(folder, seen[who], f"{who}.node")) is not None:  # type: ignore[arg-type]
                taken.append(new.generation)
        assert len(set(taken)) == len(taken), f"nobody takes what another one has taken: {order}"
        assert len(os.listdir(folder)) == 1


def test_an_answer_that_was_lost_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS repeats a rename whose answer did not come, and then finds its source gone."""
    folder, rename = str(tmp_path), os.rename

    def twice(old: str, new: str) -> None:
        rename(old, new)
        rename(old, new)

    first = begin(folder, "aa.node1")
    monkeypatch.setattr(os, "rename", twice)
    assert renew(folder, first) == first._replace(renewal=1)
    assert take(folder, first._replace(renewal=1), "bb.node2") == Lease(2, 0, "bb.node2")
    assert take(folder, first._replace(renewal=1), "cc.node2") is None, "another process of that node is another holder"


@pytest.mark.parametrize("listed", [None, Lease(0, 9, "none.none")])
def test_an_old_listing_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: Lease | None) -> None:
    folder = str(tmp_path)
    first = begin(folder, "aa.node1")
    assert (second := renew(folder, first)) and renew(folder, second)
    monkeypatch.setattr(leases, "newest", lambda folder: listed)
    with pytest.raises(OSError, match="no lease"):
        renew(folder, first)


def test_a_node_that_is_cut_off_does_not_renew_but_learns_who_leads(tmp_path: Path) -> None:
    files = Files(str(tmp_path))
    first = files.begin_lease("aa.node1")
    assert first and files.leads() and files.leader() == first._replace(renewal=1)
    files.held = True
    with pytest.raises(OSError, match="cut off"):
        files.leads()
    assert files.leader() == first._replace(renewal=1)
    assert Files(str(tmp_path)).take_lease([1, 1, "aa.node1"], "bb.node2") and not files.leads()


def test_who_has_lost_the_lease_writes_nothing(python: str, tmp_path: Path) -> None:
    """Also by a child that is begun anew, and what it could not write before, or asks for while it is late."""
    text = """
from slurmddp.supervisor.files import Files
told = []
folder.superseded = lambda: told.append("superseded")
folder.begin_lease("node1")
folder.tell("append", "events.jsonl", "one")
folder.confirm()
print(folder.settle(5), told, folder.ask("leader")[1] >= 2)
folder.tell("append", "later/events.jsonl", "two")
folder.settle(0.2)
os.mkdir(run + "/later")
os.kill(child, signal.SIGSTOP)
folder.tell("append", "events.jsonl", "three")
seen = Files(run).leader()
print(Files(run).take_lease(seen, "aa.node2").generation)
os.kill(child, signal.SIGCONT)
loop.run_until(lambda: told, 5)
print(bool(told), folder.settle(3), os.listdir(run + "/later"))
del told[:]
os.kill(child, signal.SIGKILL)
loop.rest(1)
try:
    folder.ask("ask_to_stop", "time limit", False)
except Unavailable:
    print("refused", bool(told), os.path.exists(run + "/stop"))
print(open(run + "/events.jsonl").read().split())
"""
    assert play(python, tmp_path, text) == [
        "True [] True", "2", "True True []", "refused True False", "['one']",
    ]  # fmt: skip


def test_what_is_held_is_written_once_the_node_is_back(python: str, tmp_path: Path) -> None:
    text = """
folder.begin_lease("node1")
touch = []
folder.in_touch = lambda: bool(touch)
folder.tell("append", "events.jsonl", "one")
print(folder.settle(1), os.path.exists(run + "/events.jsonl"), hung())
before = os.listdir(run + "/lease")
folder.renew()
loop.rest(0.5)
print(os.listdir(run + "/lease") == before)
touch.append(1)
folder.renew()
folder.confirm()
print(folder.settle(5), open(run + "/events.jsonl").read().split())
"""
    assert play(python, tmp_path, text) == ["False False True", "True", "True ['one']"]


def test_who_leads_a_run_whose_folder_was_deleted_may_end(python: str, tmp_path: Path) -> None:
    """Nobody else can take a lease there. A folder that is only away for a while is waited for."""
    text = """
import shutil, subprocess
from slurmddp.supervisor import folder as module
folder.begin_lease("node1")
shutil.copytree(run, run + ".copy")
shutil.rmtree(run)
back = subprocess.Popen(["sh", "-c", "sleep 2; mv $0.copy $0", run])
folder.confirm()
print(back.wait(), folder.ask("leader")[2].endswith("node1"))
module._GONE = 1.0
shutil.rmtree(run)
for _ in range(2):
    began = time.monotonic()
    folder.confirm()
    print(time.monotonic() - began > 1)
"""
    assert play(python, tmp_path, text) == ["0 True", "True", "False"]
