"""Programs of others, whose rank is killed, which reach the time limit, and which are cancelled: what is said of them.

They need a folder with their sources: tests/README.md. SLURMDDP_OTHERS_KEEP names a folder to which all output is
written, to be read: an assertion finds only the untrue word that it was written for.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from . import others
from .cluster import Cluster
from .frameworks import Environment
from .host import LOGIN
from .others import OTHERS, Other
from .proof import Receiver
from .runs import Run, submitted

pytestmark = [pytest.mark.cluster, pytest.mark.long]

KINDS = ("started", "requeued", "recovered", "hang", "warning", "stopping", "failed", "finished")
KEEP = "SLURMDDP_OTHERS_KEEP"
PATIENCE = 420
COMMANDS = {"status": 60, "doctor": 120, "status --time": 60, "runs": 60}


@pytest.fixture(scope="session")
def sources() -> Path:
    folder = others.sources()
    if folder is None:
        pytest.skip(f"{others.VARIABLE} names no folder with the sources of programs of others: see tests/README.md")
    return folder


@pytest.fixture(scope="session")
def environment(sources: Path, cluster: Cluster, torch_image: str) -> Environment:
    return others.make_others_environment(cluster, torch_image)


@pytest.fixture(scope="session")
def receiver(cluster: Cluster) -> Iterator[Receiver]:
    receiver = Receiver(cluster, 20_000 + os.getpid() % 10_000)
    yield receiver
    receiver.stop()


@dataclass
class Told:
    """A run of a program of others, and everything that was said of it."""

    other: Other
    run: Run
    receiver: Receiver
    submit: str
    keep: Path | None
    looks: dict[str, str] = field(default_factory=dict)

    def command(self, *words: str, timeout: float = 60) -> str:
        """What a command says, on both streams, behind its exit code."""
        done = self.run.cluster.run(LOGIN, ["slurmddp", *words], check=False, timeout=timeout)
        return f"{done.stdout}{done.stderr}[exit code {done.returncode}]\n"

    def look(self, when: str) -> None:
        """Keep what each command says now."""
        for word, timeout in COMMANDS.items():
            words = [] if word == "runs" else [self.run.id]
            self.looks[f"{when} {word}"] = self.command(*word.split(), *words, timeout=timeout)
        self.save()

    def status(self) -> dict[str, Any]:
        return self.run.status()[1]

    def doctor(self) -> dict[str, Any]:
        done = self.run.cluster.run(LOGIN, ["slurmddp", "doctor", self.run.id, "--json"], check=False, timeout=120)
        return json.loads(done.stdout)

    def report(self) -> str:
        """The page's text, without its marks."""
        path = f"{others.HOME}/{self.run.id}.html"
        self.command("report", self.run.id, "-o", path, "--force", timeout=120)
        page = self.run.cluster.machine_path(path).read_text()
        page = re.sub(r"<(style|script|svg)\b.*?</\1>", "", page, flags=re.DOTALL)
        text = re.sub(r"\s*\n\s*", "\n", re.sub(r"<[^>]+>", " ", page))
        self.looks["end report"] = text
        return text

    @property
    def alerts(self) -> list[dict[str, Any]]:
        return self.receiver.alerts(self.run)

    def causes(self, kind: str) -> list[str]:
        return [str(each["cause"]) for each in self.alerts if each["kind"] == kind]

    def kinds(self) -> list[str]:
        return [each["kind"] for each in self.alerts]

    def job_starts(self) -> int:
        return len(self.events("job_started"))

    def log(self) -> str:
        return (self.run.folder / "logs/job.log").read_text()

    def events(self, name: str) -> list[dict[str, Any]]:
        return [row for row in self.run.lines("events.jsonl") if row["event"] == name]

    def save(self) -> None:
        """Write all of it below the folder that $SLURMDDP_OTHERS_KEEP names."""
        if self.keep is None:
            return
        self.keep.mkdir(parents=True, exist_ok=True)
        alerts = "\n".join(json.dumps(each, indent=1) for each in self.alerts)
        texts = {"submit": self.submit, **self.looks, "alerts": alerts, "job.log": self.log()}
        texts["events"] = (self.run.folder / "events.jsonl").read_text()
        for name, text in texts.items():
            (self.keep / f"{name.replace(' ', '-')}.txt").write_text(text)


@pytest.fixture
def start(
    cluster: Cluster, torch_image: str, environment: Environment, receiver: Receiver, sources: Path
) -> Iterator[Any]:
    """A function that submits a program; its run is over when the test is."""
    started: list[Told] = []

    def submit(other: Other, scenario: str, limit: str) -> Told:
        folder = others.install(cluster, torch_image, environment, other, sources, scenario)
        alerts = f"alerts=[{{to: json, url_env: HOOK, insecure: true, on: [{', '.join(KINDS)}]}}]"
        settings = [f"resources.ranks_per_node={other.ranks_per_node}", "resources.cpus_per_node=2", alerts]
        settings += ["resources.mem_per_node=2900M", *other.settings]
        words = [other.script, "--site", "testcluster", "--image", torch_image, "--nodes", str(other.nodes)]
        words += ["--time", limit, *environment.options, *(word for each in settings for word in ("--set", each))]
        before = {each["run_id"] for each in runs(cluster)}
        done = cluster.run(
            LOGIN, ["slurmddp", "submit", *words, "--", *other.arguments], cwd=folder, env={"HOOK": receiver.url}
        )
        keep = Path(os.environ[KEEP]) / f"{other.title}-{scenario}" if os.environ.get(KEEP) else None
        (answer,) = (each for each in runs(cluster) if each["run_id"] not in before and each["run_id"] in done.stdout)
        run = Run(cluster, {**answer, "run_folder": f"/home/alice/runs/{answer['run_id']}"})
        submitted.append(run)
        started.append(Told(other, run, receiver, done.stdout + done.stderr, keep))
        return started[-1]

    yield submit
    for told in started:
        told.save()
        told.command("cancel", told.run.id, "--now", "--yes")


