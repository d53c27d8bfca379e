"""What the newest samples of a run's GPUs say: use, memory, power, and clocks that the driver lowers."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmddp.records.values import number
from slurmddp.run.events import tail_records
from slurmddp.run.layout import RunFolder
from slurmddp.visible import one_line

#: Bytes at the end of a node's file that hold its newest line.
_TAIL = 2**14
#: Seconds after which a sample says nothing about now: lines come once per minute.
_OLD = 300
#: A reason that lowers the clocks in normal operation, at full load.
_USUAL = frozenset({"power cap"})
#: Key of a sample -> how a range of it is written.
_FIGURES = {"use": "{} % busy", "memory_gib": "{} GiB", "watts": "{} W", "celsius": "{} °C", "mhz": "{} MHz"}


@dataclass(frozen=True)
class Gpu:
    """The newest record of one GPU, over a minute: means of use (percent) and watts, the most memory_gib and celsius,
    the lowest mhz; None: its driver does not tell. slowed: why its clocks were lowered. time: unix seconds.
    """

    node: str
    index: int
    time: float
    figures: Mapping[str, float | None]
    slowed: Sequence[str]

    def as_dict(self) -> dict[str, Any]:
        return {"node": self.node, "gpu": self.index, "time": self.time, **self.figures, "slowed": list(self.slowed)}


def read_gpus(folder: RunFolder, attempt: int | None) -> list[Gpu]:
    """Return the newest record of each GPU of an attempt, by node. Empty where nothing was sampled. Raises OSError."""
    if attempt is None:
        return []
    files = sorted(folder.gpu_folder(attempt).glob("*.jsonl"))
    return [gpu for file in files for gpu in _newest(file, folder.path)]


def _newest(file: Path, below: Path) -> list[Gpu]:
    record = next(iter(tail_records(file, lambda record: record or None, _TAIL, below)[::-1]), {})
    items, moment = record.get("gpus"), number(record.get("time"))
    gpus = []
    for each in items if isinstance(items, list) and moment is not None else ():
        if isinstance(each, dict) and isinstance(each.get("gpu"), int):
            figures = {name: number(each.get(name)) for name in (*_FIGURES, "total_gib")}
            slowed = each.get("slowed")
            reasons = [str(reason) for reason in slowed] if isinstance(slowed, list) else []
            gpus.append(Gpu(file.stem, each["gpu"], moment or 0.0, figures, reasons))
    return gpus


def gpus_line(gpus: Sequence[Gpu]) -> str | None:
    """Return `93 % busy, 61 of 80 GiB, 412 W; least busy: node3 GPU 2, 41 %`: medians; None without recent samples."""
    fresh = [gpu for gpu in gpus if time.time() - gpu.time < _OLD]
    busy = [(use, gpu) for gpu in fresh if (use := gpu.figures["use"]) is not None]
    parts = [f"{statistics.median(use for use, _ in busy):.0f} % busy"] if busy else []
    memory, total = (_median(fresh, name) for name in ("memory_gib", "total_gib"))
    if memory is not None and total is not None:
        parts.append(f"{memory:.0f} of {total:.0f} GiB")
    if (watts := _median(fresh, "watts")) is not None:
        parts.append(f"{watts:.0f} W")
    if not parts:
        return None
    text = ", ".join(parts)
    if len(busy) > 1:
        use, least = min(busy, key=lambda pair: pair[0])
        text += f"; least busy: {least.node} GPU {least.index}, {use:.0f} %"
    slowed = [gpu for gpu in fresh if not _USUAL.issuperset(gpu.slowed)]
    if slowed:
        first, more = slowed[0], f" and {len(slowed) - 1} more" if len(slowed) > 1 else ""
        text += f"; clocks lowered: {first.node} GPU {first.index} ({', '.join(first.slowed)}){more}"
    return one_line(text)


def gpu_table(gpus: Sequence[Gpu]) -> dict[str, str | None]:
    """Return a row per node: `4 GPUs: 91 to 95 % busy, 61 GiB, 400 to 420 W, ...`."""
    nodes: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        nodes.setdefault(gpu.node, []).append(gpu)
    rows: dict[str, str | None] = {}
    for node, its in nodes.items():
        parts = [text.format(_range(its, name)) for name, text in _FIGURES.items() if _range(its, name)]
        slowed = dict.fromkeys(reason for gpu in its for reason in gpu.slowed)
        parts += [f"clocks lowered: {', '.join(slowed)}"] if slowed else []
        rows[node] = f"{len(its)} GPU{'s' * (len(its) > 1)}: {', '.join(parts)}"
    return rows


def _median(gpus: Sequence[Gpu], name: str) -> float | None:
    values = [value for gpu in gpus if (value := gpu.figures[name]) is not None]
    return statistics.median(values) if values else None


def _range(gpus: Sequence[Gpu], name: str) -> str:
    values = [value for gpu in gpus if (value := gpu.figures[name]) is not None]
    if not values:
        return ""
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return low if low == high else f"{low} to {high}"
