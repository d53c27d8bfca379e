"""The scripts in examples/, under the real launcher: killed, stopped, and started again."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .harness import PATIENCE, ROOT

EXAMPLES = ROOT / "examples"
EPOCHS, STEPS = 4, 167  # ceil(4 * 1000 / 24)
#: The scripts with a diff that makes them save, resume and exit when asked to: the arguments of a run of 240 steps.
AFTER = {"single_gpu": "--epochs=8", "language_model": "--steps=240", "plain_ddp": "--epochs=6"}

#: Runs a script with a failure at (rank, step) of this attempt, and writes down the ids of each step.
RUNNER = """
import json, os, pathlib, runpy, signal, sys, time
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import TensorDataset

rank, step, ids = os.environ.get("RANK", "0"), 0, []
trace = open(f"trace-{os.environ['SLURMDDP_ATTEMPT']}-{rank}.jsonl", "w")
action, where, when = json.loads(os.environ.get("TROUBLE", '["", "", 0]'))
get = TensorDataset.__getitem__

def getting(self, index):
    ids.append(index)
    return get(self, index)

def after(*_):
    global step
    step += 1
    trace.write(json.dumps(ids) + "\\n")
    trace.flush()
    ids.clear()
    if (rank, step) == (where, when):
        if action == "kill":
            until = time.monotonic() + 60
            while not list(pathlib.Path("checkpoints").glob("step-*/COMPLETE")) and time.monotonic() < until:
                time.sleep(0.05)  # It is written while training goes on, here for 30 steps of a millisecond.
            os.kill(os.getpid(), signal.SIGKILL)
        pathlib.Path(os.environ["SLURMDDP_STOP_FILE"]).write_text("enough")
        time.sleep(1.2)  # It is looked for once a second: now it is found in this very step.

TensorDataset.__getitem__ = getting
register_optimizer_step_post_hook(after)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("name", AFTER)
def test_the_page_shows_each_diff(name: str) -> None:
    """SLURMDDP_UPDATE_GOLDEN=1 writes it anew."""
    page, text = ROOT / "docs/survive.md", (ROOT / "docs/survive.md").read_text(encoding="utf-8")
    begin = f"<!-- made by tests/runtime/test_examples.py: {name} -->\n"
    head, found, rest = text.partition(begin)
    tail = rest[rest.index("<!-- end -->") :]
    made = f"{head}{begin}\n```diff\n{(EXAMPLES / f'{name}.diff').read_text(encoding='utf-8')}```\n\n{tail}"
    if os.environ.get("SLURMDDP_UPDATE_GOLDEN"):
        page.write_text(made, encoding="utf-8")
    assert found and made == page.read_text(encoding="utf-8")


def changed(folder: Path, name: str) -> str:
    """Return the path of an example to which its diff was applied."""
    folder.mkdir(exist_ok=True)
    shutil.copy(EXAMPLES / f"{name}.py", folder)
    subprocess.run(["git", "apply", str(EXAMPLES / f"{name}.diff")], cwd=folder, check=True)
    return str(folder / f"{name}.py")


