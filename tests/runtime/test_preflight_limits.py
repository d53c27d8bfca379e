"""Locked memory, open files and shared memory: when a node is excluded, and when there is only a warning."""

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmddp.records.preflight import Verdict, bad, warn
from slurmddp.runtime.preflight.checks import limits, rdma, space

MIB = 1 << 20


def settings(tmp_path: Path, gpus: int = 0, nodes: int = 2, job: str = "") -> Any:
    (tmp_path / "job.json").write_text(job or '{"train": {}}')
    return SimpleNamespace(run=tmp_path, gpus=gpus, nodes=tuple(f"n{n}" for n in range(nodes)), scratch="")


@pytest.mark.parametrize(
    ("limit", "level"),
    [(8 * MIB, "bad"), (64 << 10, "bad"), (64 * MIB, "warn"), (resource.RLIM_INFINITY, None)],
)
def test_locked_memory(limit: int, level: str | None) -> None:
    assert [finding.level for finding in limits.locked_memory(limit)] == ([level] if level else [])


def test_locked_memory_matters_where_nccl_may_use_rdma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(limits, "_ADAPTERS", tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 * MIB, 8 * MIB))
    (found,) = limits.check(settings(tmp_path, gpus=4))
    assert found.text.startswith("may lock only 8192 KiB of memory (ulimit -l), and NCCL needs more for RDMA - ask")
    assert list(limits.check(settings(tmp_path, gpus=0))) == []
    assert list(limits.check(settings(tmp_path, gpus=4, nodes=1))) == []
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    assert list(limits.check(settings(tmp_path, gpus=4))) == []
    assert rdma.drivers(tmp_path / "none") == {}


def test_open_files() -> None:
    assert list(limits.open_files(1024, 64)) == list(limits.open_files(resource.RLIM_INFINITY, 10**6)) == []
    (found,) = limits.open_files(1024, 512)
    assert found.level == "warn"
    assert found.reason == "may open only 1024 files per process (ulimit -n), and 512 ranks may need 2304"


@pytest.mark.parametrize(
    ("free", "gpus", "job", "level"),
    [
        (32 * MIB, 4, "", "bad"),
        (32 * MIB, 0, '{"train": {"workers": 2}}', "bad"),
        (32 * MIB, 0, '{"train": {"workers": 0}}', "warn"),
        (32 * MIB, 1, "", "warn"),
        (512 * MIB, 4, "", "warn"),
        (2048 * MIB, 4, "", None),
    ],
)
def test_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, gpus: int, job: str, level: str | None
) -> None:
    monkeypatch.setattr(space, "available", lambda path: free if path == "/dev/shm" else 2 << 30)
    found = list(space.check(settings(tmp_path, gpus=gpus, job=job)))
    assert [finding.level for finding in found] == ([level] if level else [])


def test_one_line_for_a_warning_of_many_nodes() -> None:
    nodes = [f"n{number}" for number in range(1, 1001)]
    usual = warn("little space", "free some")
    found = {node: [usual, usual] for node in nodes}
    found["n7"] = [bad("broken", "mend"), warn("its clock is late", "ask")]
    assert Verdict(found).warnings() == ["n1 and 998 more: little space - free some", "n7: its clock is late - ask"]
    each = {node: [warn(f"{node} is odd", "ask")] for node in nodes}
    told = Verdict(each).warnings()
    assert len(told) == 21 and told[-1] == "980 more warnings: see verdict.json"
