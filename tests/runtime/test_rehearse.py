"""`slurmddp check SCRIPT --rehearse`: what scripts of users' own do after a kill and a request to stop. Real ranks."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .harness import PATIENCE, ROOT

#: SAVE, LOAD and STOP stand for what differs.
SCRIPT = """\
import os
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(400, 8), torch.randn(400, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=10, sampler=sampler)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
first = 0


def save(epoch):
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(state, "snapshot.part")
        os.replace("snapshot.part", "snapshot.pt")


LOAD
ddp = torch.nn.parallel.DistributedDataParallel(model)
for epoch in range(first, 12):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        (ddp(x) - y).pow(2).mean().backward()
        optimizer.step()
    SAVE
    STOP
dist.destroy_process_group()
"""
LOADS = """\
if os.path.exists("snapshot.pt"):
    saved = torch.load("snapshot.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["epoch"] + 1
"""
STOPS = "if should_stop(): break"
#: One call of step for each group of parameters, as DeepSpeed does.
BY_GROUP = """\
optimizer = torch.optim.AdamW([{"params": [each]} for each in model.parameters()], lr=0.01)
groups, plain = optimizer.param_groups, optimizer.step


def step():
    for group in groups:
        optimizer.param_groups = [group]
        plain()
    optimizer.param_groups = groups


optimizer.step = step
"""
SHARDED = {
    "import torch.distributed as dist": """\
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard""",
    "torch.nn.Linear(8, 1)": "fully_shard(torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 1)))",
    "ddp = torch.nn.parallel.DistributedDataParallel(model)": "ddp = model",
    "LOAD": """\
saved = sorted(os.path.dirname(path) for path in glob.glob("saved-*/.metadata"))
if saved:
    parts = dict(zip("mo", get_state_dict(model, optimizer)))
    dcp.load(parts, checkpoint_id=saved[-1])
    set_state_dict(model, optimizer, model_state_dict=parts["m"], optim_state_dict=parts["o"])
    first = int(saved[-1].split("-")[1]) + 1
""",
    "SAVE": 'dcp.save(dict(zip("mo", get_state_dict(model, optimizer))), checkpoint_id=f"saved-{epoch:02}")',
    "STOP": STOPS,
}


def answer(done: subprocess.CompletedProcess[str]) -> tuple[int, dict[str, Any]]:
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def started(folder: Path, *, save: str, load: str = "", stop: str = "") -> subprocess.CompletedProcess[str]:
    text = SCRIPT.replace("SAVE", save or "pass").replace("LOAD", load).replace("STOP", stop or "pass")
    if stop:
        text = "from slurmddp.runtime import should_stop\n" + text
    (folder / "train.py").write_text(text)
    return command(folder, "train.py")


def command(folder: Path, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ, "XDG_STATE_HOME": str(folder / "state"), "XDG_CONFIG_HOME": str(folder / "config"),
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    words = words or ("check", script, "--rehearse", "--json")
    return subprocess.run(
        [sys.executable, "-m", "slurmddp", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def rehearse(folder: Path, *, save: str = "save(epoch)", load: str = "", stop: str = "") -> tuple[int, dict[str, Any]]:
    return answer(started(folder, save=save, load=load, stop=stop))


def test_a_script_that_saves_and_resumes_right(tmp_path: Path) -> None:
    (tmp_path / "snapshot.pt").write_text("the user's own")
    code, told = rehearse(tmp_path, load=LOADS, stop=STOPS)
    assert code == 0 and told["resumes"] is True, told
    kill, stop, half = told["sentences"]
    assert kill.startswith("Killed after step 11, it resumed at step 8; its parameters and losses up to step ")
    assert kill.endswith(" are the same as without the kill.")
    assert stop.startswith("Asked to stop after step 11, it saved at step 16 "), (
        "a busy machine may end it before it exits"
    )
    assert half == "Then started on 1 rank, it resumed at step 16."
    assert told["not_compared"] == [] and told["folder"] is None
    assert (tmp_path / "snapshot.pt").read_text() == "the user's own"
    (verdict,) = (tmp_path / "state" / "slurmddp" / "rehearsals").iterdir()
    assert json.loads(verdict.read_text())["resumes"] is True


@pytest.mark.long
def test_sharded_parameters_are_known_again_on_fewer_ranks(tmp_path: Path) -> None:
    text = "import glob\nfrom slurmddp.runtime import should_stop\n" + SCRIPT
    for old, new in SHARDED.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "train.py").write_text(text)
    code, told = answer(command(tmp_path, "train.py"))
    assert code == 0 and told["not_compared"] == [], told
    kill, stop, half = told["sentences"]
    assert kill.startswith("Killed after step 11, it resumed at step 8; "), kill
    assert "are the same" in kill and stop.startswith("Asked to stop after step 11, it saved at step 16 "), told
    assert half == "Then started on 1 rank, it resumed at step 16."


@pytest.mark.long
def test_a_script_that_saves_nothing(tmp_path: Path) -> None:
    code, told = rehearse(tmp_path, save="")
    assert code == 1 and told["resumes"] is False, told
    kill, stop, half = told["sentences"]
    assert (
        kill
        == "Killed after step 6, it began at step 0 again: it had saved nothing that torch.save or Checkpointer writes."
    )
    assert stop.startswith("Asked to stop after step 6, it ") and stop.endswith(" (all: it saved nothing) lost.")
    assert half == "Then started on fewer ranks: not tried."


@pytest.mark.long
def test_a_script_that_saves_but_begins_at_0(tmp_path: Path) -> None:
    code, told = rehearse(tmp_path, load=BY_GROUP)
    assert code == 1 and told["resumes"] is False, told
    assert told["sentences"][0] == "Killed after step 11, it began at step 0 again."


@pytest.mark.long
def test_a_script_that_cannot_load_its_save(tmp_path: Path) -> None:
    code, told = rehearse(tmp_path, load=LOADS.replace('torch.load("snapshot.pt")', "{}"))
    assert code == 1 and told["resumes"] is False, told
    assert told["sentences"][0].startswith("Killed after step 11, it failed when it was started again: "), told
    assert "KeyError: 'model'" in told["sentences"][0] and "; 2 starts in a row" in told["sentences"][0]
    runs = [path.name for path in Path(told["folder"]).iterdir() if path.name.startswith("work-")]
    assert sorted(runs) == ["work-kill-save-8", "work-stop", "work-undisturbed-8"], "a longer one would tell no more"


@pytest.mark.long
def test_a_save_of_the_model_alone_comes_first(tmp_path: Path) -> None:
    save = "dist.get_rank() == 0 and torch.save(model.state_dict(), 'best.pt'); epoch % 3 == 2 and save(epoch)"
    code, told = rehearse(tmp_path, save=save, load=LOADS)
    assert code == 0 and told["sentences"][0].startswith("Killed after step 27, it resumed at step 24; "), told


@pytest.mark.long
def test_a_sampler_that_does_not_allow_shorter_epochs(tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples" / "plain_ddp.py", tmp_path)
    subprocess.run(["git", "apply", str(ROOT / "examples" / "plain_ddp.diff")], cwd=tmp_path, check=True)
    done = command(tmp_path, "plain_ddp.py")
    assert done.returncode == 0, done.stderr
    kill = json.loads(done.stdout)["sentences"][0]
    assert ", it resumed at step 100; " in kill and kill.endswith(" are the same as without the kill."), kill


@pytest.mark.long
def test_a_script_that_loads_no_optimizer(tmp_path: Path) -> None:
    code, told = rehearse(tmp_path, load=LOADS.replace('optimizer.load_state_dict(saved["optimizer"])', "pass"))
    assert code == 0 and told["resumes"] is True, told
    # Epochs of 20 batches: a difference is confirmed without shorter ones.
    assert "it resumed at step 20, but went on differently: " in told["sentences"][0]
    assert "the optimizer's or the schedule's state" in told["sentences"][0]


@pytest.mark.long
def test_a_script_that_writes_elsewhere_is_not_rehearsed(tmp_path: Path) -> None:
    own = tmp_path / "results"
    own.mkdir()
    (own / "best.pt").write_text("the user's own")
    done = started(tmp_path, save=f"import shutil; shutil.rmtree({str(own)!r}); save(epoch)")
    assert done.returncode == 2 and "Read-only file system: 'best.pt'" in done.stderr, done.stderr
    assert (own / "best.pt").read_text() == "the user's own"


#: In place of `data = TensorDataset(`: 10 samples, a batch, take 20 ms.
SLOW = """\
import time


class Slow(TensorDataset):
    def __getitem__(self, index):
        time.sleep(0.002)
        return super().__getitem__(index)


data = Slow("""


@pytest.mark.long
def test_tune_runs_a_script_on_one_and_two_ranks_and_names_its_slow_loader(tmp_path: Path) -> None:
    (tmp_path / "snapshot.pt").write_text("the user's own")
    text = SCRIPT.replace("SAVE", "save(epoch)").replace("LOAD", "").replace("STOP", "pass")
    text = text.replace("range(first, 12)", "range(10**6)").replace("data = TensorDataset(", SLOW)
    (tmp_path / "train.py").write_text(text)
    done = command(tmp_path, "train.py", "tune", "train.py", "--json", "--set", "resources.ranks_per_node=2")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [(each["ranks"], each["parts"]["data"] > 0.015) for each in told["points"]] == [(1, True), (2, True)]
    assert told["limited_by"] == "data" and told["memory"] is None and told["noise_scale"] is None
    assert set(told["choice"]["options"]) == {"resources.ranks_per_node"}
    assert (tmp_path / "snapshot.pt").read_text() == "the user's own"
