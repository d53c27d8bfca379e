"""What `slurmddp tune` measured, for people: the tables, the choice with its reasons, a page with a chart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from slurmddp.records.metrics import Metrics
from slurmddp.records.tuning import Point, Trial, Tuned
from slurmddp.render.engine import render
from slurmddp.report.charts import figure, line_chart
from slurmddp.run import curves
from slurmddp.shared import tuning
from slurmddp.shared.units import human
from slurmddp.styled import columns
from slurmddp.visible import visible

_DDP = "DDP"
#: Efficiency beyond which a measurement is doubted: ranks that each do less may gain some per cent by their caches.
_TOO_GOOD = 1.1
#: What the observer of a script cannot tell on a GPU.
UNMEASURED = "unmeasured"
_NODES_STAY = (
    "nodes and ranks stay as the job has them: only this machine was measured, not the cluster. To compare numbers of "
    "nodes, submit the script with each, such as --nodes 1 and --nodes 2, and compare the speed in `slurmddp status`"
)


class Choice(NamedTuple):
    """What to use, with a sentence per reason. options: key of the job -> value."""

    point: Point
    options: Mapping[str, str]
    reasons: Sequence[str]


class Verdict(NamedTuple):
    """All that follows from a measurement. unit: of what grows, node or rank. beyond: the first size at which another
    one brings too little; None: not reached. limit: what holds up a step: data, network, compute.
    """

    unit: str
    scaling: Sequence[tuning.Scaled]
    beyond: int | None
    noise: tuning.Noise | None
    limit: str
    choice: Choice

    def as_dict(self, tuned: Tuned) -> dict[str, Any]:
        """Return it for --json, with what it follows from."""
        noise = self.noise and self.noise._asdict()
        choice = {"options": dict(self.choice.options), "reasons": list(self.choice.reasons)}
        rows = [{self.unit + "s": row.size, **row._asdict()} for row in self.scaling]
        memory = estimate(tuned, self.choice.point)
        return {
            **tuned.write(), "scaling": rows, "beyond": self.beyond, "noise_scale": noise, "limited_by": self.limit,
            "memory": memory and {**memory._asdict(), "total": memory.total}, "choice": choice,
        }  # fmt: skip


def judge(tuned: Tuned, share: float, *, cluster: bool = False) -> Verdict:
    """Return what the measurement says. share: what another node has to bring, as a share of one alone. cluster: the
    job runs on one, of which a script's measurement says nothing.

    Raises ValueError if no number of ranks was measured.
    """
    if not tuned.points:
        raise ValueError("no number of ranks was measured")
    unit = "node" if max(point.nodes for point in tuned.points) > 1 else "rank"
    best: dict[int, Point] = {}
    for point in tuned.points:
        size = _size_of(point, unit)
        if size not in best or point.samples_per_second > best[size].samples_per_second:
            best[size] = point
    # All sizes in the same way, where they can be: else a gain is one of another way of sharing the model.
    plain = {size: point for size, point in _by_size(tuned, unit).items() if point.parallel == _DDP} or best
    rows = tuning.scaling({size: point.samples_per_second for size, point in plain.items()})
    size, beyond = tuning.worthwhile(rows, share)
    noise = tuning.noise_scale(tuned.noise, *tuned.noise_batches) if tuned.noise else None
    point = best[size]
    per_rank = tuned.batch / point.ranks if tuned.batch else None
    alone = per_rank / tuned.loader if per_rank and tuned.loader else None
    limit = tuning.limit_first(_parts(point), alone)
    reasons = [_size_reason(unit, rows, size, beyond, share), *_batch_reasons(tuned, point)]
    if tuned.batch is None:
        speeds = ", ".join(f"{figure(row.samples_per_second / row.size)} on {row.size}" for row in rows)
        reasons.append(
            "this holds if each rank computes as many samples per step on any number of ranks, which is not known of a "
            f"script; if it divides a fixed batch among them, compare the steps per second: {speeds}"
        )
    if any(row.efficiency > _TOO_GOOD for row in rows):
        reasons.append("faster than linear: perhaps the machine was busy with something else at times. Measure again")
    reasons += [_limit_reason(tuned, point, limit)]
    if noise is not None:
        reasons.append(_noise_reason(noise, tuned.batch))
    options = _options(tuned, point, unit)
    if cluster and tuned.batch is None:
        options = {}
        reasons.append(_NODES_STAY)
    return Verdict(unit, rows, beyond, noise, limit, Choice(point, options, reasons))


def observed(rows: Sequence[Metrics], ranks: int) -> Point | None:
    """Return what the observer of a script saw; None if that were too few steps. The first line but one is where
    counting begins: before it, ranks connect and loaders start.
    """
    rows = [row for row in rows if row.same_start(rows[-1]) and row.time is not None]
    if len(rows) < 3 or (steps := rows[-1].step - rows[1].step) < 1:
        return None
    seconds = (rows[-1].time or 0.0) - (rows[1].time or 0.0)
    parts = {part: spent / steps for part, spent in rows[-1].since(rows[1]).items()}
    return Point(1, ranks, ranks * steps / seconds, "", parts=parts)


def _size_of(point: Point, unit: str) -> int:
    return point.nodes if unit == "node" else point.ranks


def _shard(point: Point) -> int:
    """Return how many ranks share the model."""
    return {_DDP: 1, "HSDP": point.ranks // point.nodes}.get(point.parallel, point.ranks)


def _by_size(tuned: Tuned, unit: str) -> dict[int, Point]:
    """Return the first measurement of each size, which is DDP if the model fits."""
    found: dict[int, Point] = {}
    for point in tuned.points:
        found.setdefault(_size_of(point, unit), point)
    return found


def _parts(point: Point) -> dict[str, float]:
    """Return the seconds of a step by part. A single rank waits for nobody: what looks like it is computation."""
    parts = dict(point.parts)
    if point.ranks == 1 and "network" in parts:
        parts["compute"] = parts.get("compute", 0.0) + parts.pop("network")
    return parts


def estimate(tuned: Tuned, point: Point) -> tuning.Memory | None:
    """Return the memory that a rank should need; None if the parts are not known."""
    kept = tuned.activations.get("on" if point.recompute else "off")
    if kept is None or not tuned.parameters:
        return None
    return tuning.memory(tuned.parameters, tuned.state, kept, point.micro, _shard(point))


def _options(tuned: Tuned, point: Point, unit: str) -> dict[str, str]:
    per_node = point.ranks // point.nodes
    # A script ran on this machine alone, which says nothing of the nodes.
    options = {"resources.nodes": str(point.nodes)} if tuned.batch else {}
    if unit == "rank":
        options |= {"resources.ranks_per_node": str(per_node)}
        if tuned.device not in ("cpu", ""):
            options |= {"resources.gpus_per_node": str(per_node)}
    if point.micro:
        options |= {
            "train.batch.global": str(tuned.batch), "train.batch.micro": str(point.micro),
            "train.batch.accumulation": "null", "parallel.replicate": "null", "parallel.shard": str(_shard(point)),
            "parallel.tensor": "1",  # nothing else was measured
            "train.activation_checkpointing": "true" if point.recompute else "false",
        }  # fmt: skip
    return options


def _size_reason(unit: str, rows: Sequence[tuning.Scaled], size: int, beyond: int | None, share: float) -> str:
    chosen = next(row for row in rows if row.size == size)
    counted = f"{size} {unit}{'s' * (size > 1)}"
    if beyond is not None:
        worse = next(row for row in rows if row.size == beyond)
        brings = f"each one more, up to {beyond}, brings {100 * (worse.gain or 0):.0f} % of one alone"
        return f"{counted}: {brings}, less than {100 * share:.0f} %"
    if len(rows) == 1:
        return f"{counted}: whether more are worth it is not known, because no more were measured"
    before = max(row.size for row in rows if row.size < size)
    gain = f"each one added to {before} brought {100 * (chosen.gain or 0):.0f} % of one alone"
    return f"{counted}: {gain}; whether more are worth it is not known, because no more were measured"


def _batch_reasons(tuned: Tuned, point: Point) -> list[str]:
    if not point.micro:
        return []
    exact = point.micro * point.accumulation * point.ranks == tuned.batch
    per_node = point.ranks // point.nodes
    product = f"micro {point.micro} x accumulation {point.accumulation} x {per_node} ranks per node x {point.nodes}"
    reasons = [f"global batch {tuned.batch} {'=' if exact else 'is at most'} {product} node{'s' * (point.nodes > 1)}"]
    fitting = [each.micro for each in tuned.trials if each.fits and each.recompute == point.recompute]
    if tuned.limit is None:
        reasons.append("the largest micro batch that fits is not known")
    elif fitting:
        word = "with" if point.recompute else "without"
        whole = max(fitting) >= -(-(tuned.batch or 0) // min(each.ranks for each in tuned.points))
        reasons.append(
            f"{max(fitting)} is the largest micro batch measured to fit {_size(tuned.limit)} of free memory {word} "
            f"activation checkpointing, with {100 * tuned.margin:.0f} % left free"
            + "; a smaller one that is about as fast is taken" * (point.micro < max(fitting))
            + "; a larger one would exceed a rank's share of the global batch, so none was tried" * whole
        )
    if sharded := [each for each in tuned.points if each.parallel != _DDP]:
        micro = sharded[-1].micro
        reasons.append(
            f"{sharded[-1].parallel} was measured with micro {micro} only: the largest that fits was not searched"
        )
    others = [each for each in tuned.points if each.ranks == point.ranks and each.parallel != point.parallel]
    for other in others:
        speeds = f"{figure(point.samples_per_second)} against {figure(other.samples_per_second)} samples/s"
        reasons.append(f"{point.parallel}, not {other.parallel}: {speeds} with the same global batch")
    return reasons


def _limit_reason(tuned: Tuned, point: Point, limit: str) -> str:
    parts = _parts(point)
    step = sum(parts.values())
    if not step:
        return "what holds up a step is not known: no parts of it were measured"
    shares = ", ".join(f"{part} {100 * seconds / step:.0f} %" for part, seconds in parts.items() if seconds)
    alone = ""
    if tuned.loader and tuned.batch:
        need = point.samples_per_second / point.ranks
        alone = f"; a loader alone gives {figure(tuned.loader)} samples/s, and a rank uses {figure(need)}"
    if limit == "compute" and parts.get(UNMEASURED, 0.0) > step / 2:
        return f"neither the data loader nor the network is seen to be the limit, but most was not measured ({shares})"
    heads = {
        "data": "the data loader is the limit: use more train.workers, or prepare the data",
        "network": "the network is the limit: the ranks wait for each other's gradients",
        "compute": "the computation is the limit, neither the data loader nor the network",
    }
    return f"{heads[limit]} ({shares}{alone})"


def _noise_reason(noise: tuning.Noise, batch: int | None) -> str:
    if noise.scale is None or noise.error is None:
        return "the gradient noise scale is not known: its error is as large as itself"
    text = f"gradient noise scale {figure(noise.scale)} +- {figure(noise.error)} samples at the start of training"
    if batch and batch < noise.scale:
        return f"{text}: it grows while the loss falls, so a global batch above {batch} should need fewer steps"
    return f"{text}: it grows while the loss falls, so this does not tell whether {batch} is too large later"


def _size(size: float | None) -> str:
    return "" if size is None else human(size)


def _trial_row(each: Trial) -> tuple[str, ...]:
    speed = "" if each.samples_per_second is None else figure(each.samples_per_second)
    return str(each.micro), "on" if each.recompute else "off", speed, _size(each.peak), "yes" if each.fits else "no"


def _tables(tuned: Tuned, verdict: Verdict) -> dict[str, list[tuple[str, ...]]]:
    """Return the tables by title, the first row of each being its head."""
    per_second = "SAMPLES/S" if tuned.batch else "STEPS/S x RANKS"
    head = ["NODES", "RANKS", "PARALLEL", "MICRO", "ACCUM"]
    rows: list[tuple[str, ...]] = [(*head, per_second, "EFFICIENCY", "DATA", "NETWORK", "ALL-REDUCE", "PEAK")]
    first = verdict.scaling[0]
    for point in tuned.points:
        size = _size_of(point, verdict.unit)
        linear = point.samples_per_second / size / (first.samples_per_second / first.size)
        parts = _parts(point)
        step = sum(parts.values())
        shares = [f"{100 * parts.get(part, 0.0) / step:.0f} %" if step else "" for part in ("data", "network")]
        alone = "" if point.all_reduce is None else f"{1000 * point.all_reduce:.1f} ms"
        batch = [str(each or "") for each in (point.micro, point.accumulation)]
        kind = point.parallel + (", checkpointing" if point.recompute else "")
        rows.append((str(point.nodes), str(point.ranks), kind, *batch, figure(point.samples_per_second),
                     f"{100 * linear:.0f} %", *shares, alone, _size(point.peak)))  # fmt: skip
    tables = {"Ranks, each with the whole global batch" if tuned.batch else "Ranks": rows}
    if tuned.trials:
        tables["One rank alone"] = [
            ("MICRO", "CHECKPOINTING", "SAMPLES/S", "PEAK", "FITS"),
            *map(_trial_row, sorted(tuned.trials, key=lambda each: each[1::-1])),
        ]
    if (memory := estimate(tuned, verdict.choice.point)) is not None:
        measured = verdict.choice.point.peak or next(
            (each.peak for each in tuned.trials
             if (each.micro, each.recompute) == (verdict.choice.point.micro, verdict.choice.point.recompute)), None
        )  # fmt: skip
        more = ", measured with all else that the process took" if tuned.device == "cpu" else ""
        tables[f"Memory of a rank with the choice: estimated of tensors{more}"] = [
            ("PARAMETERS", "GRADIENTS", "OPTIMIZER", "ACTIVATIONS", "ESTIMATED", "MEASURED"),
            (*map(_size, memory), _size(memory.total), _size(measured) or "not measured"),
        ]
    return tables


def lines(tuned: Tuned, verdict: Verdict) -> list[str]:
    """Return the text for people."""
    shown: list[str] = []
    for title, rows in _tables(tuned, verdict).items():
        shown += [title, *(f"  {line}" for line in columns(rows, left=0)), ""]
    shown += [f"note: {note}" for note in tuned.notes]
    return [*shown, "choice", *(f"  {reason}" for reason in verdict.choice.reasons)]


def html(tuned: Tuned, verdict: Verdict, title: str) -> str:
    """Return a page with a chart of the speed over the size, beside what linear would be, and the tables."""
    rows, alone = verdict.scaling, verdict.scaling[0].samples_per_second / verdict.scaling[0].size
    speeds = {
        "measured": [_point(row.size, row.samples_per_second) for row in rows],
        "linear": [_point(row.size, alone * row.size) for row in rows],
    }
    micro = {
        f"activation checkpointing {word}": [
            _point(each.micro, each.samples_per_second)
            for each in sorted(tuned.trials)
            if each.recompute == recompute and each.samples_per_second
        ]
        for word, recompute in (("off", False), ("on", True))
    }
    per_second = "Samples per second" if tuned.batch else "Steps per second times ranks"
    charts = [
        line_chart(f"{per_second} over {verdict.unit}s", speeds, zero=True, x=verdict.unit),
        line_chart("Samples per second of one rank over the micro batch", micro, zero=True, x="micro batch size"),
    ]
    page = render(
        "report/tuning.html.j2",
        title=title,
        charts=[chart for chart in charts if chart],
        tables=_tables(tuned, verdict),
        reasons=[*verdict.choice.reasons, *tuned.notes],
    )
    return visible(page).encode("utf-8", errors="backslashreplace").decode()


def _point(size: int, value: float) -> curves.Point:
    assert math.isfinite(value)
    return curves.Point(size, value, value, value)
