"""`slurmddp check --preflight` and `--rehearse`: a job that is submitted and watched to its end."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import typer

from slurmddp.cluster.base import JobId
from slurmddp.cluster.client import ask
from slurmddp.commands import options as opt
from slurmddp.errors import SlurmddpError, UserError
from slurmddp.job.plan.model import Plan
from slurmddp.job.plan.sbatch import STOP_SIGNAL
from slurmddp.job.resolve import Request
from slurmddp.launch.cancel import cancel_run
from slurmddp.launch.inside import ranks_program
from slurmddp.launch.prepare import Prepared, prepare
from slurmddp.launch.requeue_hold import state_now
from slurmddp.launch.submit import submit
from slurmddp.records.events import Event, Kind, keys_of, newest, of
from slurmddp.records.job_events import AttemptStarted, JobStarted, Network, Requeued
from slurmddp.records.metrics import Metrics
from slurmddp.records.preflight import read
from slurmddp.records.rank_events import CheckpointFailed, CheckpointSaved, Resumed, Started
from slurmddp.records.values import number
from slurmddp.run.cause import find_cause
from slurmddp.run.events import read_events
from slurmddp.run.evidence import evidence
from slurmddp.run.gate import OwnRun, own
from slurmddp.run.layout import RunFolder
from slurmddp.run.metrics import behind
from slurmddp.run.state import RunState
from slurmddp.shared.files import read_json
from slurmddp.styled import styled
from slurmddp.visible import one_line

#: What a preflight changes of the job: DEFAULTS give way to the user's own options, CHANGES do not.
DEFAULTS = (("resources.time", "10m"), ("network.measure", "true"))
CHANGES = (("recovery.preflight", "only"), ("recovery.requeue", "never"))
_LOOK_EVERY = 1.0


def preflight(request: Request, *, as_json: bool) -> set[str]:
    """Submit a job for the same nodes and GPUs, wait for it and print what it found of nodes and network.

    Return the severities of what it found. The job is cancelled if anything ends the waiting.
    """

    def options(changes: tuple[tuple[str, str], ...]) -> list[tuple[str, str, str]]:
        return [(key, value, f"the preflight's {key}") for key, value in changes]

    prepared = prepare(replace(request, options=[*options(DEFAULTS), *request.options, *options(CHANGES)]))
    opt.show_notes(prepared)
    folder, state = watched(prepared)
    passed = state.state == "done"
    facts = evidence(folder)
    try:
        verdict = folder.attempt_logs(facts.attempt or 0) / "preflight" / "verdict.json"
        lines = list(read(read_json(verdict, folder.path)).lines())
    except (OSError, ValueError):
        lines = []
    cause = None if passed else find_cause(folder, facts.attempt)
    why = cause and cause.line_with_log()
    network = newest(facts.events, Network)
    if network is None:
        network = Network(None, f"not measured: {unmeasured(prepared.plan, passed=passed)}", None)
    if as_json:
        answer = {"schema": 1, "run": folder.id, "passed": passed, "state": state.line, "cause": why, "lines": lines}
        typer.echo(opt.json_text({**answer, "excluded": dict(facts.excluded), "network": keys_of(network)}))
    else:
        for line in (*(f"node    {line}" for line in lines), f"network {network.text}"):
            typer.echo(one_line(line))
        failed = styled("FAILED", "bad") + one_line(f"  {why or state.line}")
        typer.echo(styled("The job can train on this cluster.", "good") if passed else failed)
    return set() if passed else {"error"}


def watched(prepared: Prepared) -> tuple[OwnRun, RunState]:
    """Submit a job, and wait for its end; whatever ends the waiting cancels it. How it is, is said when it changes."""
    folder, said = own(RunFolder(Path(submit(prepared).run_folder)), to="cancel it"), ""
    opt.say(f"run     {folder.id} (Ctrl-C cancels it)")
    try:
        while (state := state_now(folder)).going:
            if state.line != said:
                said = state.line
                opt.say(f"  {said}")
            time.sleep(_LOOK_EVERY)
    except BaseException:
        opt.say(cancel_run(folder, now=True).text)
        raise
    return folder, state


def unmeasured(plan: Plan, *, passed: bool) -> str:
    """Return why a preflight measured no network."""
    if plan.nodes.max == 1:
        return "the job has one node"
    if not plan.measures_network:
        return "network.measure is off"
    return "only one node passed the preflight" if passed else "the job ended before"


#: What the rehearsal changes of the job. Every step is logged, and nothing is saved but what the rehearsal asks for.
_REHEARSAL = (
    ("train.log_every", "1"),
    ("checkpoint.interval", "1d"),
    ("checkpoint.every_steps", "null"),
    ("recovery.requeue", "always"),
)
#: Steps between two things that happen, so that there is something to compare.
_STEPS = 5
#: Seconds for what does not wait in the queue: starting, saving, restarting.
_PATIENCE = 900.0


class Step(NamedTuple):
    """One thing that was tried. seconds: how long it took."""

    name: str
    seconds: float
    detail: str


class RehearsalFailed(SlurmddpError):
    """A step of the rehearsal failed. step: its name."""

    def __init__(self, step: str, why: str) -> None:
        super().__init__(why)
        self.step = step


class Rehearsal:
    """Submits a job, breaks it, and looks at what becomes of it."""

    def __init__(self, prepared: Prepared) -> None:
        if not (site := prepared.plan.site).queues:
            what = f"site {site.name} has no Slurm, so nothing would requeue the job"
            raise UserError(what, todo="use a cluster's site")
        handed = submit(prepared)
        self.folder = own(RunFolder(Path(handed.run_folder)), to="rehearse it")
        self._job = JobId.parse(handed.job_id)
        self._said = ""
        self._killed_at = 0
        self._tolerance = 1e-6 if prepared.resolved.job.train.deterministic else 0.05

    def steps(self) -> Iterator[Step]:
        """Do one step after the other. Raises RehearsalFailed for the first that fails; the run is cancelled then."""
        for name, function in (
            ("train", self._train),
            ("save at the time limit", self._save),
            ("requeue and resume", self._resume),
            ("restart after a killed rank", self._kill),
            ("same losses after the restart", self._compare),
            ("save and exit", self._finish),
        ):
            began = time.monotonic()
            try:
                detail = function(name)
            except BaseException:
                self.cancel()
                raise
            yield Step(name, time.monotonic() - began, detail)

    def cancel(self) -> None:
        """Cancel the run, if there is anything left of it."""
        if state_now(self.folder).going:
            opt.say(cancel_run(self.folder, now=True).text)

    def _train(self, step: str) -> str:
        self._wait(step, lambda: self._events(JobStarted), None)
        self._wait(step, lambda: self._last_step() >= _STEPS)
        (started,) = self._events(Started)[-1:]
        return f"{started.world} ranks on {started.nodes} nodes, step {self._last_step()}"

    def _save(self, step: str) -> str:
        done = ask(("scancel", "--batch", f"--signal={STOP_SIGNAL}", self._job.id))
        if done.code != 0:
            raise RehearsalFailed(step, f"scancel --signal failed: {done.text.strip()}")
        over = (CheckpointSaved, CheckpointFailed, Requeued)
        self._wait(step, lambda: any(isinstance(event.facts, over) for event in self._all_events()))
        if not self._events(CheckpointSaved):
            failed = self._events(CheckpointFailed)
            raise RehearsalFailed(step, failed[-1].why if failed else "the job was requeued without a checkpoint")
        saved = self._events(CheckpointSaved)[-1]
        return f"step {saved.step}, {(saved.bytes or 0) / 1e6:,.0f} MB in {saved.seconds or 0:.1f} s"

    def _resume(self, step: str) -> str:
        self._wait(step, lambda: self._events(Requeued))
        self._wait(step, lambda: len(self._events(JobStarted)) > 1, None)
        self._wait(step, lambda: self._events(Resumed))
        resumed, saved = self._events(Resumed)[-1], self._events(CheckpointSaved)[-1]
        if resumed.step != saved.step:
            raise RehearsalFailed(step, f"it resumed at step {resumed.step}, and step {saved.step} was saved")
        self._wait(step, lambda: self._last_step() >= (resumed.step or 0) + _STEPS)
        return f"at step {resumed.step}"

    def _kill(self, step: str) -> str:
        """Kill the last rank of the last node from outside, as the kernel would for want of memory."""
        event, started = list(of(self._all_events(), AttemptStarted))[-1]
        node, resumed = started.nodes.split()[-1], len(self._events(Resumed))
        rank = (self._events(Started)[-1].world or 1) - 1
        self._killed_at = self._last_step()
        name = f"{self.folder.id}-{event.job_id}-{event.attempt}"
        program = (*ranks_program(self.folder), "kill", name, str(rank))
        where = ("--overlap", f"--jobid={event.job_id}", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--mem=0")
        done = ask(("srun", *where, *program))
        if done.code != 0:
            why = done.text.strip() or "it is not there"
            raise RehearsalFailed(step, f"rank {rank} on node {node} could not be killed: {why}")
        self._wait(step, lambda: len(self._events(Resumed)) > resumed)
        # The newest line may be from before the kill: only later ones show that training continues.
        known = len(self._rows())
        self._wait(step, lambda: any(row.step > self._killed_at for row in self._rows()[known:]))
        again = self._events(Resumed)[-1]
        return f"rank {rank} on {node}, killed after step {self._killed_at}; resumed at step {again.step}"

    def _compare(self, step: str) -> str:
        """The steps between the checkpoint and the kill were done twice: on the same samples, from the same weights."""
        losses: dict[int, list[float]] = {}
        for row in self._rows():
            loss = number(row.figures.get("loss"))
            if row.step <= self._killed_at and loss is not None:
                losses.setdefault(row.step, []).append(loss)
        twice = {number: values for number, values in losses.items() if len(values) > 1}
        if not twice:
            raise RehearsalFailed(step, "no step was repeated, so there is nothing to compare")
        worst = max(abs(values[0] - values[-1]) / max(abs(values[0]), 1e-12) for values in twice.values())
        verdict = f"{len(twice)} steps repeated, the losses differ by {worst:.1e} at most"
        if worst > self._tolerance:
            raise RehearsalFailed(step, verdict)
        return verdict

    def _finish(self, step: str) -> str:
        saved = len(self._events(CheckpointSaved))
        cancel_run(self.folder, now=False)
        self._wait(step, lambda: not state_now(self.folder).going, over=True)
        if len(self._events(CheckpointSaved)) == saved:
            raise RehearsalFailed(step, f"no checkpoint was saved: {state_now(self.folder).line}")
        return f"step {self._events(CheckpointSaved)[-1].step}"

    def _wait(
        self, step: str, condition: Callable[[], Any], patience: float | None = _PATIENCE, *, over: bool = False
    ) -> None:
        """Wait for a condition. patience: None for what may wait in the queue; over: the run's end is no failure."""
        until = time.monotonic() + patience if patience else None
        while not condition():
            state = state_now(self.folder)
            if not state.going and not over and not condition():
                raise RehearsalFailed(step, f"the run is over: {state.line}")
            if state.line != self._said:
                self._said = state.line
                opt.say(f"  {step}: {state.line}")
            if until is not None and time.monotonic() > until:
                raise RehearsalFailed(step, f"no progress for {patience:.0f} s; the run is {state.line}")
            time.sleep(_LOOK_EVERY)

    def _all_events(self) -> Sequence[Event]:
        return read_events(self.folder.events, self.folder.path).records

    def _events(self, kind: type[Kind]) -> list[Kind]:
        return [facts for _, facts in of(self._all_events(), kind)]

    def _rows(self) -> list[Metrics]:
        return [row for rows, _ in behind(self.folder.metrics, 0) for row in rows]

    def _last_step(self) -> int:
        rows = self._rows()
        return rows[-1].step if rows else 0


