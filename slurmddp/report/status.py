"""How runs are: the run folder's evidence and the scheduler's word, put together for people."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from slurmddp.alerts.secrets import waiting
from slurmddp.cluster.base import JobView
from slurmddp.doctor.rules import known_cause
from slurmddp.errors import ExternalError, UserError
from slurmddp.records.cause import Cause
from slurmddp.records.events import Event, keys_of, of
from slurmddp.records.job_events import AttemptEnded, JobEnded
from slurmddp.records.metrics import Metrics
from slurmddp.records.rank_events import HangOver, HangReported, RankStarted
from slurmddp.report.progress import Progress, find_progress, progress_lines, waits_text
from slurmddp.run import state
from slurmddp.run.cause import failing_attempt, find_cause, hang_of, killed_of
from slurmddp.run.evidence import Evidence, evidence
from slurmddp.run.layout import RunFolder
from slurmddp.run.metrics import tail
from slurmddp.run.rank_starts import heartbeat_notices, newest_restarts, pause_notices, start_notices, without_notices
from slurmddp.run.state import EXIT_CODES, next_commands
from slurmddp.run.written import written_again
from slurmddp.styled import Style, styled
from slurmddp.visible import one_line

if TYPE_CHECKING:
    from slurmddp.report.scaling import Scaling

#: Events that begin a hang of an own script, or end it.
_HANGS = (HangReported, HangOver, RankStarted, AttemptEnded, JobEnded)
#: The decision about an attempt that another one followed.
NEXT = "next"
#: Of the states that are neither bad nor without a style.
_STYLES: dict[str, Style] = {
    "done": "good", "running": "active", "stopping": "active",
    "stopped": "warn", "cancelled": "warn", "requeued": "warn", "not submitted": "warn",
}  # fmt: skip


@dataclass(frozen=True)
class RunStatus:
    """One run: its verdict, the scheduler's job, and the newest line of its metrics.

    facts, view: what the verdict was found from; view is None where the scheduler does not know the job.
    excluded: nodes that the run does without, each with the reason; undelivered: alerts that wait on a disk.
    shared: the files of its working directory that another run wrote, too.
    """

    folder: RunFolder
    state: state.RunState
    facts: Evidence
    view: JobView | None
    metrics: Metrics | None
    notes: tuple[str, ...]
    cause: Cause | None = None
    excluded: Mapping[str, str] = field(default_factory=dict)
    undelivered: int = 0
    progress: Progress = field(default_factory=Progress)
    shared: str | None = None

    @property
    def job_id(self) -> str:
        """Return the id of the run's newest job, "" before the submission."""
        return str(self.facts.job_id or "")

    @property
    def hang(self) -> Event | None:
        """Return the event of the hang of an own script that nobody stopped and that is not over; None without one."""
        hangs = [event for event in self.facts.events if isinstance(event.facts, _HANGS)]
        return hangs[-1] if hangs and isinstance(hangs[-1].facts, HangReported) else None

    @property
    def faults(self) -> list[Event]:
        """Return the events of ranks that a signal ended, oldest first."""
        return [event for event in self.facts.events if killed_of(event)]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return what the newest preflight warned of, what the ranks of an own script told of their start, which agents
        did not run for a while, and which files another run wrote, too."""
        events, shared = self.facts.events, [self.shared] if self.shared else []
        return (
            *self.facts.warnings,
            *start_notices(events),
            *pause_notices(events),
            *without_notices(events),
            *heartbeat_notices(events),
            *shared,
        )

    @property
    def attempt(self) -> int | None:
        return self.facts.attempt

    def with_note(self, note: str) -> RunStatus:
        return replace(self, notes=(*self.notes, note))

    def as_dict(self) -> dict[str, Any]:
        return {
            "run_id": self.folder.id,
            "run_folder": str(self.folder.path),
            "job_id": self.job_id,
            "state": self.state.state,
            "detail": self.state.detail,
            "cause": self.cause and self.cause.line_with_log(),
            "attempt": self.attempt,
            "step": self.progress.step,
            **self.progress.as_dict(),
            "metrics": self.metrics and self.metrics.write(),
            "network": self.facts.network or None,
            "faults": [_fault(event) for event in self.faults],
            "restarts": [_restart(event) for event in newest_restarts(self.facts.events)],
            "excluded": dict(self.excluded),
            "warnings": list(self.warnings),
            "alerts_undelivered": self.undelivered,
            "log": str(self.folder.job_log),
            "notes": list(self.notes),
            "next": next_commands(self.folder.id, self.state.state),
        }


def _fault_line(status: RunStatus, cause: str) -> str:
    """Return the newest fault that the run survived: a rank that was killed, or what ended an attempt, such as an agent
    that did not answer. Empty if there is none, or if `cause` says it."""
    ended = [(event, facts) for event, facts in of(status.facts.events, AttemptEnded) if facts.decision == NEXT]
    killed = status.faults[-1] if status.faults else None
    if ended and (killed is None or (killed.attempt or 0) < (ended[-1][0].attempt or 0)):
        event, facts = ended[-1]
        line = Cause(facts.cause or "unknown", facts.rank, facts.node).line()
        return "" if line == cause else f"attempt {event.attempt} ended: {line}"
    fault = killed_of(killed) if killed else None
    if fault is None or fault.line() == cause:
        return ""
    return fault.line() + (f" (and {len(status.faults) - 1} before)" if len(status.faults) > 1 else "")


def _fault(event: Event) -> dict[str, Any]:
    fields = {"time": event.time, "attempt": event.attempt, "node": event.node, **keys_of(event.facts)}
    return {key: value for key, value in fields.items() if key != "exit_code"}


def _restart(event: Event) -> dict[str, Any]:
    fields = {"time": event.time, "attempt": event.attempt, **keys_of(event.facts)}
    return {key: value for key, value in fields.items() if key != "text"}


def run_status(folder: RunFolder) -> RunStatus:
    """Ask the scheduler and read the folder. A scheduler that does not answer is a note, not an error."""
    try:
        facts, view = state.observe(folder)
    except (ExternalError, UserError) as error:  # also where this machine has no squeue: the folder is here
        facts = evidence(folder)
        return status_of(folder, facts, None, False, [*facts.notes, str(error)])
    return status_of(folder, facts, view, True, facts.notes)


def status_of(
    folder: RunFolder, facts: Evidence, view: JobView | None, answered: bool, notes: Sequence[str]
) -> RunStatus:
    """Return the status of a run whose folder was read and whose scheduler was asked."""
    rows = tail(folder.metrics)
    verdict = state.judge(view, facts, answered=answered)
    progress = find_progress(folder, facts, view, rows, running=verdict.state == "running")
    return RunStatus(
        folder=folder,
        state=verdict,
        facts=facts,
        view=view,
        cause=_cause(folder, facts, verdict, progress),
        metrics=rows[-1] if rows else None,
        notes=tuple(notes),
        excluded=facts.excluded,
        undelivered=_undelivered(folder),
        progress=progress,
        shared=written_again(folder),
    )


def _cause(folder: RunFolder, facts: Evidence, verdict: state.RunState, progress: Progress) -> Cause | None:
    """Why a run failed; of one whose ranks start again and again without a step, the newest error."""
    if verdict.state == "failed":
        return find_cause(folder, facts.attempt)
    if not (verdict.going and progress.loops) or facts.attempt is None:
        return None
    return find_cause(folder, failing_attempt(folder, facts.attempt))


def refreshed(status: RunStatus) -> RunStatus:
    """Return the status with the newest metrics lines. The scheduler is not asked, and events are not read."""
    rows = tail(status.folder.metrics)
    running = status.state.state == "running"
    progress = find_progress(status.folder, status.facts, status.view, rows, running=running)
    return replace(status, metrics=rows[-1] if rows else None, progress=progress)


def _undelivered(folder: RunFolder) -> int:
    """Alerts that could not be sent yet, without those that are being sent."""
    try:
        return sum(not path.name.startswith(".") for path in waiting(folder, os.environ))
    except OSError:
        return 0


def styled_state(state: str) -> str:
    others: Style | None = "bad" if EXIT_CODES[state] == 1 else None
    return styled(state, _STYLES.get(state, others))


def status_lines(
    status: RunStatus,
    goodput: str | None = None,
    recovered: str | None = None,
    scaling: Scaling | None = None,
    gpus: str | None = None,
) -> list[str]:
    """Return the lines of `slurmddp status`. goodput, recovered, gpus: the lines of `report.goodput` and `.gpus`."""
    same = status.progress.step is not None and status.progress.step == status.state.step
    state_line = status.state.line_without_step if same else status.state.line
    state = styled_state(status.state.state)
    lines = [f"run      {one_line(status.folder.id)}", "state    " + state + one_line(state_line.removeprefix(state))]
    told_cause = status.cause
    if told_cause and told_cause.more == status.state.detail:  # the breaker's sentence is the state's detail already
        told_cause = told_cause._replace(more="")
    cause = told_cause.line_with_log() if told_cause else ""
    if cause and cause != status.state.detail:
        lines.append(f"cause    {one_line(cause)}")
    if cause and (known := known_cause(cause)):
        lines.append(one_line(f"doctor   {known.title}: slurmddp doctor {status.folder.id}"))
    if status.state.state == "pending" or status.progress.reason:
        lines.append(f"waits    {waits_text(status.progress.reason, status.progress.starts)}")
    lines.append(f"job      {status.job_id or 'none'}")
    if status.facts.network:
        lines.append(f"network  {one_line(status.facts.network)}")
    if status.attempt is not None:
        lines.append(f"attempt  {status.attempt}")
    lines += progress_lines(status.progress, going=status.state.going)
    if scaling:
        lines.append(one_line(f"scaling  {scaling.line()}"))
    if gpus:
        lines.append(f"gpus     {gpus}")
    if status.state.going and (hang := status.hang) and isinstance(hang.facts, HangReported):
        where, cause_of_hang = hang.facts.stacks or "the logs", hang_of(hang)
        lines.append(one_line(f"hang     {cause_of_hang.line() if cause_of_hang else ''}; stacks in {where}"))
    if recovered:
        lines.append(f"recovered {recovered}")
    if fault := _fault_line(status, cause):
        lines.append(one_line(f"fault    {fault}"))
    for node, reason in status.excluded.items():
        lines.append(one_line(f"without  {node}" + (f": {reason}" if reason else "")))
    lines += [styled("warning", "warn") + one_line(f"  {warning}") for warning in status.warnings]
    if status.undelivered:
        lines.append(f"alerts   {status.undelivered} undelivered, in {status.folder.alert_spool}")
    if goodput:
        lines.append(f"goodput  {goodput}")
    lines += [one_line(f"folder   {status.folder.path}"), one_line(f"log      {status.folder.job_log}")]
    return [*lines, *(line for note in status.notes for line in f"note: {note}".split("\n"))]
