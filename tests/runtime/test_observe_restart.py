"""What a start of somebody else's script went on from, where an earlier start has made steps."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurmddp.run.rank_starts import start_notices
from tests.helpers import typed

from .harness import PATIENCE, ROOT, Run

#: Five steps per start. BEFORE stands before the training, LATER behind it.
SCRIPT = """\
import os, sys, time
import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.OPTIMIZER(model.parameters(), lr=0.1)

def train(steps):
    for _ in range(steps):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)

BEFORE
train(5)
LATER
"""
SAVE = "torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict()}, 'last.pt')"
LOAD = "state = torch.load('last.pt'); model.load_state_dict(state['model'])"
ALL = f"{LOAD}; optimizer.load_state_dict(state['optimizer'])"


def start(folder: Path, attempt: int, *, optimizer: str = "AdamW", before: str = "pass", later: str = "pass") -> Run:
    """One rank of the script, as node.sh starts it with launch.mode srun."""
    script = folder / "own.py"
    script.write_text(SCRIPT.replace("OPTIMIZER", optimizer).replace("BEFORE", before).replace("LATER", later))
    variables = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "SLURMDDP_RUN": str(folder),
        "SLURMDDP_NODE": "here",
        "SLURMDDP_ATTEMPT": str(attempt),
        "SLURMDDP_OBSERVE": "{}",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }
    command = [sys.executable, "-m", "slurmddp.runtime.begin", str(script)]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=PATIENCE)
    assert "slurmddp: warning" not in done.stderr, done.stderr
    assert done.returncode == (1 if "fails" in before else 0), done.stderr
    return Run(folder)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose first start has made five steps and saved them."""
    folder = tmp_path_factory.mktemp("first")
    assert start(folder, 0, later=SAVE).events("restarted") == [], "nothing was before"
    return folder


@pytest.fixture
def folder(first: Path, tmp_path: Path) -> Path:
    """The same again, for a second start."""
    return Path(shutil.copytree(first, tmp_path / "run"))


#: What slurmddp's library says of a checkpoint that it has loaded, whatever the optimizer counts.
LIBRARY = """
line = '{"time": %s, "event": "resumed", "attempt": 1, "node": "here", "rank": 0, "step": 4}' % time.time()
print(line, file=open("events.jsonl", "a"))
"""
HIDDEN = "import slurmddp.runtime.observe.signs as signs; signs.own_count = lambda optimizer: None"


@pytest.mark.parametrize(
    ("options", "how", "step"),
    [
        ({}, "from zero", 1),
        pytest.param({"optimizer": "SGD"}, "from zero", 1, marks=pytest.mark.long),
        pytest.param({"before": HIDDEN}, "from zero", 1, marks=pytest.mark.long),
        ({"before": ALL}, "went on", 6),
        # As with a count on a GPU: the state is loaded, and how many steps it has is not read.
        ({"before": f"{HIDDEN}; {ALL}"}, "went on", None),
        ({"before": LIBRARY, "optimizer": "SGD"}, "went on", 5),
        ({"before": LOAD}, "unknown", None),
        pytest.param(
            {"before": LOAD.replace("last.pt'", "last.pt', mmap=True")}, "unknown", None, marks=pytest.mark.long
        ),
        pytest.param({"before": LOAD, "optimizer": "SGD"}, "unknown", None, marks=pytest.mark.long),
        pytest.param({"before": "sys.modules['safetensors'] = sys"}, "unknown", None, marks=pytest.mark.long),
        # A first step that only makes the state, as torch.distributed.checkpoint does, and then the loaded one.
        pytest.param({"before": f"train(1); {ALL}"}, "went on", 6, marks=pytest.mark.long),
    ],
)
def test_what_a_start_went_on_from(folder: Path, options: dict[str, str], how: str, step: int | None) -> None:
    (told,) = start(folder, 1, **options).events("restarted")
    assert (told["how"], told["step"], told["before"], told["best"]) == (how, step, 5, 5), told
    assert told["lost"] == (5 if how == "from zero" else None)
    notices = start_notices(typed({"event": "rank_started"}, told))
    assert bool(notices) == (step is None or how == "from zero"), "its step is not shown as one of the run"
    if how == "went on" and step is None:
        assert notices == ("the script went on at an unknown step: its steps are counted from there",)
    if how == "from zero":
        assert told["text"] == "the script started again from step 1: at least 5 steps are lost"
    if how == "unknown" and "safetensors" not in options["before"]:
        assert str(folder / "last.pt") in told["text"]
        assert ("its optimizer began at step 1" in told["text"]) == (options.get("optimizer") != "SGD")


WEIGHTS = "import safetensors.torch as st; st.save_file(model.state_dict(), 'last.safetensors')"
LOAD_WEIGHTS = "from safetensors import safe_open; file = safe_open('last.safetensors', framework='pt')"


