"""How fast each GPU multiplies matrices: measured on each node beside the other checks, compared by the head."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from slurmddp.records.preflight import Finding, bad, warn
from slurmddp.runtime.preflight.checks import devices
from slurmddp.runtime.preflight.node_settings import NodeSettings

_COMMAND = (sys.executable, "-m", "slurmddp.runtime.preflight.matmul")
#: With the import of torch, which the ranks need anyway: it is in the node's memory then.
_SECONDS = 15.0
#: Parts of the median of all GPUs of the same name. Cards of one name differ by a few percent.
_SLOW, _ODD = 0.7, 0.85
#: Part of the data sheet, which real products never reach; of the median of the whole job.
_LEAST_OF_SHEET = 0.5
_TODO = "ask the site's support to check its clocks, cooling and power"


class Speed(NamedTuple):
    """One GPU. tflops: measured; sheet: by the data sheet, None if the card is not known."""

    gpu: int
    name: str
    tflops: float
    sheet: float | None


class Measurement:
    """The program that measures, while the node checks other things."""

    def __init__(self, settings: NodeSettings, command: Sequence[str] = _COMMAND, seconds: float = _SECONDS) -> None:
        self._seconds = seconds
        self._started = None
        self._until = time.monotonic() + seconds
        if settings.gpus > 0 and (settings.vendor or devices.driver()) in ("nvidia", "amd"):
            pipe = subprocess.PIPE
            self._started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)

    def result(self) -> tuple[list[Speed], list[Finding]]:
        """Return the speed of each GPU, or a warning. Call it once. Raises OSError."""
        if self._started is None:
            return [], []
        try:
            out, errors = self._started.communicate(timeout=max(0.0, self._until - time.monotonic()))
            return from_json(json.loads(out)), []
        except subprocess.TimeoutExpired:
            self._started.kill()
            why = f"no result within {self._seconds:.0f} s"
        except (ValueError, TypeError):
            said = errors.decode(errors="replace").strip()
            print(said, file=sys.stderr)
            why = said.splitlines()[-1] if said else f"exit code {self._started.returncode}"
        return [], [warn(f"the speed of its GPUs is not known: {why}", "see its log")]


def from_json(items: Sequence[Any]) -> list[Speed]:
    """Return the speeds that matmul.py prints, and nodes send. Raises ValueError and TypeError for anything else."""
    return [
        Speed(int(gpu), str(name), float(tflops), sheet if sheet is None else float(sheet))
        for gpu, name, tflops, sheet in items
    ]


def compare(speeds: Mapping[str, Sequence[Speed]]) -> Iterator[tuple[str, Finding]]:
    """Yield (node, finding) for GPUs that are slower than the others of the same name. Pure."""
    every = [(node, speed) for node, found in speeds.items() for speed in found]
    for name in dict.fromkeys(speed.name for _, speed in every):
        same = [(node, speed) for node, speed in every if speed.name == name]
        median = statistics.median(speed.tflops for _, speed in same)
        for node, speed in same:
            if speed.tflops < _ODD * median:
                level = bad if speed.tflops < _SLOW * median else warn
                part = f"{speed.tflops / median:.0%} of the median of {len(same)} such GPUs"
                yield node, level(f"GPU {speed.gpu} ({name}) computes {speed.tflops:.0f} TFLOP/s, {part}", _TODO)
        node, first = same[0]
        if first.sheet and median < _LEAST_OF_SHEET * first.sheet:
            told = f"the {len(same)} GPUs ({name}) compute {median:.0f} TFLOP/s; the data sheet says {first.sheet:.0f}"
            yield node, warn(told, _TODO)
