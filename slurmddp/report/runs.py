"""The list of runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slurmddp.errors import ExternalError, UserError
from slurmddp.report.status import RunStatus, status_of
from slurmddp.runs import index
from slurmddp.runs.evidence import Evidence, evidence
from slurmddp.runs.layout import RunFolder
from slurmddp.runs.summaries import Summaries
from slurmddp.slurm.base import JobId, JobView
from slurmddp.slurm.choose import scheduler_for
from slurmddp.visible import one_line


class Row(NamedTuple):
    """A run of the list. told: `RunStatus.as_dict`; status: None where a summary of the run was at hand."""

    folder: RunFolder
    told: dict[str, Any]
    status: RunStatus | None = None


def list_runs(limit: int, roots: Callable[[], Iterable[Path]], say: Callable[[str], None]) -> list[Row]:
    """Return the newest `limit` runs, oldest first, asking each scheduler once.

    roots: where to look when the index is empty. Runs that are over are not read again: see `Summaries`.
    """
    entries = index.entries() or index.rebuild(roots())
    wanted = [entry.folder for entry in reversed(entries[:limit])]
    summaries = Summaries()
    told = {folder.path: found for folder in wanted if (found := summaries.of(folder)) is not None}
    fresh = _statuses([folder for folder in wanted if folder.path not in told], say)
    for status in fresh.values():
        summaries.keep(status.folder, status.state, status.as_dict())
    summaries.save()
    rows = []
    for folder in wanted:
        if folder.path in told:
            rows.append(Row(folder, told[folder.path]))
        elif folder.path in fresh:
            rows.append(Row(folder, fresh[folder.path].as_dict(), fresh[folder.path]))
    return rows


def _statuses(folders: Sequence[RunFolder], say: Callable[[str], None]) -> dict[Path, RunStatus]:
    """Read the folders, ask each scheduler once."""
    found: list[tuple[RunFolder, Evidence]] = []
    for folder in folders:
        try:
            found.append((folder, evidence(folder)))
        except (UserError, OSError) as error:
            say(f"warning: {folder.path}: {error}")
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
    return {
        folder.path: status_of(
            folder,
            facts,
            views.get(facts.job_id) if facts.job_id else None,
            facts.job_id is None or facts.job_id.is_local not in silent,
            list(facts.notes),
        )
        for folder, facts in found
    }


def runs_table(found: Sequence[Row]) -> str:
    """Return one line per run: id, state, job, step, folder."""
    if not found:
        return "no runs yet"
    rows: list[tuple[str, ...]] = [("RUN", "STATE", "JOB", "STEP", "FOLDER")]
    for row in found:
        step = "" if row.told["step"] is None else str(row.told["step"])
        cells = (row.told["run_id"], row.told["state"], row.told["job_id"], step, row.told["run_folder"])
        rows.append(tuple(map(one_line, cells)))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows
    )
