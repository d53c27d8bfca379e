"""What rank 0 shows to people, line by line."""

import contextlib
import sys
import time

from slurmddp.shared.units import clock, short


class Console:
    """Prints on rank 0 and nowhere else."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled

    def say(self, text: str) -> None:
        """Print one line at once: the output mostly goes to a file that somebody follows."""
        if self._enabled:
            with contextlib.suppress(OSError, ValueError):  # A full disk, or nobody reads: no reason to end a run.
                print(text, flush=True)

    def warn(self, text: str) -> None:
        if self._enabled:
            with contextlib.suppress(OSError, ValueError):
                print(f"warning: {text}", file=sys.stderr, flush=True)


class Speed:
    """Samples and targets per second of training: time spent on saving and evaluating does not count."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._samples = 0
        self._targets = 0
        self._steps = 0
        self._all_seconds = 0.0
        self._all_steps = 0

    def add(self, samples: int, targets: int) -> None:
        self._samples += samples
        self._targets += targets
        self._steps += 1

    def pause(self, seconds: float) -> None:
        self._since += seconds

    def read(self) -> tuple[float, float]:
        """Samples and targets per second since the last call."""
        now = time.monotonic()
        seconds = max(now - self._since, 1e-9)
        result = (self._samples / seconds, self._targets / seconds)
        self._all_seconds += seconds
        self._all_steps += self._steps
        self._since, self._samples, self._targets, self._steps = now, 0, 0, 0
        return result

    def eta(self, steps: int) -> float:
        """Return seconds that `steps` more will take at the mean speed so far (as of the last read)."""
        return steps * self._all_seconds / self._all_steps if self._all_steps else 0.0


def progress(*, step: int, steps: int, loss: float, rate: float, speed: float, unit: str, eta: float) -> str:
    """step 120/2000  loss 2.345  lr 3.0e-04  12.3k tok/s  eta 1:23."""
    word = "tok" if unit == "tokens" else unit
    progress = f"step {step:>{len(str(steps))}}/{steps}"
    return f"{progress}  loss {loss:.4f}  lr {rate:.1e}  {short(speed)} {word}/s  eta {clock(eta)}"


def figures(values: dict[str, float]) -> str:
    """Named figures in a row: bits per byte 3.210, accuracy 0.950."""
    return "".join(f", {name.replace('_', ' ')} {value:.4f}" for name, value in values.items())
