"""How runs are: the run folder's evidence and the scheduler's word, put together for people."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slurmddp.errors import ExternalError, UserError
from slurmddp.runs import index, state
from slurmddp.runs.cause import find_cause
from slurmddp.runs.events import read_lines
from slurmddp.runs.evidence import Evidence, evidence
from slurmddp.runs.layout import RunFolder
from slurmddp.runs.logs import Follower
from slurmddp.slurm.base import JobId, JobView
from slurmddp.slurm.choose import scheduler_for
from slurmddp.visible import one_line

#: Seconds between two questions to the scheduler while a log is followed (the second where the script has written
#: down its end, which a requeue may follow), and between two looks at the files.
ASK_EVERY = 15.0
ASK_WHEN_ENDED = 2.0
LOOK_EVERY = 0.5


@dataclass(frozen=True)
class RunStatus:
    """One run: its verdict, the scheduler's job, and the newest line of its metrics.

    facts, view: what the verdict was found from; view is None where the scheduler does not know the job.
    excluded: nodes that the run does without, each with the reason; undelivered: alerts that wait in the run folder.
    """

    folder: RunFolder
    state: state.RunState
    facts: Evidence
    view: JobView | None
    metrics: dict[str, Any] | None
    notes: tuple[str, ...]
    cause: str | None = None
    excluded: Mapping[str, str] = field(default_factory=dict)
    undelivered: int = 0

    @property
    def job_id(self) -> str:
        """Return the id of the run's newest job, "" before the submission."""
        return str(self.facts.job_id or "")

    @property
    def attempt(self) -> int | None:
        """Return the newest attempt; None before the first."""
        return self.facts.attempt

    def with_note(self, note: str) -> RunStatus:
        """Return the same status with one more note."""
        return replace(self, notes=(*self.notes, note))

    def as_dict(self) -> dict[str, Any]:
        """Return the status for --json. The keys are stable."""
        return {
            "run_id": self.folder.id,
            "run_folder": str(self.folder.path),
            "job_id": self.job_id,
            "state": self.state.state,
            "detail": self.state.detail,
            "cause": self.cause,
            "attempt": self.attempt,
            "step": (self.metrics or {}).get("step"),
            "metrics": self.metrics,
            "excluded": dict(self.excluded),
            "alerts_undelivered": self.undelivered,
            "log": str(self.folder.job_log),
            "notes": list(self.notes),
        }


def run_status(folder: RunFolder) -> RunStatus:
    """Ask the scheduler and read the folder. A scheduler that does not answer is a note, not an error."""
    facts = evidence(folder)
    notes = list(facts.notes)
    view, answered = None, True
    if facts.job_id is not None:
        try:
            view = scheduler_for(facts.job_id).job(facts.job_id)
        except ExternalError as error:
            notes.append(str(error))
            answered = False
    return _status(folder, facts, view, answered, notes)


def _status(folder: RunFolder, facts: Evidence, view: JobView | None, answered: bool, notes: list[str]) -> RunStatus:
    rows = read_lines(folder.metrics).records
    verdict = state.judge(view, facts, answered=answered)
    return RunStatus(
        folder=folder,
        state=verdict,
        facts=facts,
        view=view,
        cause=find_cause(folder, facts.attempt) if verdict.state == "failed" else None,
        metrics=rows[-1] if rows else None,
        notes=tuple(notes),
        excluded=facts.excluded,
        undelivered=_undelivered(folder),
    )


def _undelivered(folder: RunFolder) -> int:
    """Alerts that could not be sent yet, each an entry of the spool."""
    try:
        return sum(not path.name.startswith(".") for path in folder.alert_spool.iterdir())
    except OSError:
        return 0


def list_runs(limit: int, roots: Callable[[], Iterable[Path]], say: Callable[[str], None]) -> list[RunStatus]:
    """Return the newest `limit` runs, oldest first, asking each scheduler once.

    roots: where to look when the index is empty.
    """
    entries = index.entries() or index.rebuild(roots())
    found = []
    for entry in reversed(entries[:limit]):
        try:
            found.append((entry.folder, evidence(entry.folder)))
        except (UserError, OSError) as error:
            say(f"warning: {entry.path}: {error}")
    views: dict[JobId, JobView] = {}
    silent: set[bool] = set()  # is_local of the schedulers that did not answer
    by_scheduler: dict[bool, list[JobId]] = {}
    for _, facts in found:
        if facts.job_id is not None:
            by_scheduler.setdefault(facts.job_id.is_local, []).append(facts.job_id)
    for is_local, job_ids in by_scheduler.items():
        try:
            views |= scheduler_for(job_ids[0]).jobs(job_ids)
        except (ExternalError, UserError) as error:
            say(f"warning: {error}")
            silent.add(is_local)
    return [
        _status(
            folder,
            facts,
            views.get(facts.job_id) if facts.job_id else None,
            facts.job_id is None or facts.job_id.is_local not in silent,
            list(facts.notes),
        )
        for folder, facts in found
    ]


