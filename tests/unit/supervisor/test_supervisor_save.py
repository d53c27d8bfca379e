"""launch.mode srun: the supervisor chooses the save that all ranks load, and keeps a copy, before it starts them."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmddp.records import rank_events as ranks
from slurmddp.records.cause import Cause
from slurmddp.records.events import Event, parse
from slurmddp.records.json_lines import append, dump
from slurmddp.supervisor import save
from slurmddp.supervisor.files import Files
from slurmddp.supervisor.loop import Loop
from slurmddp.supervisor.save import choose_save
from tests.helpers import supervisor

PROGRAM = supervisor("save")[:-1]
OLD = sorted(Path.home().glob(".pyenv/versions/3.6.*/bin/python"))


class Played(SimpleNamespace):
    """A job whose run folder is a real one, with a script that saves in out/."""

    def __init__(self, root: Path, *, needed: bool = True, inside: str = "", earlier: Sequence[str] = ()) -> None:
        run, self.out = root / "run", root / "out"
        self.logs_folder = run / "logs/attempt-001"
        self.logs_folder.mkdir(parents=True)
        self.out.mkdir()
        files = Files(str(run))
        saves = {"watch": [inside or str(self.out)], "needed": needed, "earlier": list(earlier)}
        words = {"watch": json.dumps([str(self.out)]), "saves": json.dumps(saves)}
        super().__init__(run=str(run), logs=str(self.logs_folder), attempt=1, exit_code=0, env={}, ending=False)
        self.said: list[str] = []
        self.program = list(PROGRAM)
        self.loop, self.say = Loop(), self.said.append
        self.scheduler = SimpleNamespace(host="n1")
        self.watch = SimpleNamespace(noted=None)
        self.values = SimpleNamespace(
            words=words, program=lambda name: [*self.program, name], watched=lambda: [str(self.out)]
        )
        self.folder = SimpleNamespace(known=lambda default, name, *words: getattr(files, name)(*words))
        self.looks = 0

    def must_end(self) -> bool:
        return self.ending

    def look(self) -> None:
        self.looks += 1

    def began(self) -> None:
        """Its first start was a minute ago."""
        event = Event(ranks.RankStarted(1.0), time.time() - 60, 0, node="n1", rank=0)
        append(f"{self.run}/events.jsonl", dump(event.write()))

    def save(self, name: str = "last.pt") -> str:
        (self.out / name).write_bytes(b"\x80\x02weights.")
        return str(self.out / name)

    def choose(self) -> bool:
        return choose_save(self, self.look)  # type: ignore[arg-type]

    def events(self) -> list[Any]:
        lines = Path(self.run, "events.jsonl").read_bytes().splitlines()
        return [(event.node, event.attempt, event.facts) for line in lines if (event := parse(line))]


@pytest.mark.parametrize("python", [sys.executable, *map(str, OLD[-1:])])
def test_the_newest_save_is_chosen_for_all_ranks_and_kept(tmp_path: Path, python: str) -> None:
    job = Played(tmp_path)
    job.program[0] = python
    path = job.save()
    assert job.choose() and job.env["SLURMDDP_CHECKPOINT"] == "", "before the first start, nothing is of this run"
    job.began()
    assert job.choose() and job.env["SLURMDDP_CHECKPOINT"] == path and job.said == []
    kept = f"{job.run}/kept/001-last.pt"
    keeping, done = ranks.KeepingSave(path, 10, 60), ranks.SaveKept(path, kept, 10, "")
    assert job.events()[1:] == [("n1", 1, keeping), ("n1", 1, done)]
    assert Path(kept).read_bytes() == Path(path).read_bytes() and job.looks


def test_torchruns_agents_choose_for_themselves(tmp_path: Path) -> None:
    job = Played(tmp_path)
    job.values.words["saves"] = ""
    assert job.choose() and job.env == {} and not job.looks


def test_ranks_get_the_path_that_their_container_has(tmp_path: Path) -> None:
    job = Played(tmp_path, inside="/data/out")
    job.save()
    job.began()
    assert job.choose() and job.env["SLURMDDP_CHECKPOINT"] == "/data/out/last.pt"


@pytest.mark.parametrize(
    ("path", "hosts", "insides", "found"),
    [
        ("/scratch/me/a/x.pt", ["/scratch/me/a"], ["/data/a"], "/data/a/x.pt"),
        ("/scratch/me/logs/3/x.ckpt", ["/scratch/me/logs/*/x.ckpt"], ["/data/logs/*/x.ckpt"], "/data/logs/3/x.ckpt"),
        ("/scratch/mean/x.pt", ["/scratch/me/a"], ["/data/a"], "/scratch/mean/x.pt"),
        ("/run/checkpoints/1", ["/scratch/me", "/run/b"], ["/data", "/run/b"], "/run/checkpoints/1"),
        ("", ["/scratch/me"], ["/data"], ""),
    ],
)
def test_paths_of_the_host_and_of_the_container(path: str, hosts: list[str], insides: list[str], found: str) -> None:
    assert save._inside(path, hosts, insides) == found


@pytest.mark.parametrize("needed", [True, False])
def test_without_an_answer_no_script_that_needs_its_arguments_starts(tmp_path: Path, needed: bool) -> None:
    job = Played(tmp_path, needed=needed)
    job.program = [sys.executable, "-c", "raise SystemExit(7)"]
    job.env["SLURMDDP_CHECKPOINT"] = "/of the attempt before"
    text = "could not find out the newest save of the script (exit code 7)"
    assert job.choose() is not needed and job.said == [text] and job.env["SLURMDDP_CHECKPOINT"] == ""
    assert (job.exit_code, job.watch.noted) == ((1, Cause(text)) if needed else (0, None))


def test_a_file_system_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "MOST", 0.3)
    job = Played(tmp_path)
    job.program = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert not job.choose() and job.watch.noted.text.endswith("(no answer within 0 s)")


def test_a_job_that_must_end_does_not_wait(tmp_path: Path) -> None:
    job = Played(tmp_path)
    job.program = [sys.executable, "-c", "import time; time.sleep(60)"]
    look: Callable[[], None] = lambda: setattr(job, "ending", True)  # noqa: E731
    began = time.monotonic()
    assert choose_save(job, look) and job.said == []  # type: ignore[arg-type]
    assert time.monotonic() - began < 10 and job.env["SLURMDDP_CHECKPOINT"] == ""


def test_saves_of_the_run_that_is_continued(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "model.pt").write_bytes(b"\x80\x02weights.")
    os.utime(theirs / "model.pt", (1e9, 1e9))
    job = Played(tmp_path, earlier=[str(theirs)])
    assert job.choose() and job.env["SLURMDDP_CHECKPOINT"] == str(theirs / "model.pt")
    assert not Path(job.run, "kept").exists()
