"""What the observer tells of a start of somebody else's script: whether its ranks work together."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .harness import PATIENCE, ROOT, Run
from .test_observe import launch

#: A program for one GPU. Each rank trains it. FIRST stands before the training, IN_STEP in each step.
ALONE = """\
import os, sys, time
import torch
import torch.distributed as dist

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
FIRST
for step in range(1, STEPS + 1):
    IN_STEP
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def alone(folder: Path, *, steps: int = 5, first: str = "", in_step: str = "pass") -> Path:
    path = folder / "alone.py"
    path.write_text(ALONE.replace("FIRST", first).replace("IN_STEP", in_step).replace("STEPS", str(steps)))
    return path


def check_message(run: Run) -> None:
    (told,) = run.events("no_process_group")
    assert (told["rank"], told["world"]) == (0, 2)
    assert told["text"] == (
        "no torch.distributed process group was made: unless the script uses another library, "
        "each of the 2 ranks trains a model of its own"
    )


@pytest.mark.long
@pytest.mark.parametrize("steps", [2, 5])
def test_ranks_without_a_process_group_are_told(tmp_path: Path, steps: int) -> None:
    done = launch(tmp_path, alone(tmp_path, steps=steps), observe={})
    assert done.returncode == 0, done.stderr
    check_message(Run(tmp_path))
    assert Run(tmp_path).events("process_group_made") == []


@pytest.mark.long
def test_ranks_that_srun_starts_are_told(tmp_path: Path) -> None:
    """launch.mode srun: each rank is a process of its own, as node.sh starts it without torchrun."""
    shared = {
        **os.environ, "PYTHONPATH": str(ROOT), "SLURMDDP_RUN": str(tmp_path), "SLURMDDP_NODE": "here",
        "SLURMDDP_ATTEMPT": "0", "SLURMDDP_OBSERVE": "{}", "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "slurmddp.runtime.begin", str(alone(tmp_path))]
    ranks = [subprocess.Popen(command, env={**shared, "RANK": rank, "LOCAL_RANK": rank}) for rank in ("0", "1")]
    assert [rank.wait(PATIENCE) for rank in ranks] == [0, 0]
    check_message(Run(tmp_path))


def test_a_process_group_that_is_made_late_clears_it(tmp_path: Path) -> None:
    late = "dist.init_process_group('gloo') if step == 5 else time.sleep(0.2)"
    done = launch(tmp_path, alone(tmp_path, steps=8, in_step=late), observe={})
    assert done.returncode == 0, done.stderr
    names = [event["event"] for event in Run(tmp_path).lines("events.jsonl")]
    assert [name for name in names if "process_group" in name] == ["no_process_group", "process_group_made"]
    check_message(Run(tmp_path))


@pytest.mark.long  # test_observe.py has ranks with a group, too
@pytest.mark.parametrize(
    ("first", "size"),
    [
        ("", 1),
        ("dist.init_process_group('gloo')", 2),
        # As if it had been imported: it needs no process group.
        ("sys.modules['horovod'] = sys", 2),
    ],
)
def test_nothing_is_told(tmp_path: Path, first: str, size: int) -> None:
    """Of one rank, of ranks with a group, and of those with a library that needs none."""
    done = launch(tmp_path, alone(tmp_path, first=first), size=size, observe={})
    assert done.returncode == 0, done.stderr
    assert Run(tmp_path).events("first_step"), "it was observed"
    assert Run(tmp_path).events("no_process_group") == []
