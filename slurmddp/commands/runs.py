"""runs: the list of runs."""

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from slurmddp.commands import options as opt
from slurmddp.errors import UserError
from slurmddp.launch.find import known_runs
from slurmddp.launch.requeue_hold import release_hold
from slurmddp.report.progress import span, waits_text
from slurmddp.report.status import RunStatus, status_of, styled_state
from slurmddp.run import manifest, sweeps
from slurmddp.run.evidence import evidence_of
from slurmddp.run.index import Entry
from slurmddp.run.layout import RunFolder
from slurmddp.run.state import EXIT_CODES, RunState
from slurmddp.run.summaries import Summaries
from slurmddp.run.sweeps import Sweep
from slurmddp.run.unanswered import ask_about
from slurmddp.sites.catalogue import Catalogue
from slurmddp.styled import columns, join
from slurmddp.visible import one_line


class Row(NamedTuple):
    """A run of the list. told: what --json says of it; status: None where a summary of the run was at hand."""

    folder: RunFolder
    told: dict[str, Any]
    status: RunStatus | None = None


def checked_states(states: Iterable[str]) -> frozenset[str]:
    """Return the values of --state. Raises UserError for one that no run can have."""
    if unknown := sorted(set(states) - set(EXIT_CODES)):
        raise UserError(f"--state {unknown[0]!r} is not a state", todo=f"states: {', '.join(EXIT_CODES)}")
    return frozenset(states)


def moment(option: str, text: str) -> datetime:
    """Return the time that `12h`, `7d` or a date means, the value of an option. Raises UserError."""
    if (ago := re.fullmatch(r"([0-9]{1,5})([mhdw])", text)) is not None:
        unit = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}[ago[2]]
        return datetime.now().astimezone() - timedelta(**{unit: int(ago[1])})
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        todo = "write 30m, 12h, 7d, 2w, or a date: 2026-11-30"
        raise UserError(f"{option} {text!r} is not a time", todo=todo) from None


def rows_of(entries: Sequence[Entry], say: Callable[[str], None]) -> list[Row]:
    """Return these runs, asking each scheduler once for all that are not over.

    Runs that are over are not read again: see `Summaries`.
    """
    summaries = Summaries()
    by_path = {entry.path: known for entry in entries if (known := summaries.of(entry.folder)) is not None}
    fresh = _statuses([entry.folder for entry in entries if entry.path not in by_path], say)
    for path, status in fresh.items():
        by_path[str(path)] = status.as_dict()
        summaries.keep(status.folder, status.state, by_path[str(path)])
    summaries.save()
    return [
        Row(entry.folder, {**by_path[entry.path], "site": entry.site}, fresh.get(entry.folder.path))
        for entry in entries
        if entry.path in by_path
    ]


def _statuses(folders: Sequence[RunFolder], say: Callable[[str], None]) -> dict[Path, RunStatus]:
    """Read the folders, ask each scheduler once. Runs of other versions are counted only."""
    readable = [folder for folder in folders if not manifest.other_version(folder)]
    if others := len(folders) - len(readable):
        say(f"note: not shown: {others} {'run' if others == 1 else 'runs'} of other versions of slurmddp")
    answers = ask_about(evidence_of(readable, say), say, newest=True)
    return {
        folder.path: status_of(
            folder,
            facts,
            answers.views.get(facts.job_id) if facts.job_id else None,
            answers.answered(facts),
            list(facts.notes),
        )
        for folder, facts in answers.runs
    }


def runs_table(listed: Sequence[Row]) -> str:
    """Return one line per run, and one more for a run that waits: why, and when it should start."""
    if not listed:
        return "no runs"
    now = time.time()
    rows: list[tuple[str, ...]] = [("RUN", "SITE", "STATE", "STEP", "AGE", "TIME", "NODES")]
    rows += [told_cells(row.told, now) for row in listed]
    lines = []
    for line, row in zip(columns(rows, left=3), (None, *listed), strict=True):
        lines.append(line)
        if row and (waits := row.told["waits"]):
            lines.append(f"  waits: {waits_text(waits['reason'], row.told['expected_start'])}")
    return join("\n", lines)


class Cells(NamedTuple):
    """What a table shows of a run."""

    run: str
    site: str
    state: str
    step: str
    age: str
    took: str
    nodes: str


def told_cells(told: Mapping[str, Any], now: float) -> Cells:
    step, steps = told["step"], told["steps"]
    done = "" if step is None else f"{100 * step // steps} %" if steps else str(step)
    age = "" if told["submitted"] is None else age_text(now - told["submitted"])
    going = RunState(told["state"]).going
    end = now if going else told["ended"]
    took = "" if told["started"] is None or end is None else span(end - told["started"])
    nodes = "" if told["nodes"] is None else str(told["nodes"])
    run, site, state = (one_line(told[key]) for key in ("run_id", "site", "state"))
    return Cells(run, site, styled_state(state), done, age, took, nodes)


def age_text(seconds: float) -> str:
    """Return an age: `45s`, `12m`, `3h`, `9d`."""
    for limit, size, unit in ((100, 1, "s"), (6000, 60, "m"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{max(round(seconds), 0) // size}{unit}"
    return f"{round(seconds) // 86400}d"


def runs(
    limit: int = opt.value("N", "Show the N newest runs", "-n", "--limit", default=20, min=1),
    state: list[str] | None = opt.value("STATE", "Only runs in this state; may be repeated", complete=opt.run_states),
    site: str | None = opt.value("SITE", "Only runs of this site", complete=opt.site_names),
    since: str | None = opt.value("TIME", "Only runs submitted since: 12h, 7d, 2w or 2026-11-30"),
    sweep: str | None = opt.value("SWEEP", "Only runs of this sweep: its id, its folder, or last"),
    as_json: opt.Json = False,
) -> None:
    """List your runs, newest last. Says why a pending run waits, and when it should start."""
    folder = find_sweep(sweep).folder if sweep is not None else None
    states = checked_states(state or ())
    submitted = None if since is None else moment("--since", since)
    known = known_runs(os.environ)
    if site and not any(entry.site == site for entry in known):
        site = Catalogue(os.environ).load(site)[0].name  # a site file, or a mistake
    passed = (
        entry
        for entry in known
        if site in (None, entry.site)
        and (submitted is None or entry.when >= submitted)
        and folder in (None, entry.folder.path.parent)
    )
    rows = rows_of(list(passed if states else islice(passed, limit)), opt.say)
    listed = [row for row in rows if not states or row.told["state"] in states][:limit][::-1]
    look_after(listed)
    opt.show(as_json, [row.told for row in listed], runs_table(listed))


def find_sweep(text: str) -> Sweep:
    return sweeps.find(text, known_runs(os.environ))


def look_after(rows: Sequence[Row]) -> None:
    """End holds of Slurm after a requeue, and send alerts that could not be sent before."""
    for row in rows:
        if row.status and (note := release_hold(row.folder, row.status.facts, row.status.view)):
            opt.say(f"note: {row.folder.id}: {note}")
    opt.send_waiting([row.folder for row in rows])
