"""`slurmddp report`: all that is known of one run, or of two beside each other, as one HTML file."""

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from itertools import islice
from typing import Any

from slurmddp.records.events import Event, keys_of, of
from slurmddp.records.job_events import (
    AttemptEnded,
    AttemptStarted,
    JobStarted,
    Measured,
    Network,
    NodeExcluded,
    Requeued,
)
from slurmddp.records.rank_events import (
    CheckpointFailed,
    CheckpointRejected,
    CheckpointSaved,
    Error,
    Evaluated,
    Hang,
    HangOver,
    HangReported,
    LinksProbed,
    NoProcessGroup,
    RankExited,
    Restarted,
    Resumed,
    Started,
    StepSkipped,
    Stopping,
    StragglerBegins,
    StragglerEnds,
)
from slurmddp.records.values import number
from slurmddp.render.engine import render
from slurmddp.report.charts import Chart, figure, line_chart
from slurmddp.report.goodput import goodput_line, recovered_line
from slurmddp.report.gpus import gpu_table
from slurmddp.report.page_facts import Facts, read_facts
from slurmddp.report.progress import count_nodes, span, speed_text, steps_text
from slurmddp.report.scaling import find_scaling
from slurmddp.run.curves import Point
from slurmddp.run.layout import RunFolder
from slurmddp.run.ledger import KINDS
from slurmddp.run.timeline import Attempt
from slurmddp.shared.units import human
from slurmddp.visible import visible

#: Rows of a table of events, at most, and characters of one cell.
_ROWS, _CELL = 200, 2000
#: Events of a failure, and those that are no failure by themselves.
_BAD = (Error, RankExited, Hang, HangReported, NodeExcluded, StepSkipped, CheckpointFailed, CheckpointRejected)
FAULTS = (*_BAD, HangOver, LinksProbed, Requeued, Stopping, Resumed, Restarted, NoProcessGroup)
#: What training that began again went on from.
_FROM = {True: "", False: "; from step 1 again", None: "; from which step is unknown"}
#: What of the manifest is shown, besides what it says of git and of the image.
_MADE = ("slurmddp", "command", "directory", "user", "host", "python", "site", "code_hash", "resumed_from")

Row = tuple[str, Sequence[str]]


def report_html(folders: Sequence[RunFolder]) -> str:
    """Return the page. Raises UserError for a damaged submission.json, OSError."""
    labels = ("A", "B") if len(folders) > 1 else ("",)
    runs = [read_facts(folder, label) for folder, label in zip(folders, labels, strict=True)]
    page = render(
        "report/report.html.j2",
        title=" and ".join(run.folder.id for run in runs),
        written=_moment(time.time()),
        runs=runs,
        summary=_merged(_summary(run) for run in runs),
        charts=_charts(runs),
        parts=[_shares(run.parts) for run in runs],
        ledgers=[_shares({kind: each / 1000 for kind, each in run.spent.items()}) for run in runs],
        kinds=KINDS,
        gpu=_merged(gpu_table(run.gpus[:_ROWS]) for run in runs),
        stragglers=[_stragglers(run) for run in runs],
        lanes=[_lanes(run) for run in runs],
        attempts=[_attempts(run) for run in runs],
        faults=[list(islice(_faults(run), _ROWS)) for run in runs],
        recoveries=[_recoveries(run) for run in runs],
        network=_merged(_network(run) for run in runs),
        environment=_merged(_environment(run) for run in runs),
        settings=_settings(runs),
    )
    # Names that are not UTF-8 have surrogates, which no file in UTF-8 can hold.
    return visible(page).encode("utf-8", errors="backslashreplace").decode()


# --- the parts of the page


def _merged(tables: Iterator[Mapping[str, str | None]]) -> list[Row]:
    """Return rows with a value per run. A row that no run has a value for is left out."""
    each = list(tables)
    rows = [
        (name, [str(table.get(name) or "")[:_CELL] for table in each])
        for name in dict.fromkeys(k for t in each for k in t)
    ]
    return [row for row in rows if any(row[1])]


