"""What `slurmddp report` says of one run, put together from its folder and its scheduler."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from slurmddp.cluster.client import Slurm
from slurmddp.errors import UserError
from slurmddp.job.document import read_file
from slurmddp.job.layers import Layered
from slurmddp.records.events import Event, Kind, newest, of
from slurmddp.records.metrics import Metrics
from slurmddp.report.explain import leaves, raw
from slurmddp.report.gpus import Gpu, read_gpus
from slurmddp.report.status import RunStatus, run_status, status_of
from slurmddp.run import manifest
from slurmddp.run.curves import Point, read_curves
from slurmddp.run.evidence import evidence
from slurmddp.run.layout import RunFolder
from slurmddp.run.ledger import Ledger, ledger
from slurmddp.run.metrics import ledger_lines
from slurmddp.run.timeline import Timeline, timeline

#: Parts of a step, in the order in which they are shown.
_PARTS = (
    "data", "forward", "backward", "compute", "overlap", "network", "optimizer", "checkpoint", "evaluation", "other",
    "unmeasured",
)  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """What a report says of one run. label: in front of its curves, "" where there is one run only."""

    label: str
    folder: RunFolder
    status: RunStatus
    ledger: Ledger | None
    timeline: Timeline | None
    curves: Mapping[str, Sequence[Point]]
    parts: Mapping[str, float]
    manifest: Mapping[str, Any]
    joules: float | None
    gpus: Sequence[Gpu]
    settings: Mapping[str, tuple[str, str]]
    notes: Sequence[str]

    @property
    def spent(self) -> Mapping[str, int]:
        """Milliseconds by kind of time; empty for a run that was not submitted."""
        return self.ledger.spent if self.ledger else {}

    def events(self, *kinds: type[Any]) -> list[Event]:
        """Return the events of these types, oldest first."""
        return [event for event in self.status.facts.events if isinstance(event.facts, kinds)]

    def by_attempt(self, kind: type[Kind]) -> dict[int, Kind]:
        """Return the newest event of a type for each attempt."""
        events = of(self.status.facts.events, kind)
        return {event.attempt: facts for event, facts in events if event.attempt is not None}

    def newest(self, kind: type[Kind]) -> Kind | None:
        """Return the newest event of a type; None without one."""
        return newest(self.status.facts.events, kind)


def read_facts(folder: RunFolder, label: str = "") -> Facts:
    """Read a run folder, and ask the scheduler if there is one. Raises UserError (damaged file), OSError."""
    notes: list[str] = []
    try:
        status = run_status(folder)
    except UserError as error:  # no Slurm on this machine
        notes.append(f"the scheduler was not asked: {error}")
        status = status_of(folder, evidence(folder), None, False, [])
    facts, going = status.facts, status.state.going
    now = time.time() if going else None
    rows = ledger_lines(folder.metrics, facts.events)
    keys = [f"{unit}_per_second" for unit in status.progress.speed]
    keys = ["loss", *keys, "mfu"]
    made: Mapping[str, Any] = {}
    try:
        made = manifest.read(folder)
    except UserError as error:
        notes.append(str(error))
    return Facts(
        label=label,
        folder=folder,
        status=status,
        ledger=ledger(facts, rows, script=not folder.job_json.exists(), now=now),
        timeline=timeline(status.progress.submitted, facts.events, rows, now=now),
        curves=read_curves(folder.metrics, keys),
        parts=_parts(rows),
        manifest=made,
        joules=_joules(status),
        gpus=read_gpus(folder, status.attempt),
        settings=_own_settings(folder, made, notes),
        notes=[*status.notes, *notes],
    )


def _joules(status: RunStatus) -> float | None:
    jobs = [] if status.facts.submission and not status.facts.submission.queued else status.facts.job_ids
    return Slurm().energy(jobs) if jobs and not jobs[0].is_local else None


def _parts(rows: Sequence[Metrics]) -> dict[str, float]:
    """Seconds by part of a step, of all starts together."""
    seconds_by_part = dict.fromkeys(_PARTS, 0.0)
    for before, row in pairwise([None, *rows]):
        for name, seconds in row.since(before).items() if row else ():
            seconds_by_part[name if name in seconds_by_part else "other"] += seconds
    return seconds_by_part


def _own_settings(folder: RunFolder, made: Mapping[str, Any], notes: list[str]) -> dict[str, tuple[str, str]]:
    """Key of the job -> its value, and the layer and place that set it."""
    if not folder.job_yaml.exists():
        return {}
    try:
        document = read_file(folder.job_yaml, "job", below=folder.path)
    except UserError as error:
        notes.append(str(error))
        return {}
    origins, settings = made.get("origins"), {}
    for key in filter(None, leaves(Layered(document.tree, document.origins, {}))):
        name = ".".join(key)
        by = "not recorded"
        if isinstance(origins, dict):
            by = str(origins.get(name) or _origin_of_list(name, origins) or "built-in")
        value = raw(document.tree, key)
        settings[name] = ("null" if value is None else str(value), by)
    return settings


def _origin_of_list(name: str, origins: Mapping[str, Any]) -> Any:
    """The origin of the list, or of its item, that a value is in, if that was set as a whole; else None."""
    above = name
    while re.search(r"\.[0-9]+(\.|$)", above):
        above = above.rpartition(".")[0]
        if above in origins and not any(key.startswith(f"{above}.") for key in origins):
            return origins[above]
    return None