def runs_table(found: list[RunStatus]) -> str:
    """Return one line per run: id, state, job, step, folder."""
    if not found:
        return "no runs yet"
    rows: list[tuple[str, ...]] = [("RUN", "STATE", "JOB", "STEP", "FOLDER")]
    for item in found:
        step = str((item.metrics or {}).get("step", ""))
        cells = (item.folder.id, item.state.state, item.job_id, step, str(item.folder.path))
        rows.append(tuple(map(one_line, cells)))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows
    )


def status_text(found: RunStatus, goodput: str | None = None, recovered: str | None = None) -> str:
    """Return the lines of `slurmddp status`. goodput, recovered: the lines of `report.goodput`."""
    lines = [f"run      {one_line(found.folder.id)}", f"state    {one_line(found.state.line)}"]
    # The breaker's sentence is the state's detail already.
    if found.cause and found.cause != found.state.detail:
        lines.append(f"cause    {one_line(found.cause.removesuffix(f'; {found.state.detail}'))}")
    lines.append(f"job      {found.job_id or 'none'}")
    if found.attempt is not None:
        lines.append(f"attempt  {found.attempt}")
    if found.metrics and "step" in found.metrics:
        loss = found.metrics.get("loss")
        lines.append(
            one_line(f"step     {found.metrics['step']}") + (f", loss {loss:.4g}" if isinstance(loss, float) else "")
        )
    if recovered:
        lines.append(f"recovered {recovered}")
    for node, reason in found.excluded.items():
        lines.append(one_line(f"without  {node}" + (f": {reason}" if reason else "")))
    if found.undelivered:
        lines.append(f"alerts   {found.undelivered} undelivered, in {found.folder.alert_spool}")
    if goodput:
        lines.append(f"goodput  {goodput}")
    lines += [one_line(f"folder   {found.folder.path}"), one_line(f"log      {found.folder.job_log}")]
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def follow_logs(
    folder: RunFolder,
    *,
    ask: Callable[[RunFolder], RunStatus],
    follow: bool,
    node: str | None,
    attempt: int | None,
    say: Callable[[str], None],
) -> Iterator[bytes]:
    """Yield the lines of the logs; with `follow`, until the run is over, while `say` reports its states.

    ask: `run_status`, with whatever else the command does each time.
    Raises UserError for a node without a log.
    """
    follower = Follower(folder, node=node, attempt=attempt)
    if not follow:
        if node is not None and not follower.node_logs():
            known = sorted({path.stem for path in Follower(folder).node_logs()})
            raise UserError(f"no log of node {node}", todo=f"nodes with a log: {', '.join(known) or 'none yet'}")
        nothing = True
        for line in follower.new_lines(to_the_end=True):
            nothing = False
            yield line
        if nothing:
            of = "" if attempt is None else f" of attempt {attempt}"
            say(f"no logs yet{of}: the run is {ask(folder).state.state}")
        return
    asked, told = -ASK_EVERY, ""
    noted: set[str] = set()
    while True:
        ended = False
        if time.monotonic() - asked >= (ASK_WHEN_ENDED if _ended(folder) else ASK_EVERY):
            asked = time.monotonic()
            status = ask(folder)
            now = status.state
            for note in status.notes:
                if note not in noted:
                    say(f"note: {note}")
            noted.update(status.notes)
            ended = now.exit_code != state.EXIT_CODES["running"]
            if now.state != told and now.state != "running":
                say(one_line(now.line))
            told = now.state
        yield from follower.new_lines(to_the_end=ended)
        if ended:
            return
        time.sleep(LOOK_EVERY)


def _ended(folder: RunFolder) -> bool:
    """Return whether job.sh has recorded its exit."""
    return Evidence(events=read_lines(folder.events).records).ended is not None
