"""What ends Slurm's hold on a requeued job."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from slurmddp.supervisor.loop import Loop
from slurmddp.supervisor.requeue import Requeue


def test_it_can_reach_slurm_and_has_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where slurm.conf is, who serves it, and the token: none of them as an argument, which `ps` shows to all."""
    seen = tmp_path / "seen"
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/bash\nenv >{seen}.part\nmv {seen}.part {seen}\necho JobState=COMPLETED\n")
    scontrol.chmod(0o755)
    kept = {"SLURM_CONF": "/a", "SLURM_CONF_SERVER": "b", "SLURM_JWT": "c", "HOME": "/home/alice"}
    of_job = {"SLURM_RESTART_COUNT": "2", "SLURM_NNODES": "3"}
    for name, text in {"PATH": f"{tmp_path}:{os.environ['PATH']}", **of_job, **kept}.items():
        monkeypatch.setenv(name, text)
    Requeue(Loop(), "7", "7", "n1", str(tmp_path)).by_others(["n2"])
    end = time.monotonic() + 30
    while not seen.exists() and time.monotonic() < end:
        time.sleep(0.1)
    got = dict(line.split("=", 1) for line in seen.read_text().splitlines() if "=" in line)
    assert {name: got.get(name) for name in kept} == kept
    assert not [name for name in got if name.startswith("SLURM_") and name not in kept]
