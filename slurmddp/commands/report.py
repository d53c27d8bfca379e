"""report: an HTML page about a run or two, and the same as JSON."""

import os
from pathlib import Path
from typing import Any

import typer

from slurmddp.commands import options as opt
from slurmddp.commands.terminal import write_new
from slurmddp.errors import UserError
from slurmddp.launch.find import find_run
from slurmddp.records.events import keys_of
from slurmddp.records.job_events import AttemptEnded, AttemptStarted, Network
from slurmddp.records.rank_events import Evaluated, StragglerBegins, StragglerEnds
from slurmddp.report.goodput import goodput_dict
from slurmddp.report.page import FAULTS, node_seconds, report_html
from slurmddp.report.page_facts import Facts, read_facts


def _dict(run: Facts) -> dict[str, Any]:
    """Return what the page shows of a run. The keys are stable."""
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


def report(
    run: opt.Run = opt.LAST,
    output: Path | None = opt.value("FILE", "File to write, or a folder for RUN.html", "-o", "--output"),
    compare: str | None = opt.value("RUN2", "Second run, to compare with", complete=opt.run_names),
    force: bool = opt.flag("--force", "Replace FILE if it exists"),
    as_json: opt.Json = False,
) -> None:
    """Write an HTML file about a run: curves, where its time went, faults, network, configuration."""
    folders = [find_run(name, os.environ) for name in (run, compare) if name is not None]
    if as_json:
        if output is not None:
            raise UserError("--json prints to stdout and takes no -o", todo="remove -o, and redirect: > FILE")
        typer.echo(opt.json_text([_dict(read_facts(folder)) for folder in folders]))
        return

    path = output or Path()
    if path.is_dir():
        path /= f"{folders[0].id}.html"
    write_new(path, report_html(folders), force=force, todo="choose another name with -o, or add --force")
    typer.echo(path)
