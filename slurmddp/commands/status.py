"""status: how a run is, once, live (--watch) or for Prometheus, and where its time went (--time)."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

import typer

from slurmddp.api import look
from slurmddp.commands import options as opt
from slurmddp.commands.logs import ASK_EVERY
from slurmddp.commands.terminal import Screen, shows_blocks
from slurmddp.errors import UserError
from slurmddp.launch.cancel import refuse_other_version
from slurmddp.launch.find import find_any_version
from slurmddp.records.metrics import Metrics
from slurmddp.records.values import number
from slurmddp.report import goodput
from slurmddp.report.gpus import gpus_line, read_gpus
from slurmddp.report.progress import steps_text
from slurmddp.report.scaling import find_scaling
from slurmddp.report.status import RunStatus, refreshed, status_lines
from slurmddp.run.index import entry_of
from slurmddp.run.layout import RunFolder
from slurmddp.run.ledger import Ledger
from slurmddp.run.metrics import spread
from slurmddp.shared.files import write_whole
from slurmddp.shared.units import short
from slurmddp.styled import exact, join
from slurmddp.visible import one_line

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 50


def curves(run_status: RunStatus) -> list[str]:
    """Return a line each for loss and throughput over the steps of the whole run. Raises OSError."""
    rows = spread(run_status.folder.metrics)
    speed = next(iter(run_status.progress.speed), None)
    lines = []
    for title, key, low in (("loss", "loss", None), ("speed", f"{speed}_per_second", 0.0)):
        values = by_step(rows, key)
        if len(values) > 1:
            lines.append(f"{title:<8} {sparkline(values, _WIDTH, low)}  {short(values[0])} to {short(values[-1])}")
    return lines


def by_step(rows: Sequence[Metrics], key: str) -> list[float]:
    """Return the values in the order of their steps; the last line of a step counts."""
    values: dict[int, float] = {}
    for row in rows:
        if (value := number(row.figures.get(key))) is not None:
            values[row.step] = value
    return [values[step] for step in sorted(values)]


def sparkline(values: Sequence[float], width: int, low: float | None = None) -> str:
    """Return at most `width` blocks, each the mean of its share of the values. low: of the lowest block, else the least
    of them."""
    count = min(width, len(values))
    means = []
    for index in range(count):
        part = values[index * len(values) // count : (index + 1) * len(values) // count]
        means.append(sum(part) / len(part))
    low, high = min(means) if low is None else low, max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[max(round((mean - low) * scale), 0)] for mean in means)


def watch_line(run_status: RunStatus) -> str:
    """Return the status as one line, without the time."""
    progress = run_status.progress
    parts = [run_status.state.line]
    if progress.step is not None:
        parts.append(f"step {steps_text(progress.step, progress.steps)}")
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4g}")
    parts += [f"{short(value)} {unit}/s" for unit, value in list(progress.speed.items())[:1] if run_status.state.going]
    return one_line(", ".join(parts))


def clock_time() -> str:
    return datetime.now().strftime("%H:%M:%S")


#: Name -> type and help, of which each scrape must show the same.
METRICS = {
    "slurmddp_going": ("gauge", "1 while the run is pending or running, else 0"),
    "slurmddp_step": ("gauge", "Newest optimizer step"),
    "slurmddp_steps": ("gauge", "Optimizer steps asked for"),
    "slurmddp_loss": ("gauge", "Loss of the newest metrics line"),
    "slurmddp_samples_per_second": ("gauge", "Samples per second of all ranks, while the run is going"),
    "slurmddp_goodput_ratio": ("gauge", "Share of the time since the submission that was training"),
    "slurmddp_restarts_total": ("counter", "Starts of the ranks after the first"),
    "slurmddp_metrics_timestamp_seconds": ("gauge", "Unix time of the newest metrics line"),
}


def prometheus_text(run_status: RunStatus, ledger: Ledger | None) -> str:
    """Return the metrics that are known, in Prometheus's text exposition format."""
    progress, going = run_status.progress, run_status.state.going
    values = {
        "slurmddp_going": int(going),
        "slurmddp_step": progress.step,
        "slurmddp_steps": progress.steps,
        "slurmddp_loss": progress.loss,
        "slurmddp_samples_per_second": progress.speed.get("samples") if going else None,
        "slurmddp_goodput_ratio": ledger and ledger.goodput,
        "slurmddp_restarts_total": max(ledger.rank_starts - 1, 0) if ledger else 0,
        "slurmddp_metrics_timestamp_seconds": run_status.metrics.time if run_status.metrics else None,
    }
    entry = entry_of(run_status.folder)
    names = {"run": run_status.folder.id, "site": entry.site if entry else "", "job_id": run_status.job_id}
    labels = ",".join(f'{name}="{_escaped(text)}"' for name, text in names.items())
    lines = []
    for name, (kind, meaning) in METRICS.items():
        if (value := values[name]) is not None:
            lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", f"{name}{{{labels}}} {value!r}"]
    return "".join(line + "\n" for line in lines)


