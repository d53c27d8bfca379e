"""A script of the user's own is watched without a change to it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .harness import PATIENCE, ROOT, Run

#: Plain DDP over gloo. BEFORE stands before the training, IN_STEP in each step.
DDP = """\
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

rank = int(os.environ["RANK"])
BEFORE
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, STEPS + 1):
    IN_STEP
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def write(folder: Path, *, steps: int = 12, before: str = "", in_step: str = "pass") -> Path:
    path = folder / "own.py"
    path.write_text(DDP.replace("BEFORE", before).replace("IN_STEP", in_step).replace("STEPS", str(steps)))
    return path


def launch(
    folder: Path, script: Path, *, size: int = 2, observe: dict[str, Any] | None, path: str = "", **more: str
) -> "subprocess.CompletedProcess[str]":
    """The script as node.sh starts it. observe: SLURMDDP_OBSERVE; None: it is not set."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    command += ["-m", "slurmddp.runtime.begin", str(script)]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *([path] if path else [])]),
        "SLURMDDP_RUN": str(folder),
        "SLURMDDP_NODE": "here",
        "SLURMDDP_ATTEMPT": "0",
        "OMP_NUM_THREADS": "1",
        **({"SLURMDDP_OBSERVE": json.dumps(observe)} if observe is not None else {}),
        **more,
    }
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_steps_of_a_plain_script_are_seen(tmp_path: Path) -> None:
    """With a sitecustomize of the user's own, data workers that fork, and a child of python -c."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/sitecustomize.py").write_text("import sys\nprint('mine', sys.argv[0][-6:], file=sys.stderr)\n")
    before = """
class Data(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, index):
        import threading
        return torch.tensor(sum("slurmddp" in thread.name for thread in threading.enumerate()))
seen = [sum("slurmddp" in thread.name for thread in __import__("threading").enumerate())]
seen += [int(value) for value in torch.utils.data.DataLoader(Data(), num_workers=1)]
import subprocess
code = "import sys, torch, threading; print('slurmddp.runtime.observe.observer' in sys.modules)"
child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
print("seen", rank, *seen, child, flush=True)
"""
    done = launch(tmp_path, write(tmp_path, before=before), observe={}, path=str(tmp_path / "mine"))
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"seen {rank} 1 0 0 False" in done.stdout, "one thread in the rank, none in its workers and its child"
    assert "mine own.py" in done.stderr
    run = Run(tmp_path)
    lines = run.lines("metrics.jsonl")
    assert [line["step"] for line in lines][-1] == 12 and lines[-1]["steps_per_second"] > 0
    assert {line["attempt"] for line in lines} == {0}
    (first,) = run.events("first_step")
    assert first["rank"] == 0 and 1 <= first["step"] <= 12
    assert (tmp_path / "progress").read_text() == "12\n"
    assert "slurmddp: warning" not in done.stderr


def test_without_its_variable_nothing_is_seen(tmp_path: Path) -> None:
    done = launch(tmp_path, write(tmp_path, steps=2), size=1, observe=None)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "metrics.jsonl").exists() and not (tmp_path / "progress").exists()


def test_a_failure_of_the_observer_does_not_stop_the_script(tmp_path: Path) -> None:
    """It cannot start in one rank, and fails later in the other one."""
    before = """
from slurmddp.runtime.observe import observer
if rank == 0: observer.Observer._look = None
print("trained", rank, flush=True)
"""
    done = launch(tmp_path, write(tmp_path, before=before, in_step="time.sleep(0.02)"), observe={})
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("rank 0 is no longer observed") == 1 and "rank 1 is" not in done.stderr
    broken = launch(tmp_path, write(tmp_path, steps=2), size=1, observe={"period": "x"})
    assert broken.returncode == 0, broken.stderr
    assert broken.stderr.count("slurmddp: warning") == 1


def test_a_step_that_the_script_tells_counts_more(tmp_path: Path) -> None:
    """Steps of a state that was loaded count too, where the optimizer has them."""
    before = "progress = os.environ['SLURMDDP_PROGRESS_FILE']"
    told = "open(progress, 'w').write(f'{1000 + step}') if step > 3 else None; time.sleep(0.2)"
    script = write(tmp_path, steps=8, before=before, in_step=told)
    done = launch(tmp_path, script, size=1, observe={"period": 0.1}, SLURMDDP_PROGRESS_FILE=str(tmp_path / "progress"))
    assert done.returncode == 0, done.stderr
    assert Run(tmp_path).lines("metrics.jsonl")[-1]["step"] == 1008
    assert (tmp_path / "progress").read_text() == "1008"


def test_steps_of_a_loaded_state_count(tmp_path: Path) -> None:
    adam = """
import io
model = torch.nn.Linear(4, 4)
def train(optimizer, steps):
    for _ in range(steps):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
old = torch.optim.AdamW(model.parameters())
train(old, 5)
new = torch.optim.AdamW(model.parameters())
new.load_state_dict(old.state_dict())
train(new, 3)
raise SystemExit(0)
"""
    done = launch(tmp_path, write(tmp_path, before=adam), size=1, observe={})
    assert done.returncode == 0, done.stderr
    assert Run(tmp_path).lines("metrics.jsonl")[-1]["step"] == 8
