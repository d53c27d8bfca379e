"""`slurmddp check --rehearse` on a real Slurm: a job that survives, and one whose checkpoints cannot be written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .cluster import Cluster
from .runs import ONE_RANK_A_NODE, Alice

pytestmark = pytest.mark.cluster
NAMES = [
    "train",
    "save at the time limit",
    "requeue and resume",
    "restart after a killed rank",
    "same losses after the restart",
    "save and exit",
]


@pytest.fixture(scope="module")
def alice(cluster: Cluster, torch_image: str) -> Alice:
    return Alice(cluster, torch_image)


def rehearsed(alice: Alice, name: str, **changes: Any) -> tuple[int, dict[str, Any]]:
    job = alice.job_file(name, **{"train": {"steps": 100_000, "deterministic": True}, **changes})
    done = alice.command("check", job, "--rehearse", "--json", check=False, timeout=400)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_job_survives_its_rehearsal(alice: Alice) -> None:
    code, told = rehearsed(alice, "rehearsed", resources={**ONE_RANK_A_NODE, "time": "20m"})
    assert (code, told["survived"], told["failed"]) == (0, True, None), told
    assert [step["name"] for step in told["steps"]] == NAMES
    assert "the losses differ by 0.0e+00 at most" in told["steps"][4]["detail"]
    wait_for_empty_queue(alice)


@pytest.mark.long
def test_a_job_that_cannot_save_fails_its_rehearsal_and_is_cancelled(alice: Alice) -> None:
    """Its setup line takes the right to write checkpoints away, as a quota would."""
    line = 'mkdir -p "$run/checkpoints" && chmod 500 "$run/checkpoints"'
    code, told = rehearsed(alice, "unsaved", resources={**ONE_RANK_A_NODE, "time": "20m"}, setup=[line])
    assert (code, told["failed"]["step"]) == (1, "save at the time limit"), told
    assert "Permission denied" in told["failed"]["why"], told
    assert [step["name"] for step in told["steps"]] == NAMES[:1]
    wait_for_empty_queue(alice)


def wait_for_empty_queue(alice: Alice) -> None:
    """A job that was cancelled stays there for some seconds (COMPLETING)."""
    queue = ["squeue", "--noheader", "--me"]
    alice.cluster.wait_for(lambda: not alice.cluster.run("login", queue).stdout, "nothing is left in the queue", 60)
