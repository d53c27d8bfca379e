"""A controller that is slow, silent or just starting: what is tried again, for how long, and what is said then."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmddp.records.cause import Cause
from slurmddp.supervisor import stopping
from slurmddp.supervisor.brain.types import Job, Ledger, Settings
from slurmddp.supervisor.loop import Loop, Output
from slurmddp.supervisor.requeue import Chain, Refused, Requeue
from slurmddp.supervisor.scheduler import Slurm

OK, SILENT = Output(0, ""), Output(None, "")
DOWN = Output(1, "slurm_update error: Unable to contact slurm controller (connect failure)\n")


class Played:
    """A loop whose time is played, and Slurm. answers: of each command in turn, by its first words; the last stays."""

    def __init__(self, **answers: list[Output]) -> None:
        self.now, self.answers, self.commands = 1000.0, answers, list[list[str]]()

    def be_deaf(self) -> None: ...

    def start(self, *_: Any, **__: Any) -> None: ...

    def rest(self, seconds: float) -> None:
        self.now += max(seconds, 0.01)

    def run(self, words: list[str], seconds: float, *_: Any, **__: Any) -> Output:
        self.commands.append(words)
        name = next(word for word in reversed(words) if word in self.answers)
        answers = self.answers[name]
        done = answers.pop(0) if len(answers) > 1 else answers[0]
        self.now += seconds if done.code is None else 0.1
        return done

    def count(self, name: str) -> int:
        return sum(name in words for words in self.commands)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def play(**answers: list[Output]) -> Any:
        made = Played(**answers)
        monkeypatch.setattr(time, "monotonic", lambda: made.now)
        return made

    for name in ("SLURM_RESTART_COUNT", "SLURM_JOB_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    return play


THERE, BACK = Output(0, "JobId=7 JobState=RUNNING Restarts=0"), Output(0, "JobId=7 JobState=PENDING Restarts=1")


@pytest.mark.parametrize(
    "text",
    ["contact slurm controller", "Unable to contact", "Socket timed out on send/recv", "Zero Bytes were transmitted"],
)
def test_a_controller_that_does_not_answer_is_asked_again(play: Callable[..., Any], text: str) -> None:
    loop = play(requeue=[SILENT, Output(1, text), OK], show=[THERE])
    assert Requeue(loop, "7", "7", "n1", "/run").again("", []) == "7"
    assert loop.count("requeue") == 3


def test_a_lost_answer_is_found_in_the_queue(play: Callable[..., Any]) -> None:
    loop = play(requeue=[SILENT], show=[BACK])
    assert Requeue(loop, "7", "7", "n1", "/run").again("", []) == "7" and loop.count("requeue") == 1


def test_a_refusal_is_final_and_says_why(play: Callable[..., Any]) -> None:
    loop = play(requeue=[Output(1, "Access denied\n")], show=[THERE])
    with pytest.raises(Refused, match=r"^could not requeue job 7: Access denied$"):
        Requeue(loop, "7", "7", "n1", "/run").again("", [])
    assert loop.count("requeue") == 1


@pytest.mark.parametrize("done", [SILENT, DOWN], ids=["silent", "down"])
@pytest.mark.parametrize("look", [THERE, SILENT], ids=["looks", "looks in vain"])
@pytest.mark.parametrize("seconds", [25.0, 14.0, -3.0, None])
def test_tries_end_before_slurm_kills(
    play: Callable[..., Any], done: Output, look: Output, seconds: float | None
) -> None:
    for way, answers in ((Requeue, {"requeue": [done]}), (Chain, {"sbatch": [done]})):
        loop = play(**answers, show=[look], squeue=[look._replace(text="")])
        back: Any = Requeue(loop, "7", "7", "n1", "/run") if way is Requeue else Chain(loop, "7", "/runs/a", False)
        if seconds is not None:
            back.seconds = seconds
        with pytest.raises(Refused, match=r": (no answer within \d+ s|slurm_update error: .*)$"):
            back.again("", [])
        assert loop.now - 1000 <= max(back.seconds, 10) + 0.5
        assert loop.now - 1000 > 60 or seconds is not None


def test_a_submission_whose_answer_was_lost_is_not_repeated(play: Callable[..., Any]) -> None:
    others = "9 afterany:7(unfulfilled) /home/alice/eval.sh\n10 afterany:77(unfulfilled) /runs/a/job.sh /runs/a\n"
    ours = "11 afterany:7(unfulfilled),singleton(unfulfilled) /runs/a/job.sh /runs/a\n"
    loop = play(sbatch=[SILENT, Output(0, "sbatch: a word of the site\n12;cluster\n")], squeue=[Output(0, others)])
    assert Chain(loop, "7", "/runs/a", False).again("", []) == "12" and loop.count("sbatch") == 2
    loop = play(sbatch=[SILENT], squeue=[SILENT, DOWN, Output(0, others + ours)])
    assert Chain(loop, "7", "/runs/a", False).again("", []) == "11" and loop.count("sbatch") == 1


@pytest.mark.parametrize("what", ["folder", "job.sh"])
def test_a_script_of_another_user_is_not_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a file away")
    sbatch, run = tmp_path / "sbatch", tmp_path / "run"
    sbatch.write_text("#!/bin/sh\necho 8\n")
    sbatch.chmod(0o755)
    run.mkdir()
    (run / "job.sh").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert Chain(Loop(), "7", str(run), False).again("", []) == "8"
    os.chown(run if what == "folder" else run / "job.sh", 12345, 12345)
    with pytest.raises(Refused, match="another user owns "):
        Chain(Loop(), "7", str(run), False).again("", [])


# --- nodes that are kept out


@pytest.mark.parametrize(
    ("total", "listed", "update"),
    [
        (4, "(null)", "ExcNodeList=n2,n3"),
        (4, "n[8-9],n3", "ExcNodeList=n2,n[8-9],n3"),
        (4, "n2,n3", None),
        (3, "(null)", None),
    ],
    ids=["none yet", "some", "all of them", "too few would be left"],
)
def test_excluded_nodes_are_kept_out_of_the_next_start(
    play: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, total: int, listed: str, update: str | None
) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    job = Output(0, f"JobId=7 JobState=PENDING Restarts=1 ExcNodeList={listed}")
    loop = play(requeue=[OK], partition=[Output(0, f"X TotalNodes={total}")], show=[job], update=[OK])
    way = Requeue(loop, "7", "7", "n1", "/run")
    assert way.keep_out(["n2"]) == "" and not loop.commands, "it was not requeued"
    way.again("", ["n2", "n3", "n2"])
    assert way.keep_out(["n2", "n3", "n2"]) == ""
    updates = [words[-1] for words in loop.commands if "update" in words]
    assert updates == ([] if update is None else [update])


@pytest.mark.parametrize(
    ("job", "update", "text"),
    [(BACK, Output(1, "Job is not pending\n"), "Job is not pending"), (DOWN, OK, "Slurm does not answer")],
)
def test_a_node_that_cannot_be_kept_out_is_no_error(
    play: Callable[..., Any], job: Output, update: Output, text: str
) -> None:
    loop = play(requeue=[OK], partition=[OK], show=[job], update=[update])
    said: list[str] = []
    run: Any = SimpleNamespace(
        loop=loop, requeue=Requeue(loop, "7", "7", "n1", "/run"), attempt=0, settings=Settings("/run"),
        nodes=SimpleNamespace(excluded=["n2"]), folder=SimpleNamespace(confirm=lambda: None),
        say=said.append, event=lambda facts: None, alert=lambda *words: None,
    )  # fmt: skip
    assert stopping.put_back(run, Cause("x"))
    assert said[-1] == f"could not exclude n2 from the next start yet: {text}"


# --- a signal, while Slurm does not answer


@pytest.mark.parametrize(("text", "answered"), [("JobId=7 JobState=RUNNING Reason=None", True), (DOWN.text, False)])
def test_slurm_says_whether_it_has_answered(
    monkeypatch: pytest.MonkeyPatch, play: Callable[..., Any], text: str, answered: bool
) -> None:
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}.items():
        monkeypatch.setenv(name, value)
    assert Slurm(play(show=[Output(0, text)])).ask() is answered


class Scheduler:
    """Slurm, which answers in one of its turns, or never."""

    slurm = True

    def __init__(self, answers: list[Job | None]) -> None:
        self.job, self.answers, self.withdrawn = Job("RUNNING", "None"), answers, False

    def ask(self) -> bool:
        found = self.answers.pop(0)
        self.job = found or self.job
        return found is not None

    def withdraw(self) -> None:
        self.withdrawn = True


@pytest.mark.parametrize(
    ("answers", "stop", "why", "back"),
    [
        ([None, None], None, "time limit", True),
        ([None, None], "preemption", "preemption", True),
        ([None, None], "cancelled by the user", "cancelled", False),
        ([None, Job("CANCELLED", "None")], None, "cancelled", False),
        ([Job("COMPLETING", "TimeLimit")], None, "time limit", True),
    ],
    ids=["unknown", "asked before", "slurmddp cancel", "the second answer", "the first answer"],
)
def test_a_signal_is_understood_without_slurm(
    answers: list[Job | None], stop: str | None, why: str, back: bool
) -> None:
    said: list[str] = []
    way: Any = SimpleNamespace(again=lambda ended_by, excluded: "7", keep_out=lambda excluded: "")
    scheduler = Scheduler(list(answers))
    job: Any = SimpleNamespace(
        ending="", messages=SimpleNamespace(), scheduler=scheduler, count_gpu_time=lambda: None, ledger=Ledger,
        stop_file=lambda: stop, settings=Settings("/run"), attempt=0, say=said.append, child=None, requeue=way,
        keep=lambda before, after: None, loop=Played(), nodes=SimpleNamespace(excluded=[]), event=lambda facts: None,
        alert=lambda *words: None, send=lambda alert: None,
        folder=SimpleNamespace(known=lambda *words: None, confirm=lambda: None),
    )  # fmt: skip
    job.back = False
    stopping.terminated(job, 15)
    assert (job.ending, job.back) == (why, back) and not scheduler.answers
    assert ("Slurm does not answer" in said[0]) == (answers[-1] is None)
    assert not back or 20 < way.seconds <= 25
    assert scheduler.withdrawn == (stop == "cancelled by the user")
