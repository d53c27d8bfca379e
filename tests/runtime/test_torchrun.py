"""Whole jobs under the real launcher."""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from .harness import HERE, PATIENCE, ROOT, Run, free_port, torchrun

STDLIB = sysconfig.get_paths()["stdlib"]
SMALL = {"layers": 2, "heads": 2, "width": 64}
TEXT = {"path": STDLIB, "glob": "[a-d]*.py", "context": 64}


@pytest.mark.ranks(2)
def test_lm_learns_the_standard_library(tmp_path: Path) -> None:
    run = Run.create(
        tmp_path / "run",
        train__task="lm",
        train__data=TEXT,
        train__model=SMALL,
        train__steps=80,
        train__optimizer__lr=0.003,
        train__log_every=20,
        train__workers=1,
        batch__global=32,
        batch__micro=8,
        checkpoint__every_steps=None,
    )
    result = torchrun(run, 2)
    assert result.returncode == 0, result.stderr
    losses = run.losses(0)
    assert losses[1] > 5 and losses[80] < 3.2
    validation = run.marker()["validation"]
    assert validation["loss"] < 3.2 and validation["bits_per_byte"] == pytest.approx(
        validation["loss"] / 0.693147, rel=1e-5
    )
    assert validation["count"] == validation["samples"] * 64
    assert "batch      32 samples = micro 8 x accumulation 2 x ranks 2" in result.stdout
    assert re.search(r"^step 20/80  loss \d\.\d{4}  lr \S+  \S+ tok/s  eta \d+:\d\d$", result.stdout, re.M)
    assert f"bits per byte {validation['bits_per_byte']:.4f}, over {validation['count']} tokens" in result.stdout
    assert all(line["tokens_per_second"] > 0 for line in run.lines("metrics.jsonl"))
    kinds = [event["event"] for event in run.lines("events.jsonl") if event["rank"] == 0]
    kinds = [kind for kind in kinds if kind not in ("straggler_begins", "straggler_ends")]  # A busy machine makes them.
    assert kinds[:4] == ["rank_started", "started", "ready", "first_step"]
    # The checkpoint is written while the evaluation runs.
    assert sorted(kinds[4:-2]) == ["checkpoint_saved", "evaluated"]
    assert kinds[-2:] == ["timing", "finished"]
    assert [event["rank"] for event in run.events("timing")] in ([0, 1], [1, 0])
    assert run.lines("events.jsonl")[0]["node"] == "here"


@pytest.mark.long  # test_failures.py has no data, too
@pytest.mark.ranks(2)
def test_missing_data_is_one_message(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", train__task="lm", train__data={"path": str(tmp_path / "none" / "data")})
    result = torchrun(run, 2)
    assert result.returncode == 1
    messages = [line for line in result.stderr.splitlines() if "error: train.data.path" in line]
    nearest = f"(but {tmp_path} does): check that it is bound into the container"
    assert messages == [f"rank 0 on here: error: train.data.path: {tmp_path}/none/data does not exist {nearest}"]
    assert "rank 0 on here: Traceback" not in result.stderr and "rank 1 on" not in result.stderr
    assert [event["kind"] for event in run.events("error")] == ["UserError"]


def test_lm_needs_neither_numpy_nor_pil(tmp_path: Path) -> None:
    """One rank without torchrun: its variables are enough. The two cannot be found. It exits at once."""
    run = Run.create(
        tmp_path / "run",
        train__task="lm",
        train__data=TEXT,
        train__model=SMALL,
        train__steps=2,
        train__workers=1,
        train__deterministic=True,
    )
    code = """
import os, runpy, sys
class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        hidden = name.partition(".")[0] in ("numpy", "PIL")
        return None if hidden else self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
plain = os._exit
def leave(code):
    assert not {"numpy", "PIL"} & set(sys.modules)
    print("clean end", flush=True)
    plain(code)
os._exit = leave
runpy.run_module("slurmddp.runtime.train", run_name="__main__")
"""
    variables = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "OMP_NUM_THREADS": "1",
    }
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONPATH": f"{ROOT}:{HERE.parent}"}
    command = [sys.executable, "-c", code, str(run.root)]
    result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("clean end\n")
    assert run.marker()["state"] == "done"


def test_without_torchrun_it_says_so() -> None:
    command = [sys.executable, "-m", "slurmddp.runtime.train", "/nowhere"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("slurmddp: error: RANK is not set: start this program with torchrun")
