"""Errors that the next start would meet again end the run at its first start; others, and those of one rank, do not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurmddp.runtime.watch import usererrors

from .harness import PATIENCE, ROOT, Run, torchrun

STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
RESTARTS = 2
#: Wait until both ranks have noted this start: torchrun ends the other rank as soon as one fails.
MEET = "import time\nwhile len(open(os.path.dirname(__file__) + '/starts').read()) % 2:\n    time.sleep(0.05)\n"
FIRST_TIME = f"{MEET}if open(os.path.dirname(__file__) + '/starts').read().count(os.environ['RANK']) == 1:\n"


def launch(run: Path, body: str, size: int = 2) -> "subprocess.CompletedProcess[str]":
    """torchrun with a script of the user's own, which notes each start of a rank."""
    script = run / "own.py"
    script.write_text(f"import os\nopen({str(run)!r} + '/starts', 'a').write(os.environ['RANK'])\n{body}\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    command += [f"--max-restarts={RESTARTS}", "-m", "slurmddp.runtime.begin", str(script), "--wrong"]
    variables = {**os.environ, **STORE, "PYTHONPATH": str(ROOT), "SLURMDDP_RUN": str(run), "SLURMDDP_ATTEMPT": "0"}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=PATIENCE, check=False)


def starts(run: Path) -> str:
    return "".join(sorted((run / "starts").read_text()))


def cause(run: Path) -> str:
    marker = json.loads((run / "markers/attempt-000.json").read_text())
    assert marker["state"] == "failed"
    return str(marker["cause"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("body", "why"),
    [
        pytest.param("import nothere", "ModuleNotFoundError: No module named 'nothere'", marks=pytest.mark.long),
        pytest.param(
            "import argparse\nargparse.ArgumentParser().parse_args()",
            "the program exited with code 2",
            marks=pytest.mark.long,
        ),
        ("if os.environ['RANK'] == '1': import time; time.sleep(2)\nprint(undefined)", "NameError: name 'undefined'"),
        pytest.param(
            "import torch\ntorch.distributed.init_process_group('gloo')\nfrom os import nothere",
            "ImportError: cannot",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "from slurmddp.runtime import distributed\nwith distributed():\n    import nothere",
            "ModuleNotFoundError: No module named 'nothere'",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_script_that_fails_on_all_ranks_is_started_once(tmp_path: Path, body: str, why: str) -> None:
    done = launch(tmp_path, body)
    assert done.returncode == 0, done.stderr  # as after any marker: job.sh reads that
    assert cause(tmp_path).startswith(why)
    assert starts(tmp_path) == "01"
    assert "all ranks failed this way before the first step, so the run is not restarted" in done.stderr


@pytest.mark.ranks(2)
def test_a_script_that_cannot_be_parsed(tmp_path: Path) -> None:
    done = launch(tmp_path, "def")
    assert done.returncode == 0 and cause(tmp_path).startswith("SyntaxError: "), done.stderr


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "body",
    [
        "if os.environ['RANK'] == '1' and not os.path.exists(here := __file__ + '.once'):\n"
        "    open(here, 'w')\n    import nothere\n"
        "import time; time.sleep(1)",  # of one rank: its node may lack something
        pytest.param(
            f"{FIRST_TIME}    raise ImportError('x.so: cannot open: Stale file handle')", marks=pytest.mark.long
        ),
        pytest.param(f"{FIRST_TIME}    raise ConnectionError('no')", marks=pytest.mark.long),
    ],
)
def test_what_may_pass_is_started_again(tmp_path: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = launch(tmp_path, body)
    assert done.returncode == 0, done.stderr
    assert starts(tmp_path).count("1") == 2 and not (tmp_path / "markers/attempt-000.json").exists()


@pytest.mark.ranks(2)
def test_after_the_first_step_a_run_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "progress").write_text("7\n")
    done = launch(tmp_path, f"{MEET}import nothere")
    assert done.returncode != 0
    assert starts(tmp_path) == "0" * (1 + RESTARTS) + "1" * (1 + RESTARTS)


@pytest.mark.long  # test_failures.py has a task that fails, too
@pytest.mark.ranks(2)
def test_a_task_of_ones_own_that_does_not_import(tmp_path: Path) -> None:
    (tmp_path / "broken_task.py").write_text("import nothere\n")
    run = Run.create(tmp_path / "run", train__task="broken_task:create")
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    done = torchrun(run, 2, PET_MAX_RESTARTS="3", PYTHONPATH=path, **STORE)
    assert done.returncode == 0, done.stderr
    assert cause(run.root) == "ModuleNotFoundError: No module named 'nothere'"
    assert len(run.events("rank_started")) == 1


def raised(error: Exception, cause: Exception | None) -> Exception:
    try:
        raise error from cause
    except Exception as found:  # noqa: BLE001 - it is what we want
        return found


@pytest.mark.parametrize(
    ("error", "stays"),
    [
        (ImportError("cannot import name 'x'"), True),
        (raised(ImportError("libx.so: cannot open shared object file: No such file or directory"), None), True),
        (raised(ImportError("x"), FileNotFoundError(2, "no")), True),
        (raised(ImportError("x"), TimeoutError("x")), False),
        (ImportError("libx.so: cannot read file data: Input/output error"), False),
        (ImportError("CUDA error: out of memory"), False),
        (UnboundLocalError("x"), True),
        (IndentationError("x"), True),
        (AttributeError("x"), False),
        (ConnectionRefusedError("x"), False),
    ],
)
def test_which_errors_stay(error: Exception, stays: bool) -> None:
    assert usererrors.stays(error) is stays
