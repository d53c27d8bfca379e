"""`slurmddp report --json`: what the HTML page shows, for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slurmddp.records.events import keys_of
from slurmddp.records.job_events import AttemptEnded, AttemptStarted, Network
from slurmddp.records.rank_events import Evaluated, StragglerBegins, StragglerEnds
from slurmddp.report.goodput import goodput_dict
from slurmddp.report.page import FAULTS, node_seconds
from slurmddp.report.page_facts import Facts, read_facts
from slurmddp.run.layout import RunFolder


def report_dicts(folders: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """Return an object per run. The keys are stable. Raises UserError for a damaged submission.json, OSError."""
    return [_dict(read_facts(folder)) for folder in folders]


def _dict(run: Facts) -> dict[str, Any]:
    going = run.status.state.going
    network = run.newest(Network)
    return {
        "run_id": run.folder.id,
        "status": run.status.as_dict(),
        "goodput": goodput_dict(run.ledger, going=going) if run.ledger else None,
        "parts_seconds": {name: round(seconds, 3) for name, seconds in run.parts.items()},
        "node_hours": round(node_seconds(run) / 3600, 4),
        "energy_joules": run.joules,
        "curves": {name: [point._asdict() for point in curve] for name, curve in run.curves.items() if curve},
        "evaluations": [event.write() for event in run.events(Evaluated)],
        "stragglers": [event.write() for event in run.events(StragglerBegins, StragglerEnds)],
        "attempts": [event.write() for event in run.events(AttemptStarted, AttemptEnded)],
        "faults": [event.write() for event in run.events(*FAULTS)],
        "network": keys_of(network.measured) if network and network.measured else None,
        "gpus": [gpu.as_dict() for gpu in run.gpus],
        "configuration": {key: {"value": value, "set_by": by} for key, (value, by) in run.settings.items()},
        "manifest": dict(run.manifest),
        "notes": list(run.notes),
    }
