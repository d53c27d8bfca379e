"""What the main thread of a script spends its time with, from looks at its stack: data, compute, or the network."""

import sys
import time
from functools import cache
from types import FrameType

from slurmddp.runtime.measure.straggler_detection import COMPUTE, DATA, NETWORK
from slurmddp.runtime.observe.signs import Steps, issued

_BACKWARD = "backward"
#: Frames that are looked through for a data loader.
_DEPTH = 50


@cache
def _place(file: str) -> str:
    """Return what a function of this source file does."""
    if file.endswith("/torch/utils/data/dataloader.py"):
        return DATA
    if file.endswith("/torch/autograd/graph.py"):
        return _BACKWARD
    if "/torch/distributed/" in file or file.endswith("/torch/nn/parallel/distributed.py"):
        return NETWORK
    return COMPUTE


class Shares:
    """Counts looks by what the main thread did. On GPUs, where it runs ahead, only the data loader tells something."""

    def __init__(self, main: int, steps: Steps) -> None:
        """main: the main thread's identifier."""
        self._main, self._steps = main, steps
        self._looks = dict.fromkeys((DATA, COMPUTE, NETWORK), 0)
        self._before = 0  # collectives that had been issued when the backward pass began
        self._since, self._step = time.monotonic(), 0

    def look(self) -> None:
        """Look once."""
        frame = sys._current_frames().get(self._main)
        if frame is not None:
            self._looks[self._part(frame)] += 1

    def window(self) -> list[float]:
        """Return seconds per step of data, compute and network, and of the step, since last time; [] without steps."""
        now, step, looks = time.monotonic(), self._steps.done, self._looks
        steps, seconds = step - self._step, now - self._since
        self._since, self._step, self._looks = now, step, dict.fromkeys(looks, 0)
        total = sum(looks.values())
        if steps < 1 or not total:
            return []
        return [*(seconds / steps * looks[part] / total for part in (DATA, COMPUTE, NETWORK)), seconds / steps]

    def _part(self, frame: FrameType) -> str:
        place = _place(frame.f_code.co_filename)
        if place == _BACKWARD:
            # C++ computes gradients, and then waits for the others: the first bucket on its way divides the two.
            return NETWORK if issued() > max(self._before, self._steps.issued) else COMPUTE
        self._before = issued()
        above: FrameType | None = frame
        for _ in range(_DEPTH):
            if above is None or place == NETWORK:
                break
            if _place(above.f_code.co_filename) == DATA:
                return DATA
            above = above.f_back
        return place
