"""`slurmddp check --rehearse` on a real Slurm: a job that survives, and one whose checkpoints cannot be written; and
nanoGPT in an image, on the login host.
"""

from __future__ import annotations

import json
import pickle
from array import array
from dataclasses import replace
from typing import Any

import pytest

from . import others
from .cluster import Cluster
from .frameworks import Environment
from .others import NANO_GPT
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


@pytest.mark.long
def test_a_program_of_others_is_rehearsed_in_an_image(alice: Alice) -> None:
    sources = others.sources()
    if sources is None or not alice.image:
        pytest.skip(f"needs Apptainer, and {others.VARIABLE}: see tests/README.md")
    program = replace(NANO_GPT, data="")
    folder = others.install(alice.cluster, alice.image, Environment("", {}), program, sources, "rehearsed")
    data = alice.cluster.machine_path(folder) / "data" / "shakespeare_char"
    text = (data.parents[1] / "input.txt").read_bytes()[:100_000]
    for name in ("train.bin", "val.bin"):
        (data / name).write_bytes(array("H", list(text)).tobytes())
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 128}))
    sets = (
        *("--set", f"container.image={alice.image}", "--set", "resources.ranks_per_node=2"),
        *("--set", "train.resume_args=[--init_from=resume]", "--set", "checkpoint.watch=[out-shakespeare-char]"),
    )
    words = [*program.arguments, "--eval_interval=20", "--always_save_checkpoint=True"]
    command = ["slurmddp", "check", program.script, "--rehearse", "--json", *sets, "--", *words]
    done = alice.cluster.run("login", command, cwd=folder, check=False, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    kill, stop, half = json.loads(done.stdout)["sentences"]
    assert kill.startswith("Killed after step 23, it resumed at step 20, but went on differently: the loss of step 21 ")
    assert stop.startswith("Asked to stop after step 23, it went on for ") and stop.endswith(" lost.")
    assert half.startswith("Then started on 1 rank, it resumed at step "), "its seed is not saved, its optimizer is"


def wait_for_empty_queue(alice: Alice) -> None:
    """A job that was cancelled stays there for some seconds (COMPLETING)."""
    queue = ["squeue", "--noheader", "--me"]
    alice.cluster.wait_for(lambda: not alice.cluster.run("login", queue).stdout, "nothing is left in the queue", 60)