def _summary(run: Facts) -> dict[str, str | None]:
    status, progress = run.status, run.status.progress
    evaluated, started = run.newest(Evaluated), run.newest(Started)
    validated = evaluated.loss if evaluated else None
    network, unmeasured = run.parts["network"], run.parts["unmeasured"]
    total = sum(run.parts.values()) - unmeasured if network or not unmeasured else 0.0
    used = node_seconds(run)
    end = progress.ended or (time.time() if status.state.going else None)
    took = span(end - progress.started) if end and progress.started else None
    ranks = started.world if started else None
    return {
        "State": status.state.line,
        "Cause": status.cause and status.cause.line_with_log(),
        "Step": steps_text(progress.step, progress.steps),
        "Loss": None if progress.loss is None else figure(progress.loss),
        "Validation loss": None if validated is None else figure(validated),
        "Speed, lately": speed_text(progress.speed),
        "Waiting for the network": f"{100 * network / total:.2g} % of the step time" if total else None,
        "Scaling": scaling.line() if (scaling := find_scaling(status.folder, status.facts.events)) else None,
        "Goodput": goodput_line(run.ledger),
        "Recovered": recovered_line(run.ledger),
        "Warning": "; ".join(status.warnings),
        "Nodes": None if progress.nodes is None else str(progress.nodes),
        "Ranks": None if ranks is None else str(ranks),
        "Submitted": _moment(progress.submitted),
        "Ended": _moment(progress.ended),
        "First start to end": took,
        "Node-hours": f"{used / 3600:.3g}" if used else None,
        "Energy": f"{run.joules / 3.6e6:.3g} kWh (sacct)" if run.joules else None,
        "Job": status.job_id,
        "Excluded nodes": ", ".join(status.excluded),
    }


def node_seconds(run: Facts) -> float:
    """Nodes of each start of job.sh, times its seconds."""
    events, total, nodes = run.by_attempt(JobStarted), 0.0, 0
    attempts = run.timeline.attempts if run.timeline else ()
    for index, attempt in enumerate(attempts):
        if attempt.number in events:
            nodes = count_nodes(events[attempt.number].nodes)
        after = attempts[index + 1] if index + 1 < len(attempts) else None
        total += nodes * ((after.begin if after and not after.begins else attempt.end) - attempt.begin) / 1000
    return total


def _charts(runs: Sequence[Facts]) -> list[Chart]:
    loss: dict[str, Sequence[Point]] = {}
    for run in runs:
        loss[f"training {run.label}".strip()] = run.curves["loss"]
        points = {}
        for _, evaluation in of(run.status.facts.events, Evaluated):
            if evaluation.step is not None and evaluation.loss is not None:
                points[evaluation.step] = Point(evaluation.step, evaluation.loss, evaluation.loss, evaluation.loss)
        loss[f"validation {run.label}".strip()] = [points[step] for step in sorted(points)]
    charts = [line_chart("Loss", loss)]
    keys = dict.fromkeys(key for run in runs for key in run.curves if key != "loss")
    speeds = [key for key in keys if key.endswith("_per_second")]
    for key in [*speeds[:1], *(key for key in keys if key not in speeds)]:
        curves = {run.label or key: run.curves.get(key, ()) for run in runs}
        title = {"mfu": "Model FLOPs utilisation (share of the measured peak)"}.get(key, key.replace("_", " "))
        charts.append(line_chart(title[:1].upper() + title[1:], curves, zero=True))
    return [chart for chart in charts if chart]


def _shares(seconds: Mapping[str, float]) -> list[tuple[str, float, float, float, int]]:
    """Name, seconds, percent, the percent where its piece of the bar begins, and its colour: the same in every run."""
    total, at, shares = sum(seconds.values()), 0.0, []
    for colour, (name, each) in enumerate(seconds.items()):
        share = 100 * each / total if total else 0.0
        shares.append((name, each, share, at, colour))
        at += share
    return shares if total else []


def _stragglers(run: Facts) -> Sequence[Sequence[str]]:
    open_, rows = {}, []
    for event in run.events(StragglerBegins, StragglerEnds):
        facts = event.facts
        if isinstance(facts, StragglerBegins):
            figures = ["" if each is None else figure(each) for each in (facts.factor, facts.seconds_a_step)]
            cells = [facts.host, facts.part, str(facts.slow_rank), *figures, _moment(event.time)]
            open_[facts.host, facts.part] = [*cells, "not over"]
            rows.append(open_[facts.host, facts.part])
        elif isinstance(facts, StragglerEnds) and (facts.host, facts.part) in open_:
            open_.pop((facts.host, facts.part))[-1] = _moment(event.time)
    return rows[:_ROWS]


