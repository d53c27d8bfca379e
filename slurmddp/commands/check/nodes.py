"""`slurmddp check --preflight`: a job of the same shape that checks its nodes and their network, and ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import typer

from slurmddp.commands import options as opt
from slurmddp.job.plan.model import Plan
from slurmddp.launch.cancel import cancel_run
from slurmddp.launch.prepare import Prepared
from slurmddp.launch.requeue_hold import state_now
from slurmddp.launch.submit import submit
from slurmddp.records.events import keys_of, newest
from slurmddp.records.job_events import Network
from slurmddp.records.preflight import read
from slurmddp.run.cause import find_cause
from slurmddp.run.evidence import evidence
from slurmddp.run.gate import own
from slurmddp.run.layout import RunFolder
from slurmddp.run.state import RunState
from slurmddp.shared.files import read_json
from slurmddp.styled import styled
from slurmddp.visible import one_line

#: What is changed of the job: DEFAULTS give way to the user's own options, CHANGES do not.
DEFAULTS = (("resources.time", "10m"), ("network.measure", "true"))
CHANGES = (("recovery.preflight", "only"), ("recovery.requeue", "never"))
_LOOK_EVERY = 1.0


class Checked(NamedTuple):
    """What the preflight found. lines: its verdict, a line per node; network: what was measured, or why nothing.
    cause: why the job could not train, if it could not."""

    passed: bool
    state: str
    cause: str | None
    lines: tuple[str, ...]
    excluded: dict[str, str]
    network: Network

    @property
    def as_dict(self) -> dict[str, Any]:
        """Return the result for --json. The keys are stable."""
        return {**self._asdict(), "lines": list(self.lines), "network": keys_of(self.network)}


class Preflight:
    """Submits the job, and waits for its end. `say` gets a line whenever its state changes."""

    def __init__(self, prepared: Prepared, say: Callable[[str], None]) -> None:
        self.folder, self._say = RunFolder(Path(submit(prepared).run_folder)), say
        self._plan = prepared.plan

    def wait(self) -> Checked:
        """Return the result. The job is cancelled if anything ends the waiting."""
        said = ""
        try:
            while (state := state_now(self.folder)).going:
                if state.line != said:
                    said = state.line
                    self._say(f"  {said}")
                time.sleep(_LOOK_EVERY)
        except BaseException:
            self._say(cancel_run(own(self.folder, to="cancel it"), now=True).text)
            raise
        return self._checked(state)

    def _checked(self, state: RunState) -> Checked:
        facts = evidence(self.folder)
        path = self.folder.attempt_logs(facts.attempt or 0) / "preflight" / "verdict.json"
        try:
            lines = tuple(read(read_json(path, self.folder.path)).lines())
        except (OSError, ValueError):
            lines = ()
        passed = state.state == "done"
        cause = None if passed else find_cause(self.folder, facts.attempt)
        network = newest(facts.events, Network)
        if network is None:
            network = Network(None, f"not measured: {unmeasured(self._plan, passed=passed)}", None)
        told = cause and cause.line_with_log()
        return Checked(passed, state.line, told, lines, dict(facts.excluded), network)


def unmeasured(plan: Plan, *, passed: bool) -> str:
    """Return why a preflight measured no network."""
    if plan.nodes.max == 1:
        return "the job has one node"
    if not plan.network.measure:
        return "network.measure is off"
    return "only one node passed the preflight" if passed else "the job ended before"


def preflight(asked: opt.Asked, *, as_json: bool) -> set[str]:
    """Submit a job for the same nodes and GPUs, wait for it and print what it found of nodes and network."""

    def options(changes: tuple[tuple[str, str], ...]) -> list[tuple[str, str, str]]:
        return [(key, value, f"the preflight's {key}") for key, value in changes]

    asked = asked._replace(options=[*options(DEFAULTS), *asked.options, *options(CHANGES)])
    prepared = asked.prepare(strict=True)
    opt.show_notes(prepared)
    check = Preflight(prepared, opt.say)
    opt.say(f"run     {check.folder.id} (Ctrl-C cancels it)")
    found = check.wait()
    if as_json:
        typer.echo(opt.json_text({"schema": 1, "run": check.folder.id, **found.as_dict}))
    else:
        for line in found.lines:
            typer.echo(one_line(f"node    {line}"))
        typer.echo(one_line(f"network {found.network.text}"))
        if found.passed:
            typer.echo(styled("The job can train on this cluster.", "good"))
        else:
            typer.echo(styled("FAILED", "bad") + one_line(f"  {found.cause or found.state}"))
    return set() if found.passed else {"error"}