def _escaped(text: str) -> str:
    """Return a label's value as the format wants it; what is no UTF-8 becomes question marks."""
    text = text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
    return text.encode("utf-8", errors="replace").decode()


#: Seconds between two looks of `status --watch`.
LOOK_EVERY = 2.0


def status(
    run: opt.Run = opt.LAST,
    watch: bool = opt.flag("--watch", "Show it live, with curves, until the run is over"),
    time: bool = opt.flag("--time", "Show where the run's time went, to the second"),
    as_json: opt.Json = False,
    prometheus: bool = opt.flag("--prometheus", "Print metrics for Prometheus's textfile collector"),
    output: Path | None = opt.value("FILE.prom", "With --prometheus: write this file", "-o", "--output"),
) -> None:
    """Show the state of a run. Exit code: 0 done; 1 failed, stopped or cancelled; 3 still pending or running."""
    if prometheus and (watch or as_json or time):
        raise UserError("--prometheus excludes --watch, --time and --json", todo="remove one of them")
    if time and watch:
        raise UserError("--time excludes --watch", todo="remove one of them")
    opt.needs((output, "-o", prometheus, "--prometheus"))
    folder = find_any_version(run, os.environ)
    refuse_other_version(folder)
    opt.send_waiting([folder])
    run_status = _watch(folder, as_json=as_json) if watch else look(folder)
    if prometheus and output:
        write_whole(output, prometheus_text(run_status, _ledger(run_status)))
    elif prometheus:
        typer.echo(exact(prometheus_text(run_status, _ledger(run_status))), nl=False)
    elif time:
        _show_time(run_status, as_json=as_json)
    elif not (watch and as_json):
        typer.echo(_status_json(run_status) if as_json else join("\n", _status_lines(run_status, _ledger(run_status))))
    raise typer.Exit(run_status.state.exit_code)


def _show_time(run_status: RunStatus, *, as_json: bool) -> None:
    going, ledger = run_status.state.going, _ledger(run_status)
    if ledger is None:
        raise goodput.never_submitted(run_status.folder)
    if as_json:
        typer.echo(opt.json_text({"run_id": run_status.folder.id, **goodput.goodput_dict(ledger, going=going)}))
        return
    typer.echo(goodput.goodput_text(ledger, going=going))
    for note in run_status.notes:
        opt.say(f"note: {note}")


def _ledger(run_status: RunStatus) -> Ledger | None:
    return goodput.run_ledger(run_status.folder, going=run_status.state.going)


def _status_json(run_status: RunStatus) -> str:
    ledger, scaling = _ledger(run_status), find_scaling(run_status.folder, run_status.facts.events)
    more = {
        "recovered": ledger.recovered if ledger else 0,
        "scaling": scaling and scaling.as_dict(),
        "gpus": [gpu.as_dict() for gpu in read_gpus(run_status.folder, run_status.attempt)],
    }
    return opt.json_text({**run_status.as_dict(), **more})


def _status_lines(run_status: RunStatus, ledger: Ledger | None) -> list[str]:
    scaling = find_scaling(run_status.folder, run_status.facts.events)
    gpus = gpus_line(read_gpus(run_status.folder, run_status.attempt)) if run_status.state.going else None
    return status_lines(run_status, goodput.goodput_line(ledger), goodput.recovered_line(ledger), scaling, gpus)


def _watch(folder: RunFolder, *, as_json: bool) -> RunStatus:
    """Show the status until the run is over or the user presses Ctrl-C; its last one."""
    on_screen = sys.stdout.isatty() and not as_json
    shown = ""
    first = latest = look(folder)
    with contextlib.suppress(KeyboardInterrupt), Screen() if on_screen else contextlib.nullcontext() as screen:
        for latest, is_fresh in _looks(first):
            if screen is not None:
                if is_fresh:  # what costs more than a look at the end of a file
                    ledger, more = _ledger(latest), curves(latest) if shows_blocks() else []
                screen.show([*_status_lines(latest, ledger), "", *more, f"{clock_time()}, Ctrl-C stops watching"])
            elif as_json:
                typer.echo(_status_json(latest))
            elif (line := watch_line(latest)) != shown:
                shown = line
                typer.echo(f"{clock_time()} {line}")
    return latest


def _looks(first: RunStatus) -> Iterator[tuple[RunStatus, bool]]:
    """Yield the status every two seconds until the run is over, and whether the scheduler was asked for it."""
    run_status, asked_at = first, time.monotonic()
    yield run_status, True
    while run_status.state.going:
        time.sleep(LOOK_EVERY)
        again = time.monotonic() - asked_at >= ASK_EVERY
        if again:
            run_status, asked_at = look(first.folder), time.monotonic()
        else:
            run_status = refreshed(run_status)
        yield run_status, again