def start(
    folder: Path,
    example: str,
    *arguments: str,
    ranks: int,
    attempt: int = 0,
    trouble: tuple[str, str, int] | None = None,
) -> "subprocess.CompletedProcess[str]":
    """One attempt in `folder`, as node.sh would start it; ranks 0: without torchrun."""
    folder.mkdir(exist_ok=True)
    (folder / "stop").unlink(missing_ok=True)
    runner = folder / "runner.py"
    runner.write_text(RUNNER)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    variables = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "SLURMDDP_RUN": str(folder),
        "SLURMDDP_NODE": "here",
        "SLURMDDP_ATTEMPT": str(attempt),
        "SLURMDDP_STOP_FILE": str(folder / "stop"),
        **({"TROUBLE": json.dumps(trouble)} if trouble else {}),
    }
    return subprocess.run(
        [sys.executable, *launcher, str(runner), str(EXAMPLES / example), *arguments],
        env={**os.environ, **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def stream(folder: Path, attempt: int) -> list[set[int]]:
    """The ids of each step, of all ranks together."""
    traces = [path.read_text().splitlines() for path in sorted(folder.glob(f"trace-{attempt}-*.jsonl"))]
    return [{index for line in lines for index in json.loads(line)} for lines in zip(*traces, strict=False)]


def loss(folder: Path) -> float:
    """Of model.pt over all samples."""
    torch.manual_seed(0)
    rows = torch.randn(1000, 16)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    with torch.no_grad():
        return torch.nn.functional.mse_loss(model(rows), rows.sin().sum(1, keepdim=True)).item()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """plain_ddp.py with its diff, in one process, from the beginning to the end."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = start(folder, changed(folder, "plain_ddp"), "--epochs", str(EPOCHS), ranks=1)
    assert done.returncode == 0, done.stderr
    assert len(stream(folder, 0)) == STEPS
    assert not (folder / "markers").exists()
    return folder


@pytest.mark.parametrize("name", AFTER)
def test_at_most_ten_lines_are_new_or_changed(name: str) -> None:
    lines = [line[:2].strip() for line in (EXAMPLES / f"{name}.diff").read_text().splitlines()[2:] if line[1:].strip()]
    assert sum(line.startswith("+") for line in lines) <= {"plain_ddp": 5}.get(name, 10)
    assert sum(line.startswith("-") for line in lines) <= 6


@pytest.mark.ranks(3)
@pytest.mark.long
def test_stopped_by_the_stop_file_it_goes_on_on_other_ranks(undisturbed: Path, tmp_path: Path) -> None:
    arguments = (changed(tmp_path, "plain_ddp"), "--epochs", str(EPOCHS))
    done = start(tmp_path, *arguments, ranks=2, trouble=("stop", "0", 30))
    assert done.returncode == 0, done.stderr
    assert "stopping   enough\ncheckpoint step-00000030, " in done.stdout
    marker = json.loads((tmp_path / "markers" / "attempt-000.json").read_text())
    assert (marker["state"], marker["step"], marker["reason"]) == ("stopped", 30, "enough")
    saved = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert saved == ["step-00000030"]

    done = start(tmp_path, *arguments, ranks=3, attempt=1)
    assert done.returncode == 0, done.stderr
    assert "resumed    step 30 from " in done.stdout
    assert stream(tmp_path, 0) + stream(tmp_path, 1) == stream(undisturbed, 0)
    assert loss(tmp_path) == pytest.approx(loss(undisturbed), rel=1e-5)


@pytest.mark.ranks(2)
@pytest.mark.long
def test_killed_in_mid_run_it_goes_on_from_its_last_checkpoint(undisturbed: Path, tmp_path: Path) -> None:
    arguments = (changed(tmp_path, "plain_ddp"), "--epochs", str(EPOCHS))
    done = start(tmp_path, *arguments, ranks=2, trouble=("kill", "1", 130))
    assert done.returncode == 1
    assert signal.Signals.SIGKILL.name in done.stderr
    assert len(stream(tmp_path, 0)) == 130

    done = start(tmp_path, *arguments, ranks=2, attempt=1)
    assert done.returncode == 0, done.stderr
    assert "resumed    step 100 from " in done.stdout
    assert stream(tmp_path, 0) == stream(undisturbed, 0)[:130]
    assert stream(tmp_path, 1) == stream(undisturbed, 0)[100:]
    assert loss(tmp_path) == pytest.approx(loss(undisturbed), rel=1e-5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "plain_ddp" else pytest.mark.long) for name in AFTER]
)
def test_killed_and_resumed_it_has_the_losses_of_the_undisturbed_run(tmp_path: Path, name: str) -> None:
    """Two ranks, of which one is killed at step 150, after the checkpoint of step 100."""
    whole, killed, resumed = (
        start(folder, changed(folder, name), AFTER[name], ranks=2, attempt=attempt, trouble=trouble)
        for folder, attempt, trouble in (
            (tmp_path / "whole", 0, None), (tmp_path / "killed", 0, ("kill", "1", 150)), (tmp_path / "killed", 1, None),
        )
    )  # fmt: skip
    assert (whole.returncode, killed.returncode, resumed.returncode) == (0, 1, 0), resumed.stderr
    assert signal.Signals.SIGKILL.name in killed.stderr and "resumed    step 100 from " in resumed.stdout
    losses, before, after = (
        [line for line in run.stdout.splitlines() if "  loss " in line] for run in (whole, killed, resumed)
    )
    assert before == losses[: len(before)] and after == losses[-len(after) :]
    assert len(before) + len(after) > len(losses) > len(after) > 0


def test_the_plain_scripts_run(tmp_path: Path) -> None:
    done = start(tmp_path / "a", "plain_ddp.py", "--epochs", "1", ranks=1)
    assert done.returncode == 0, done.stderr
    assert "epoch 0  step 40  loss " in done.stdout and loss(tmp_path / "a") > 0
    for name in ("single_gpu.py", "language_model.py"):
        done = start(tmp_path / name, name, "--epochs=1" if name == "single_gpu.py" else "--steps=20", ranks=0)
        assert done.returncode == 0 and "step 10  loss " in done.stdout, done.stderr
    done = start(tmp_path / "b", "own_script.py", "--steps", "10", ranks=1)
    assert done.returncode == 0, done.stderr
    assert "step 10  loss " in done.stdout


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_no_example_is_forgotten(path: Path) -> None:
    """Each is run by a test of this file."""
    assert f'"{path.name}"' in Path(__file__).read_text(encoding="utf-8")


def test_slurmddp_brings_the_library_and_tells_of_the_run_to_resume(tmp_path: Path) -> None:
    """The script as `slurmddp run` starts it, with the runtime of the run's own snapshot."""
    text = Path(changed(tmp_path / "a", "plain_ddp")).read_text()
    (tmp_path / "mine.py").write_text(text.replace("import argparse", "import argparse\nimport slurmddp", 1) + SHOW)
    first = slurmddp(tmp_path, "run", "mine.py", "--site=local", "--set=resources.ranks_per_node=1", "--", "--epochs=3")
    (run,) = (tmp_path / "runs").glob("*-mine-*")
    assert first.returncode == 0, first.stdout
    assert re.search(rf"from /\S+/slurmddp-\d+/{run.name}-local-\S+/code/slurmddp/__init__.py", first.stdout), (
        first.stdout
    )
    saved = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert saved == ["step-00000100", "step-00000125"], "each 100 steps, and the end"
    second = slurmddp(tmp_path, "run", f"--resume={run.name}", "--set=resources.ranks_per_node=2")
    assert second.returncode == 0, second.stdout
    assert f"resumed    step 125 from {run}/checkpoints/step-00000125, saved by 1 rank\n" in second.stdout


SHOW = """
    print("from", slurmddp.__file__)
"""


def slurmddp(cwd: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """The command line, as a user without a site calls it."""
    home = cwd / "home"
    home.mkdir(exist_ok=True)
    variables = {**os.environ, "HOME": str(home), "PYTHONPATH": str(ROOT), "PWD": str(cwd)}
    return subprocess.run(
        [sys.executable, "-m", "slurmddp", *words],
        env=variables,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
