"""The job's values as job.sh hands them over, and what Slurm is asked about the job."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmddp.records.rehearsal import VERDICT, Verdict
from slurmddp.supervisor.attempt import Attempts
from slurmddp.supervisor.brain.types import Job, Settings
from slurmddp.supervisor.files import Files
from slurmddp.supervisor.job import Job as RealJob
from slurmddp.supervisor.job import Nodes
from slurmddp.supervisor.loop import Loop
from slurmddp.supervisor.scheduler import Slurm
from slurmddp.supervisor.values import OPTIONAL, Values, read

WORDS = {
    "scheduler": "slurm", "own_script": "yes", "requeue_policy": "chain", "must_save": "", "preflight": "only",
    "breaker": "4", "stop_lead": "120", "cancel_grace": "", "nodes_min": "2", "nodes_max": "", "max_gpu_hours": "1.5",
    "watch": '["/data/out"]', "from_zero": "2", "python": "/opt/python3", "odd": "a=b",
}  # fmt: skip
GIVEN = ["/run/r1/", "/tmp/x", *(f"{name}={text}" for name, text in WORDS.items())]


def test_what_job_sh_hands_over_is_read_and_handed_on() -> None:
    found = read([*GIVEN, "--", "--mem=0", "--overlap", "--", "--mpi=none", "--"])
    words = dict.fromkeys(OPTIONAL, "") | WORDS
    assert found == Values("/run/r1", "/tmp/x", words, ("--mem=0", "--overlap"), ("--mpi=none", "--"))
    assert read(found.write()) == found
    assert read(GIVEN)[3:] == ((), ()) and read([*GIVEN, "--", "--mem=0"])[3:] == (("--mem=0",), ())
    assert (found.number("breaker"), found.number("cancel_grace")) == (4, None)
    assert found.yes("own_script") and not found.yes("must_save")


def test_settings_and_programs() -> None:
    found = read(GIVEN)
    assert found.settings() == Settings(
        "/run/r1", "slurm", True, "chain", False, "only", 4, 120, None, 2, 1, 1.5, 2,
        ("/run/r1/checkpoints", "/data/out"),
    )  # fmt: skip
    assert found.program("guard")[-4:] == [
        "/run/r1/code/python.sh",
        "/opt/python3",
        "/run/r1/code/slurmddp.zip",
        "guard",
    ]
    assert found.node_script()[-2:] == ["/run/r1", "/run/r1/node.sh"]
    assert found.node_script()[:2] == ["bash", "-c"]
    free = read([word if not word.startswith(("max_gpu", "breaker")) else word.split("=")[0] + "=" for word in GIVEN])
    assert (free.settings().max_gpu_hours, free.settings().breaker) == (None, 3)


@pytest.mark.parametrize(
    ("text", "rehearsed"),
    [
        (Verdict(True, ("it resumed",)).text(), True),
        (Verdict(False).text(), False),
        (Verdict().text(), None),
        ("{", None),
    ],
)
def test_the_verdict_of_a_rehearsal_is_read_from_the_run_folder(
    tmp_path: Path, text: str, rehearsed: bool | None
) -> None:
    files = Files(str(tmp_path))
    assert files.rehearsed() is None
    (tmp_path / VERDICT).write_text(text)
    assert files.rehearsed() is rehearsed


class Played:
    """A loop whose commands answer what stands here, by their first two words."""

    def __init__(self, **answers: tuple[int, str]) -> None:
        self.answers, self.asked = answers, list[list[str]]()

    def run(self, words: list[str], *_: Any, **__: Any) -> SimpleNamespace:
        self.asked.append(words)
        code, text = self.answers.get("_".join(words[:3:2]), self.answers.get(words[0], (1, "")))
        return SimpleNamespace(code=code, text=text)


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    return lambda **answers: Slurm(Played(**answers))  # type: ignore[arg-type]


def test_a_controller_that_is_silent_changes_nothing(slurm: Any) -> None:
    silent = slurm(scontrol=(1, "slurm_load_jobs error: Unable to contact slurm controller"))
    assert not silent.ask() and silent.job == Job(restarts=1, restarts_then=1)
    assert silent.nodes() is None and silent.end_time() is None
    assert silent.count_gpus({}) == 0


def test_what_slurm_says_of_the_job(slurm: Any) -> None:
    line = (
        "JobId=7 JobState=RUNNING Reason=None Requeue=1 Restarts=2 StartTime=2026-01-02T03:04:05 "
        "PreemptTime=None EndTime=2026-01-02T04:04:05 NodeList=n[1-3] JOB_GRES=gpu:a100:4,gpu:2,shard:9"
    )
    job = slurm(scontrol=(0, line), scontrol_hostnames=(0, "n1\nn2\nn3\n"), date=(0, "1767326645\n"))
    assert job.ask() and (job.job.state, job.job.restarts, job.job.restarts_then) == ("RUNNING", 2, 1)
    assert job.takes_steps() and job.nodes() == ["n1", "n2", "n3"] and job._loop.asked[-1][-1] == "n[1-3]"
    assert job.end_time() == 1767326645.0 and job.count_gpus({}) == 6
    env = {"SLURM_GPUS": "4", "SLURM_GPUS_PER_NODE": "4", "HOME": "/h"}
    job.count_gpus(env)
    assert env == {"HOME": "/h"}


def test_a_step_on_some_nodes(slurm: Any) -> None:
    words = slurm().step(["n1", "n2"], ["--overlap"], "/run/%N.log", ["bash", "x"])
    assert words[:4] == ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]
    assert words[-2:] == ["bash", "x"] and "--output=/run/%N.log" in words and "--overlap" in words


@pytest.mark.parametrize(("state", "ends"), [("RUNNING", False), ("COMPLETING", True), ("CANCELLED", True)])
def test_a_cancel_whose_signal_was_lost_is_seen(slurm: Any, state: str, ends: bool) -> None:
    """When a step fails, and when the nodes are listed: of a job that ends, Slurm lists those with processes of it."""
    asked = slurm(scontrol=(0, f"JobId=7 JobState={state} Reason=None NodeList=n1"), scontrol_hostnames=(0, "n1\n"))
    job = RealJob.__new__(RealJob)
    job.ending, job.loop, job.nodes, job.step_options, job.env = "", Loop(), Nodes(1, 2), [], dict(os.environ)
    job.nodes.renew(["n1", "n2"])
    job.folder = SimpleNamespace(confirm=lambda: None)  # type: ignore[assignment]
    job.values = SimpleNamespace(yes=lambda _: False, number=lambda _: 1)  # type: ignore[assignment]
    job.scheduler = SimpleNamespace(
        slurm=False, step=lambda *given: given[-1], ends_job=asked.ends_job, nodes=asked.nodes
    )
    job.exclude = lambda reason, nodes, note: None  # type: ignore[method-assign]
    for words, code in ((["true"], 0), (["false"], 1)):
        job.ending = ""
        job.loop.on_signal(signal.SIGTERM, lambda: setattr(job, "ending", "cancelled"))
        assert job.on_nodes("log", words, lambda: None) == code
        assert bool(job.ending) == (ends and code == 1)
    attempts = Attempts.__new__(Attempts)
    attempts.job, job.ending = job, ""
    assert attempts.list_nodes() == ([] if ends else ["n2"])


def test_a_signal_that_comes_while_slurm_is_asked_is_taken_once(slurm: Any) -> None:
    """By then, the job may take no signal any more: what becomes of it is told."""
    job = RealJob.__new__(RealJob)
    job.ending, job.loop, job.nodes, job.step_options, job.env = "", Loop(), Nodes(1, 1), [], dict(os.environ)
    job.folder = SimpleNamespace(confirm=lambda: None)  # type: ignore[assignment]
    job.values = SimpleNamespace(yes=lambda _: False)  # type: ignore[assignment]

    def ends_job() -> bool:
        job.ending = "time limit"
        job.loop.be_deaf()
        return True

    job.scheduler = SimpleNamespace(slurm=False, step=lambda *given: given[-1], ends_job=ends_job)
    assert job.on_nodes("log", ["false"], lambda: None) == 1