def rehearse(request: Request, *, as_json: bool) -> set[str]:
    """Submit the job, send it the signal of its time limit, wait until it resumes, kill a rank, compare the losses."""
    prepared = prepare(request.adding(*((key, value, f"the rehearsal's {key}") for key, value in _REHEARSAL)))
    opt.show_notes(prepared)
    rehearsal = Rehearsal(prepared)
    opt.say(f"run     {rehearsal.folder.id} (Ctrl-C cancels it)")
    steps, failed = [], None
    try:
        for step in rehearsal.steps():
            steps.append(step)
            if not as_json:
                typer.echo(styled("ok", "good") + f"      {step.name}: {step.detail} ({step.seconds:.0f} s)")
    except RehearsalFailed as error:
        failed = error
    if as_json:
        why = None if failed is None else {"step": failed.step, "why": str(failed)}
        verdict = {"schema": 1, "run": rehearsal.folder.id, "survived": failed is None, "failed": why}
        typer.echo(opt.json_text({**verdict, "steps": [step._asdict() for step in steps]}))
    elif failed is not None:
        typer.echo(styled("FAILED", "bad") + f"  {failed.step}: {failed}")
        typer.echo(f"Your job did not survive this step on this cluster. See: slurmddp logs {rehearsal.folder.id}")
    else:
        typer.echo("Your job survives its time limit, a requeue and a crashed rank on this cluster.")
    return set() if failed is None else {"error"}