@pytest.mark.parametrize(
    ("before", "how"),
    [
        ("import safetensors.torch", "from zero"),
        (f"{LOAD_WEIGHTS}; assert isinstance(file, safe_open) and file.keys()", "unknown"),
        pytest.param(f"{WEIGHTS}; st.load_file(filename='first.safetensors')", "unknown", marks=pytest.mark.long),
    ],
)
def test_what_safetensors_has_read_is_seen(folder: Path, before: str, how: str) -> None:
    start(folder, 1, later=f"{WEIGHTS}; os.link('last.safetensors', 'first.safetensors')")
    (told,) = [told for told in start(folder, 2, before=before).events("restarted") if told["attempt"] == 2]
    assert told["how"] == how, told
    name = "first" if "first" in before else "last"
    assert how == "from zero" or f"it has read {folder / name}.safetensors" in told["text"]


@pytest.mark.long
@pytest.mark.parametrize("newer", [False, True])
def test_a_safetensors_that_may_read_unseen_makes_it_unknown(
    folder: Path, newer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that others may know from before, and one of a version with more ways to read."""
    lines = "import torch, safetensors" if newer else "import safetensors, torch"
    monkeypatch.setitem(globals(), "SCRIPT", SCRIPT.replace("import torch", lines, 1))
    if newer:
        (folder / "safetensors").mkdir()
        (folder / "safetensors/_safetensors_rust.py").write_text("class safe_open: ...\nread_elsewhere = print\n")
        (folder / "safetensors/__init__.py").write_text("from ._safetensors_rust import safe_open\n")
    (told,) = start(folder, 1).events("restarted")
    assert told["how"] == "unknown" and "it uses safetensors, whose reads are not seen" in told["text"]


@pytest.mark.long
def test_a_state_that_is_loaded_after_some_steps_makes_it_unknown(folder: Path) -> None:
    """A learning rate was looked for first, say. Files that this start has written itself are none."""
    own = f"train(4); time.sleep(0.3); {SAVE.replace('last', 'own')}; torch.load('own.pt')"
    assert [told["how"] for told in start(folder, 1, before=own).events("restarted")] == ["from zero"]
    run = start(folder, 2, before=f"train(4); time.sleep(0.3); {ALL}", later="time.sleep(0.3)")
    assert [told["how"] for told in run.events("restarted")] == ["from zero", "from zero", "unknown"]
    assert run.events("restarted")[1]["before"] == 9


@pytest.mark.long
def test_before_the_first_step_nothing_is_lost(tmp_path: Path) -> None:
    start(tmp_path, 0, before="raise ValueError('fails')")
    (told,) = start(tmp_path, 1).events("restarted")
    facts: dict[str, Any] = {"how": "went on", "step": 1, "before": None, "best": None, "lost": None}
    assert facts.items() <= told.items()


@pytest.mark.long
def test_the_best_step_of_all(folder: Path) -> None:
    start(folder, 1, before="train(4)")
    (*_, told) = start(folder, 2).events("restarted")
    start(folder, 3)
    (*_, last) = Run(folder).events("restarted")
    assert (told["before"], told["best"]) == (9, 9)
    assert (last["before"], last["best"], last["lost"]) == (5, 9, 5)


READS = """\
import os, socket, sys, time
from slurmddp.run.rank_starts import start_notices
from slurmddp.runtime.observe.reads import Reads

def found(since, action, until=float("inf")):
    reads = Reads(since)
    reads.until = until
    try:
        action()
    except OSError:
        pass
    reads.active = False
    return reads.found

def connect(address, family=socket.AF_INET):
    with socket.socket(family) as sock:
        sock.setblocking(False)
        sock.connect(address)

print("weights", file=open("state", "w"), flush=True)
print("code", file=open("code.py", "w"), flush=True)
open("lock", "w").close()
before, now = time.time() - 60, time.time() + 60
print(found(before, lambda: open("state", "rb").close()))
print(found(before, lambda: os.close(os.open(b"state", os.O_RDWR))))
print(found(before, lambda: connect(("192.0.2.1", 9))))
for nothing in (
    found(now, lambda: open("state").close()),  # older
    found(before, lambda: open("state").close(), until=before + 1),  # newer
    found(before, lambda: open("state", "a").close()),
    found(before, lambda: open("state", "a+").close()),  # as a log, and as slurmddp's own events
    found(before, lambda: open("code.py").close()),
    found(before, lambda: open("lock", "r+").close()),  # empty
    found(before, lambda: open("absent")),
    found(before, lambda: open("/proc/self/stat").close()),
    found(before, lambda: connect(("127.0.0.1", 9))),
    found(before, lambda: connect("socket", socket.AF_UNIX)),
    found(before, lambda: __import__("json").loads("1")),
):
    assert nothing == "", nothing
"""


def test_what_counts_as_read(tmp_path: Path) -> None:
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", READS]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    state = f"it has read {tmp_path / 'state'}"
    assert done.stdout.splitlines() == [state, state, "it has connected to 192.0.2.1"]
