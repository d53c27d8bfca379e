"""What the ranks of a script of the user's own get to load at their next start, and what is kept of it."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slurmddp.records import next_save
from slurmddp.records import rank_events as ranks
from slurmddp.run.create import write_key
from slurmddp.runtime.agent.handlers import Saves
from slurmddp.runtime.journal import Events, read_events
from slurmddp.shared.run_folder import RunFolder

from .harness import PATIENCE, ROOT

WENT_ON = ranks.Restarted("went on", 10, 9, 9, None, "the script went on at step 10")
FROM_ZERO = ranks.Restarted("from zero", 1, 9, 9, 9, "the script started again from step 1")


class Own:
    """A run of a script that saves in out/, beside the run folder. Its first start is long ago."""

    def __init__(self, root: Path, *earlier: str) -> None:
        self.out = root / "out"
        self.out.mkdir()
        self.run = RunFolder(root / "run")
        self.run.checkpoints.mkdir(parents=True)
        self.events = Events(self.run.events, attempt=0, node="here", rank=None)
        self.saves = Saves(self.run, self.events, [str(self.out)], earlier)

    def save(self, name: str, text: bytes = b"x" * 1000, folder: Path | None = None) -> str:
        path = (folder or self.out) / name
        path.write_bytes(b"\x80\x02" + text + b".")
        return str(path)

    def told(self, kind: Any) -> list[Any]:
        return [event.facts for event in read_events(self.run.events, kind)]


@pytest.fixture
def own(tmp_path: Path) -> Own:
    made = Own(tmp_path)
    made.save("of another run.pt")
    os.utime(made.out / "of another run.pt", (1, 1))
    made.events.write(ranks.RankStarted(1.0))
    return made


def test_the_newest_save_since_the_run_began(own: Own, tmp_path: Path) -> None:
    assert own.saves.before_start() == "", "what was there before is none of this run"
    path = own.save("last.pt")
    assert own.saves.before_start() == path
    inside = own.save("model", folder=own.run.checkpoints)
    os.utime(inside, (time.time() + 5,) * 2)
    assert own.saves.before_start() == inside


def test_before_the_first_start_there_is_none_unless_another_run_is_continued(tmp_path: Path) -> None:
    first = Own(tmp_path)
    first.save("last.pt")
    assert first.saves.before_start() == ""
    (tmp_path / "b").mkdir()
    (tmp_path / "checkpoints").mkdir()
    second = Own(tmp_path / "b", str(tmp_path / "checkpoints"))
    assert second.saves.before_start() == ""
    theirs = second.save("model", folder=tmp_path / "checkpoints")
    assert second.saves.before_start() == theirs and not second.run.kept.exists(), "nobody writes over it"
    assert second.saves.before_start() == theirs
    assert second.save("last.pt") == second.saves.before_start()


def test_a_save_is_copied_until_a_start_went_on_from_it(own: Own) -> None:
    own.save("last.pt", b"good" * 100)
    own.saves.before_start()
    own.saves.before_start()
    (kept,) = own.told(ranks.SaveKept)
    assert kept == ranks.SaveKept(str(own.out / "last.pt"), str(own.run.kept / "001-last.pt"), 403, "")
    assert own.told(ranks.KeepingSave) == [ranks.KeepingSave(kept.path, 403, 60)]
    own.events.write(FROM_ZERO)
    own.save("last.pt", b"bad")
    own.saves.before_start()
    assert b"good" in Path(kept.kept).read_bytes() and (own.run.kept / "002-last.pt").exists()
    own.events.write(WENT_ON)
    own.save("last.pt", b"better")
    assert own.saves.before_start() and len(own.told(ranks.SaveKept)) == 2
    own.events.write(FROM_ZERO)
    own.saves.before_start()
    assert len(own.told(ranks.SaveKept)) == 3


def test_copies_are_for_their_owner_alone(own: Own) -> None:
    """Whatever the umask and the mode of the save: the run folder may be open to others."""
    own.save("last.pt")
    os.chmod(own.out / "last.pt", 0o644)
    before = os.umask(0)
    try:
        own.saves.before_start()
    finally:
        os.umask(before)
    assert (own.run.kept / "001-last.pt").exists() and own.run.kept.stat().st_mode & 0o777 == 0o700


def test_a_folder_is_copied_and_a_checkpoint_of_the_library_is_not(own: Own) -> None:
    step = own.run.checkpoints / "step-7"
    step.mkdir()
    own.save("model", folder=step)
    assert own.saves.before_start() == str(step)
    assert (own.run.kept / "001-step-7/model").exists()
    (step / "COMPLETE").write_text("x")
    shutil.rmtree(own.run.kept)
    assert own.saves.before_start() == str(step) and not own.run.kept.exists()


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("MOST_BYTES", 1500, "0.001 MB, and all copies together may have 0.0015 MB"),
        ("PATIENCE", 0, "the copy took longer than 0 s"),
    ],
)
def test_what_is_too_large_or_too_slow_is_not_kept(
    own: Own, name: str, value: float, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.save("a.pt")
    own.saves.before_start()
    monkeypatch.setattr(next_save, name, value)
    path = own.save("b.pt")
    os.utime(path, (time.time() + 5,) * 2)
    assert own.saves.before_start() == path, "it can be loaded"
    told = own.told(ranks.SaveKept)[-1]
    assert (told.path, told.kept, told.why) == (path, "", why)


#: It knows no --reflink, as busybox's. With a file beside it, the disk is full.
CP = """\
#!/bin/sh
[ "$2" != --reflink=auto ] || exit 1
[ ! -e "$0.full" ] || { echo x >"$3"; echo "cp: disk full" >&2; exit 1; }
exec /bin/cp "$@"
"""


def test_a_cp_without_reflink_and_one_that_fails(own: Own, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cp = tmp_path / "bin/cp"
    cp.parent.mkdir()
    cp.write_text(CP)
    cp.chmod(0o755)
    monkeypatch.setenv("PATH", f"{cp.parent}:{os.environ['PATH']}")
    own.save("a.pt")
    own.saves.before_start()
    assert own.told(ranks.SaveKept)[-1].why == ""
    (cp.parent / "cp.full").touch()
    os.utime(own.save("b.pt"), (time.time() + 5,) * 2)
    own.saves.before_start()
    assert own.told(ranks.SaveKept)[-1].why == "cp: disk full"


#: Each rank notes its arguments. The first start saves, and fails once both have begun.
SCRIPT = """\
import os, pickle, sys, time
rank, start = os.environ["RANK"], os.environ["SLURMDDP_START"]
with open(f"argv-{start}-{rank}", "w") as file:
    file.write(" ".join(sys.argv[1:]))
