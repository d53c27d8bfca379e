"""What the main thread of a script spends its time with, from looks at its stack: data, checkpoints, compute, or the
network.
"""

import sys
import time
from functools import cache
from types import FrameType
from typing import NamedTuple

from slurmddp.runtime.measure.straggler_detection import COMPUTE, DATA, NETWORK
from slurmddp.runtime.measure.timing import CHECKPOINT
from slurmddp.runtime.observe.ddp_times import Times
from slurmddp.runtime.observe.signs import Steps, issued

#: What the main thread cannot tell: on a GPU, it only waits for what it has asked of it earlier.
UNMEASURED = "unmeasured"
#: Gradients are computed while others travel.
OVERLAP = "overlap"
#: As a metrics line has them.
PARTS = (DATA, CHECKPOINT, COMPUTE, OVERLAP, NETWORK, UNMEASURED)
_BACKWARD = "backward"
#: Frames that are looked through for a data loader or a checkpoint.
_DEPTH = 50


@cache
def _place(file: str) -> str:
    if file.endswith("/torch/utils/data/dataloader.py"):
        return DATA
    if file.endswith(("/torch/serialization.py", "/safetensors/torch.py")) or "/torch/distributed/checkpoint/" in file:
        return CHECKPOINT
    if file.endswith("/torch/autograd/graph.py"):
        return _BACKWARD
    if "/torch/distributed/" in file or file.endswith("/torch/nn/parallel/distributed.py"):
        return NETWORK
    return COMPUTE


class Spent(NamedTuple):
    """A stretch of time: its steps, its seconds, and its seconds by part."""

    steps: int
    seconds: float
    parts: dict[str, float]


class Shares:
    """Counts looks by what the main thread did. On GPUs, where it runs ahead, only the data loader tells something."""

    def __init__(self, main: int, steps: Steps) -> None:
        self._main, self.steps = main, steps
        self.looks = dict.fromkeys((DATA, CHECKPOINT, COMPUTE, NETWORK), 0)
        self._before = 0  # collectives that had been issued when the backward pass began

    def look(self) -> None:
        frame = sys._current_frames().get(self._main)
        if frame is not None:
            self.looks[self._part(frame)] += 1

    def _part(self, frame: FrameType) -> str:
        place = _place(frame.f_code.co_filename)
        if place == _BACKWARD:
            # C++ computes gradients, and then waits for the others: the first bucket on its way divides the two.
            return NETWORK if issued() > max(self._before, self.steps.issued) else COMPUTE
        self._before = issued()
        above: FrameType | None = frame
        for _ in range(_DEPTH):
            if above is None or place == NETWORK:
                break
            if (found := _place(above.f_code.co_filename)) in (DATA, CHECKPOINT):
                return found
            above = above.f_back
        return place


class Reader:
    """Stretches of its own over the looks: what one reader has read is still new to the others."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._since, self._step, self._looks = time.monotonic(), shares.steps.done, dict(shares.looks)

    def read(self) -> Spent:
        """Return the time since the last call; without parts if nobody has looked since."""
        now, step, looks = time.monotonic(), self._shares.steps.done, dict(self._shares.looks)
        new = {part: count - self._looks[part] for part, count in looks.items()}
        steps, seconds, total = step - self._step, now - self._since, sum(new.values())
        self._since, self._step, self._looks = now, step, looks
        return Spent(steps, seconds, {part: seconds * count / total for part, count in new.items()} if total else {})


def figures(spent: Spent) -> list[float]:
    """Return seconds per step of data, compute and network, and of the step, to compare ranks; [] without steps."""
    if spent.steps < 1 or not spent.parts:
        return []
    return [*(spent.parts[part] / spent.steps for part in (DATA, COMPUTE, NETWORK)), spent.seconds / spent.steps]


def line_seconds(spent: Spent, ddp: Times | None, *, gpu: bool) -> dict[str, float]:
    """Return `seconds` of a metrics line: the parts that took time, which add up to all of it.

    ddp: what DDP measured per step. The network's part is what training waited for it: where gradients travel while
    others are computed, it is `overlap`.
    """
    if not spent.parts:
        return {}
    parts = dict(spent.parts)
    if gpu:
        rest = parts[COMPUTE] + parts[NETWORK]
        parts[NETWORK] = min(ddp.exposed * spent.steps, rest) if ddp else 0.0
        parts[COMPUTE if ddp else UNMEASURED] = rest - parts[NETWORK]
        if not ddp:
            del parts[COMPUTE]
    if ddp:
        # The first bucket is on its way: what is still computed then was taken for the network on CPUs, not on GPUs.
        counted = COMPUTE if gpu else NETWORK
        parts[OVERLAP] = min(ddp.overlap * spent.steps, parts[counted])
        parts[counted] -= parts[OVERLAP]
    return {part: seconds for part in PARTS if (seconds := round(parts.get(part, 0.0), 5)) > 0}