def _lanes(run: Facts) -> Mapping[str, Any]:
    """The timeline in percent of the time from submission to the end: bars of attempts, and moments."""
    if run.timeline is None or run.timeline.end <= run.timeline.begin:
        return {}
    begin, length = run.timeline.begin, run.timeline.end - run.timeline.begin

    def at(moment: float) -> float:
        return round(min(max(100 * (moment - begin) / length, 0.0), 100.0), 1)

    def moments(events: Sequence[Event]) -> list[float]:
        return sorted({at(1000 * event.time) for event in events if event.time is not None})

    attempts = run.timeline.attempts
    failed = [event for event, facts in of(run.status.facts.events, AttemptEnded) if facts.exit_code]
    return {
        "bars": [(at(each.begin), max(at(each.end) - at(each.begin), 0.3), _outcome(each)) for each in attempts],
        "ticks": {
            "checkpoints": moments(run.events(CheckpointSaved)),
            "faults": moments([*run.events(*_BAD), *failed]),
            "resumed": moments(run.events(Resumed)),
        },
        "end": span(length / 1000),
    }


def _outcome(attempt: Attempt) -> str:
    return "running" if not attempt.ended else "ok" if attempt.code == 0 else "failed"


def _attempts(run: Facts) -> Sequence[Sequence[str]]:
    ended, started = run.by_attempt(AttemptEnded), run.by_attempt(AttemptStarted)
    return [
        (
            str(each.number),
            started[each.number].nodes if each.number in started else "",
            _moment(each.begin / 1000),
            span((each.end - each.begin) / 1000),
            "" if each.code is None else str(each.code),
            ended[each.number].cause[:_CELL] if each.number in ended else "",
            ended[each.number].decision if each.number in ended else "" if each.ended else "no end written",
        )
        for each in (run.timeline.attempts if run.timeline else ())
    ][-_ROWS:]


def _faults(run: Facts) -> Iterator[Sequence[str]]:
    """When, what, where, and its details: the newest first."""
    for event in run.events(*FAULTS)[::-1]:
        fields = keys_of(event.facts)
        step, rank, node = fields.pop("step", None), event.rank, event.node
        fields.pop("rank", None)
        where = ", ".join(
            [f"rank {rank}"] * (rank is not None) + ([node] if node else []) + [f"step {step}"] * (step is not None)
        )
        details = "; ".join(f"{key}: {_flat(value)}" for key, value in fields.items() if value not in (None, "", ()))
        yield _moment(event.time), event.name.replace("_", " "), where, details[:_CELL]


def _recoveries(run: Facts) -> Sequence[Sequence[str]]:
    return [
        (
            str(each.attempt),
            "" if each.step is None else str(each.step),
            span(each.milliseconds / 1000),
            ("a failure" if each.failed else "a stop") + _FROM[each.went_on],
        )
        for each in (run.ledger.recoveries if run.ledger else ())
    ][-_ROWS:]


def _network(run: Facts) -> dict[str, str | None]:
    network = run.newest(Network)
    measured = (network and network.measured) or Measured("none")
    speeds = {size: each for size, each in measured.speeds.items() if size.isdecimal()}
    return {
        "Verdict": network.text if network else "",
        "Backend": measured.backend or run.status.progress.backend or "",
        "Transport": measured.transport,
        "Devices": _flat(measured.devices),
        "Bus bandwidth": None if measured.bus_gb_s is None else f"{measured.bus_gb_s:.4g} GB/s",
        **{f"All-reduce of {human(float(size))}": f"{each} GB/s" for size, each in speeds.items()},
        "NCCL": measured.nccl,
    }


def _environment(run: Facts) -> dict[str, str | None]:
    made, started = run.manifest, run.newest(Started)
    rows = {name.replace("_", " "): _flat(made.get(name)) for name in _MADE}
    for name in ("git", "image"):
        fields = made.get(name)
        rows |= {f"{name} {key}": _flat(value) for key, value in (fields.items() if isinstance(fields, dict) else ())}
    if started:
        kept = started.torch, started.device, started.parallel, _flat(started.parameters)
        rows |= dict(zip(("torch", "device", "parallel", "parameters"), kept, strict=True))
    return {**rows, "Run folder": str(run.folder.path)}


def _settings(runs: Sequence[Facts]) -> list[tuple[str, list[tuple[str, str]], bool]]:
    """Key, value and origin per run, and whether the runs differ. Those that differ come first."""
    rows = []
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        cells = [run.settings.get(key, ("", "")) for run in runs]
        rows.append((key, [(value[:_CELL], by) for value, by in cells], len({value for value, _ in cells}) > 1))
    return sorted(rows, key=lambda row: not row[2])


def _flat(value: Any) -> str:
    return "" if value is None else " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _moment(seconds: Any) -> str:
    moment = number(seconds)
    if moment is None or not 0 <= moment < 2**37:
        return ""
    return datetime.fromtimestamp(moment, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