if start == "0" and rank == "0":
    with open("out/last.pt", "wb") as file:
        pickle.dump([0] * 1000, file)
    while not os.path.exists("argv-0-1"):
        time.sleep(0.1)
    sys.exit(1)
time.sleep(3 if start == "0" else 0)
"""


@pytest.mark.parametrize("module", [False, True])
def test_all_ranks_of_a_restart_get_the_arguments(tmp_path: Path, module: bool) -> None:
    (tmp_path / "own.py").write_text(SCRIPT)
    (tmp_path / "out").mkdir()
    run = tmp_path / "run"
    run.mkdir()
    write_key(run / "rendezvous.key")
    wanted = {"watch": [str(tmp_path / "out")], "args": ["--resume", "{checkpoint}", "--x={checkpoint}"]}
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "SLURMDDP_RUN": str(run), "SLURMDDP_ATTEMPT": "0"}
    command = [sys.executable, "-m", "slurmddp.runtime.agent", str(run), "--nnodes=1", "--nproc-per-node=2"]
    command += ["--max-restarts=1", "--monitor-interval=0.1", "--rdzv-backend=slurmddp-c10d", "--rdzv-id=1"]
    command += ["-m", "slurmddp.runtime.begin", *(["-m", "own"] if module else ["own.py"]), "--lr", "3"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**environment, "SLURMDDP_RESUME": json.dumps(wanted)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    save = tmp_path / "out/last.pt"
    for rank in (0, 1):
        assert (tmp_path / f"argv-0-{rank}").read_text() == "--lr 3"
        assert (tmp_path / f"argv-1-{rank}").read_text() == f"--lr 3 --resume {save} --x={save}"
    assert (run / "kept/001-last.pt").read_bytes() == save.read_bytes()