def runs(cluster: Cluster) -> list[dict[str, Any]]:
    return json.loads(cluster.run(LOGIN, ["slurmddp", "runs", "--limit", "1000", "--json"]).stdout)


each_program = pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.title)


@each_program
def test_a_killed_rank(other: Other, start: Any) -> None:
    told = start(other, "kill", "20m")  # a busy machine needs minutes until the step
    trains(told, other.kill_at)
    node, rank = kill(told)
    restarted = told.run.wait_for_event("restarted", timeout=PATIENCE)
    time.sleep(15)  # until the next line of metrics.jsonl, so that the commands have something to say
    told.look("restarted")
    told.command("cancel", told.run.id, "--now")
    ended(told)
    killed = f"rank {rank} on {node}: killed by SIGKILL"
    went_on = other.after_a_kill == "went on"
    word = {"went on": "recovered once", "from zero": "started again from step 1", "unknown": "unknown whether"}
    assert restarted["how"] == other.after_a_kill, restarted
    for when in ("restarted", "end"):
        status, doctor, goodput = (told.looks[f"{when} {name}"] for name in ("status", "doctor", "status --time"))
        assert killed in status and word[other.after_a_kill] in status, status
        assert killed in doctor and (went_on or word[other.after_a_kill] in doctor), doctor
        assert ("recovered once" in goodput) == ("recovered once" in status) == went_on, goodput
        assert ("goodput  n/a" in goodput) == (other.after_a_kill == "unknown"), goodput
        assert ("\nlost " in goodput) == (other.after_a_kill != "unknown"), goodput
    (alert,) = (each for each in told.alerts if each["kind"] in ("recovered", "warning"))
    assert (alert["kind"] == "recovered", alert["node"], alert["rank"]) == (went_on, node, rank), alert
    assert killed in alert["cause"] and (went_on or word[other.after_a_kill] in alert["cause"]), alert
    assert told.status()["state"] == "cancelled" and told.job_starts() == 1 and not told.events("requeued")


@each_program
def test_the_time_limit(other: Other, start: Any) -> None:
    told = start(other, "limit", "2m30s")
    ended(told)
    stopped_at_the_limit(told)
    assert told.kinds() == ["started", "stopping"], told.alerts


@each_program
def test_a_cancelled_run(other: Other, start: Any) -> None:
    told = start(other, "cancel", "10m")
    trains(told, 10)
    told.looks["cancel"] = told.command("cancel", told.run.id)
    told.look("asked")
    ended(told)
    promise = re.match(
        rf"Job {told.run.job_id} has (\d+) s to save and exit, then its ranks are terminated. It will not be requeued.",
        told.looks["cancel"],
    )
    assert promise, told.looks["cancel"]
    (asked,), (over,), (terminated,) = map(told.events, ("cancel_requested", "job_ended", "ranks_terminated"))
    grace = int(promise[1])
    assert grace <= over["time"] - asked["time"] < grace + 60 and terminated["waited"] == grace, (asked, over)
    assert f"cancelled by you, its ranks did not exit within {grace} s" in told.looks["end status"]
    assert f"cancelled by you, its ranks did not exit within {grace} s" in told.looks["end report"]
    assert told.status()["state"] == "cancelled" and told.job_starts() == 1
    (row,) = (line for line in told.looks["end runs"].splitlines() if line.startswith(told.run.id))
    assert " cancelled " in row, row
    assert "was cancelled with slurmddp cancel" in told.looks["end doctor"] and told.doctor()["root"] is None
    assert told.kinds() == ["started", "stopping"] and told.causes("stopping") == ["cancelled by the user"]
    assert "cancelled by the user; decision: stopped" in told.log()


def trains(told: Told, step: int) -> None:
    told.run.wait_for_step(step, timeout=PATIENCE)


def kill(told: Told) -> tuple[str, int]:
    """SIGKILL for the last rank; its node and number."""
    rank = told.other.nodes * told.other.ranks_per_node - 1
    found = [each for each in told.run.processes(f"RANK={rank}") if told.other.script in each[2]]
    node, process, _ = min(found, key=lambda each: each[1])
    told.run.cluster.run(node, ["kill", "-KILL", str(process)], user="root")
    return node, rank


def ended(told: Told) -> None:
    """Wait for the end of the run, and keep all that is said of it then."""
    told.run.wait("stopped", "timed out", "cancelled", timeout=PATIENCE)
    told.look("end")
    told.report()
    told.save()


def stopped_at_the_limit(told: Told) -> None:
    """Nothing was saved where slurmddp looks: it is said so, once, and the job does not start again."""
    assert told.job_starts() == 1 and not told.events("requeued")
    assert told.doctor()["root"]["cause"] == "time-limit"
    (cause,) = told.causes("stopping")
    why = f"the script saved nothing in {told.run.answer['run_folder']}/checkpoints since this job began"
    assert cause.startswith("time limit") and why in cause and "a requeued job may begin again" in cause, cause
    if told.events("job_ended"):  # on a busy machine, Slurm kills job.sh before it has written that
        assert f"stopped: time limit; {why}" in told.looks["end status"], told.looks["end status"]
        assert f"stopped: time limit; {why}" in told.looks["end report"]
        assert told.log().splitlines()[-1].endswith("decision: stopped")
    else:
        assert told.status()["state"] == "timed out", told.looks["end status"]
