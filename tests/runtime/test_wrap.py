"""launch.wrap: a command starts each rank's program, and passes on its arguments, signals and exit code."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.nsys import nsys_folder

from .harness import PATIENCE, ROOT, free_port

BEGIN = ["-m", "slurmddp.runtime.begin"]
TELL = """\
import json, os, sys
names = ("RANK", "WORLD_SIZE", "PYTHONPATH")
facts = {"argv": sys.argv[1:], "orig": sys.orig_argv[1:3], **{name: os.environ.get(name) for name in names}}
with open(f"{sys.argv[1]}/rank-{os.environ['RANK']}", "w") as file:
    json.dump({**facts, "pid": os.getpid()}, file)
sys.exit(7 if "fail" in sys.argv else 0)
"""
#: Says its arguments and whether it has a rank, and becomes the rest.
WRAP = '#!/bin/bash\necho "wrap $1 ${RANK-none}" >>"$2"\nexec "${@:3}"\n'


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(TELL)
    (tmp_path / "wrap.sh").write_text(WRAP)
    (tmp_path / "wrap.sh").chmod(0o755)
    return tmp_path / "own.py"


def wrapped(words: list[str], program: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    """Start one rank as srun does, or with TORCHELASTIC_RUN_ID as torchrun does."""
    command = [sys.executable, "-u", "-m", "slurmddp.runtime.wrap", str(len(words)), *words, *program]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "3", "WORLD_SIZE": "4", "SLURMDDP_NODE": "n1", **more}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=PATIENCE)


@pytest.mark.parametrize("code", [0, 7])
def test_the_command_starts_the_program(script: Path, code: int) -> None:
    folder = str(script.parent)
    words = [f"{folder}/wrap.sh", "{rank} {node} {attempt}.{restart} $HOME {x}", f"{folder}/wrap.log"]
    program = [*BEGIN, str(script), folder, "it's", *(["fail"] if code else [])]
    done = wrapped(words, program, SLURMDDP_RUN=folder, TORCHELASTIC_RUN_ID="1", SLURMDDP_ATTEMPT="2")
    assert (done.returncode, done.stderr) == (code, "")
    assert Path(folder, "wrap.log").read_text() == "wrap 3 n1 2.0 $HOME {x} none\n"
    seen = json.loads(Path(folder, "rank-3").read_text())
    assert (seen["argv"], seen["RANK"], seen["PYTHONPATH"]) == (program[3:], "3", str(ROOT))
    assert seen["orig"] == ["-u", str(script)], "the interpreter's own options"


def test_a_command_that_is_missing_ends_the_run(script: Path) -> None:
    folder = script.parent
    (folder / "markers").mkdir()
    more = {"SLURMDDP_RUN": str(folder), "SLURMDDP_ATTEMPT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    done = wrapped(["no-such-tool", "x"], [*BEGIN, str(script)], **more)
    assert done.returncode == 1
    message = "launch.wrap: no-such-tool cannot be started where the ranks run: No such file or directory"
    assert done.stderr.startswith(f"slurmddp: rank 0 on node n1: {message}\n"), done.stderr
    assert message in (folder / "markers/attempt-000.json").read_text(), "no other start helps"


@pytest.mark.parametrize("words", [[], ["x", "a"], ["2", "a", "b"], ["0"]])
def test_a_wrong_use(words: list[str]) -> None:
    command = [sys.executable, "-m", "slurmddp.runtime.wrap", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert (done.returncode, done.stderr[:23]) == (2, "slurmddp: error: usage:")


@pytest.mark.ranks(2)
def test_each_rank_of_torchrun_is_behind_it(script: Path) -> None:
    folder = str(script.parent)
    words = [f"{folder}/wrap.sh", "{rank}", f"{folder}/wrap-{{rank}}.log"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2"]
    command += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    command += ["-m", "slurmddp.runtime.wrap", str(len(words)), *words, *BEGIN, str(script), folder]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "SLURMDDP_RUN": folder}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    for rank in ("0", "1"):
        assert Path(folder, f"wrap-{rank}.log").read_text() == f"wrap {rank} none\n"
        seen = json.loads(Path(folder, f"rank-{rank}").read_text())
        assert (seen["RANK"], seen["WORLD_SIZE"]) == (rank, "2")


# --- the examples of the docs, with the real tools


def example(tool: str, run: Path) -> list[str]:
    """The row of docs/debug.md, with the run folder in it as node.sh puts it there."""
    page = (ROOT / "docs/debug.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| {tool} \| `(.*)` \|$", page, re.MULTILINE)
    words: list[Any] = yaml.safe_load(row)
    (run / "logs").mkdir()
    return [str(word).replace("{run}", str(run)) for word in words]


def need(program: str, *trial: str) -> None:
    """Skip where a tool is missing, or the kernel refuses it."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed here")
    done = subprocess.run([program, *trial, "true"], capture_output=True, text=True, check=False, timeout=PATIENCE)
    if done.returncode:
        pytest.skip(f"{program} does not work here: {done.stderr.strip()[-200:]}")


@pytest.mark.parametrize("code", [0, 7])
def test_strace(script: Path, code: int) -> None:
    need("strace", "--output=/dev/null")
    folder = script.parent
    fail = ["fail"] if code else []
    assert wrapped(example("strace", folder), [*BEGIN, str(script), str(folder), *fail]).returncode == code
    assert f'"{folder}/rank-3"' in (folder / "logs/strace-3").read_text(), "what the program opened"
    assert json.loads((folder / "rank-3").read_text())["RANK"] == "3"


@pytest.mark.parametrize("tool", ["perf", "only rank 0"])
def test_perf(script: Path, tool: str) -> None:
    folder = script.parent
    need("perf", "record", f"--output={folder}/trial")
    words = example(tool, folder)
    for rank in ("0", "1"):
        done = wrapped(words, [*BEGIN, str(script), str(folder), "fail"], RANK=rank)
        assert done.returncode == 7, done.stderr
        if tool == "perf":
            assert (folder / f"logs/perf-{rank}").stat().st_size > 0
        else:
            assert ("Performance counter stats" in done.stderr) == (rank == "0")


@pytest.mark.long
def test_nsys(script: Path) -> None:
    folder = script.parent
    words = example("Nsight Systems", folder)
    words[0] = str(nsys_folder() / "nsys")
    words = [word.replace("cuda,", "") for word in words]  # there is no GPU
    done = wrapped(words, [*BEGIN, str(script), str(folder), "fail"])
    assert done.returncode == 7, done.stdout + done.stderr
    assert list((folder / "logs").glob("nsys-3.*"))


def test_a_signal_reaches_the_program_through_strace(script: Path) -> None:
    """torchrun ends a rank by a signal to its process group."""
    need("strace", "--output=/dev/null")
    script.write_text(
        "import signal, sys\nsignal.signal(15, lambda *_: sys.exit(9))\nprint('ready', flush=True)\nsignal.pause()\n"
    )
    words = example("strace", script.parent)
    command = [sys.executable, "-m", "slurmddp.runtime.wrap", str(len(words)), *words, *BEGIN, str(script)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "3"}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
        os.killpg(rank.pid, signal.SIGTERM)
        assert rank.wait(PATIENCE) in (9, -signal.SIGTERM)
