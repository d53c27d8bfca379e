"""`slurmddp report --json`: what the HTML page shows, for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slurmddp.report.goodput import goodput_dict
from slurmddp.report.page import FAULTS, node_seconds
from slurmddp.report.page_facts import Facts, read_facts
from slurmddp.runs.layout import RunFolder


def report_dicts(folders: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """Return an object per run. The keys are stable. Raises UserError for a damaged submission.json, OSError."""
    return [_dict(read_facts(folder)) for folder in folders]


def _dict(run: Facts) -> dict[str, Any]:
    going = run.status.state.going
    measured = run.newest("network").get("measured")
    return {
        "run_id": run.folder.id,
        "status": run.status.as_dict(),
        "goodput": goodput_dict(run.ledger, going=going) if run.ledger else None,
        "parts_seconds": {name: round(seconds, 3) for name, seconds in run.parts.items()},
        "node_hours": round(node_seconds(run) / 3600, 4),
        "energy_joules": run.joules,
        "curves": {name: [point._asdict() for point in curve] for name, curve in run.curves.items() if curve},
        "evaluations": list(map(dict, run.events("evaluated"))),
        "stragglers": list(map(dict, run.events("straggler_begins", "straggler_ends"))),
        "attempts": list(map(dict, run.events("attempt_started", "attempt_ended"))),
        "faults": list(map(dict, run.events(*FAULTS))),
        "network": measured if isinstance(measured, dict) else None,
        "gpus": [gpu.as_dict() for gpu in run.gpus],
        "configuration": {key: {"value": value, "set_by": by} for key, (value, by) in run.settings.items()},
        "manifest": dict(run.manifest),
        "notes": list(run.notes),
    }
