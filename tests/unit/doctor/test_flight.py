"""Flight recorder dumps: the rank that did not join, calls that differ, and pickles that want to run something."""

import os
import pickle
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from slurmddp.doctor.diagnose import Diagnosis, Examination
from slurmddp.doctor.plain_pickle import load
from slurmddp.doctor.sources import read_path
from slurmddp.run.layout import RunFolder
from tests.helpers import append_event, node_log
from tests.unit.doctor.runs import diagnose_run


def entry(number: int, name: str, state: str, group: str = "0") -> dict[str, Any]:
    return {
        "collective_seq_id": number, "process_group": (group, "default_pg"), "profiling_name": f"nccl:{name}",
        "state": state, "is_p2p": False, "input_sizes": [[4, 4]],
    }  # fmt: skip


def dump(folder: Path, rank: int, *entries: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"rank_{rank}").write_bytes(pickle.dumps({"version": "2.4", "entries": list(entries)}, protocol=2))


def diagnose(folder: Path) -> Diagnosis:
    found = Examination()
    read_path(found, folder)
    return found.diagnose()


def test_the_rank_that_did_not_join(tmp_path: Path) -> None:
    for rank in (0, 1, 3):
        dump(tmp_path / "fr", rank, entry(7, "all_reduce", "completed"), entry(8, "all_reduce", "started"))
    dump(tmp_path / "fr", 2, entry(7, "all_reduce", "completed"))
    found = diagnose(tmp_path / "fr")
    assert found.root is not None and found.root.first.cause.id == "nccl-timeout"
    assert (found.sure, found.root.ranks) == ("likely", (0, 1, 3))
    assert (
        found.message
        == "the others waited for rank 2: they had started collective 7, the others 8; they did not join all_reduce 8"
    )


def test_ranks_that_call_different_collectives(tmp_path: Path) -> None:
    dump(tmp_path / "fr", 0, entry(8, "all_reduce", "scheduled"))
    dump(tmp_path / "fr", 1, entry(8, "broadcast", "scheduled"))
    assert (
        diagnose(tmp_path / "fr").message == "the ranks made different calls at the same point: all_reduce, broadcast"
    )


def test_dumps_without_a_wait_are_no_failure(tmp_path: Path) -> None:
    dump(tmp_path / "fr", 0, entry(8, "all_reduce", "completed"), {**entry(9, "x", "scheduled"), "retired": True})
    assert diagnose(tmp_path / "fr").root is None


HANG = {"attempt": 0, "ranks": [2], "nodes": ["n2"], "phase": "step", "step": 4, "waited": 30.0}


def test_a_hang_of_an_own_script(tmp_path: Path) -> None:
    """The newest one counts, until the ranks make progress again."""
    folder = RunFolder(tmp_path)
    folder.attempt_logs(0).mkdir(parents=True)
    node_log(folder, 0, "n1").write_text("slurmddp: hang: ...\n")
    for start, number, behind in ((0, 1, 0), (9, 2, 0), (10, 1, 1), (10, 2, 2)):
        place = folder.observed(0, str(start)) / f"hang-{number}"
        place.mkdir(parents=True)
        place.with_suffix(".json").touch()
        for rank in range(3):
            waits = [] if rank == behind else [entry(8, "all_reduce", "scheduled"), entry(9, "broadcast", "scheduled")]
            dump(place, rank, {**entry(7, "all_reduce", "scheduled"), "retired": True}, *waits)
            (place / f"rank_{rank}").rename(place / f"rank-{rank:05d}.pickle")
    append_event(folder.events, "hang_reported", **HANG)
    found = diagnose_run(folder)
    assert found.root is not None and found.root.first.cause.id == "hang"
    assert (found.root.first.rank, found.root.first.host) == (2, "n2")
    assert found.message == (
        "the others waited for rank 2: they had started collective 7, the others 9; they did not join all_reduce 8"
    )
    assert [each.first.cause.id for each in found.cascades] == ["nccl-timeout"]
    append_event(folder.events, "hang_over", attempt=0, ranks=[2], nodes=["n2"])
    assert diagnose_run(folder).root is None
    append_event(folder.events, "hang_reported", **{**HANG, "attempt": 1})
    (found,) = [diagnose_run(folder)]
    assert found.root is not None and found.root.first.rank == 2 and not found.message, "it has no dumps"


def test_the_dumps_of_a_run(tmp_path: Path) -> None:
    """A bundled task writes them into the attempt's folder of logs."""
    folder = RunFolder(tmp_path)
    place = folder.attempt_logs(0) / "flight_recorder"
    place.mkdir(parents=True)
    node_log(folder, 0, "n1").write_text("[Rank 0] Watchdog caught collective operation timeout\n")
    append_event(folder.events, "attempt_started", attempt=0, nodes="n1")
    for rank in range(3):
        waits = [] if rank == 1 else [entry(8, "all_reduce", "scheduled")]
        dump(place, rank, {**entry(7, "all_reduce", "scheduled"), "retired": True}, *waits)
    found = diagnose_run(folder)
    assert "the others waited for rank 1" in found.message and "all_reduce 8" in found.message


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("owned",)


@pytest.mark.parametrize(
    "data",
    [pickle.dumps({"entries": [Evil()]}, protocol=2), b"\x80\x02garbage", pickle.dumps([1], protocol=2), b"\x80",
     pickle.dumps({"entries": [{"process_group": "0"}]}, protocol=2)],
)  # fmt: skip
def test_another_pickle_is_a_note_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fr").mkdir()
    (tmp_path / "fr/rank_0").write_bytes(data)
    found = diagnose(tmp_path / "fr")
    assert found.root is None and "is not a flight recorder dump" in found.notes[0]
    assert not (tmp_path / "owned").exists()


def doubled(times: int) -> bytes:
    """A list of a list twice, and so on: 100 bytes whose text has 2 ** times parts."""
    return b"]" + b"".join(b"q%c](h%ch%ce" % (at, at, at) for at in range(times))


def raw(group: bytes, number: bytes = b"K\x01") -> bytes:
    def text(word: bytes) -> bytes:
        return b"X" + struct.pack("<I", len(word)) + word

    entry = b"}(" + text(b"process_group") + group + text(b"collective_seq_id") + number + b"u"
    return b"\x80\x02}(" + text(b"entries") + b"](" + entry + b"eu."


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(raw(doubled(40)), id="nested-group"),
        pytest.param(raw(b"N", b"\x8b" + struct.pack("<I", 2000) + b"\x7f" * 2000), id="4800-digits"),
        pytest.param(b"\x80\x02}r\xff\xff\xff\x07.", id="huge-memo"),
        pytest.param(b"\x80\x02})" + b"".join(b"q%ch%c\x86" % (at, at) for at in range(40)) + b"Ns.", id="hashed-key"),
    ],
)
def test_a_pickle_bomb_is_one_note_and_costs_nothing(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "rank_0").write_bytes(data)
    tracemalloc.start()
    begun = time.process_time()
    found = diagnose(tmp_path)
    used, size = time.process_time() - begun, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.root is None and len(found.notes) == 1 and "is not a flight recorder dump" in found.notes[0]
    assert used < 5 and size < 100e6  # reading asks for 64 MiB at once


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_dump_as_pickle_writes_it_is_read(protocol: int) -> None:
    value = {"version": "2.4", "pg": {0: {"x": -1}}, "f": 0.5, "n": None, "t": [True, 70000, 2**40, -5, ("a", "b"), []]}
    assert load(pickle.dumps(value, protocol=protocol)) == value
