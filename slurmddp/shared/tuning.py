"""The arithmetic of `slurmddp tune`: the largest batch that fits, memory, scaling, the gradient noise scale."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

#: A search ends when what fits and what does not are this share apart.
_CLOSE = 1 / 16
#: A micro batch that is slower than the fastest one by less than this is as good.
_AS_FAST = 0.03
#: Numbers that an optimizer keeps for each parameter, in fp32 as the parameters are.
_STATES = {"adamw": 2, "sgd": 1}


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number from 1 to `most` that fits, to a sixteenth; 0 if 1 does not.

    It doubles, then bisects: what fits must fit with any smaller number, too.
    """
    good, bad = 0, most + 1
    while good < most and bad > most:
        number = min(2 * good or 1, most)
        if fits(number):
            good = number
        else:
            bad = number
    while good and bad - good > max(1, good * _CLOSE):
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


def fast_enough(speeds: Mapping[int, float]) -> int:
    """Return the smallest micro batch that is about as fast as the fastest. speeds: samples per second by micro batch.

    Raises ValueError without any.
    """
    best = max(speeds.values())
    return min(micro for micro, speed in speeds.items() if speed >= (1 - _AS_FAST) * best)


def balanced(micro: int, total: int, ranks: int) -> int:
    """Return a micro batch, at most `micro`, with which a rank needs as many passes, all about equally large."""
    share = -(-total // ranks)
    return -(-share // -(-share // micro))


class Memory(NamedTuple):
    """Bytes on one rank, estimated."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return sum(self)


def state_bytes(parameters: int, optimizer: str, momentum: float) -> int:
    """Return the bytes that an optimizer keeps for `parameters` bytes of them, all in fp32."""
    return parameters * (0 if optimizer == "sgd" and not momentum else _STATES[optimizer])


def memory(parameters: int, state: int, activations: int, micro: int, shard: int = 1) -> Memory:
    """Estimate a rank's memory from bytes: of the parameters, the optimizer's state, and the activations of a sample.

    Not in it: buffers of communication, temporary results, what the allocator keeps, the parameters that FSDP gathers.
    """
    return Memory(parameters // shard, parameters // shard, state // shard, micro * activations)


def sizes(count: int) -> list[int]:
    """Return 1, 2, 4, ... and `count`."""
    return sorted({*(2**power for power in range(count.bit_length())), count})


class Scaled(NamedTuple):
    """A number of nodes (or of ranks of one node). efficiency: of linear. gain: what each added one brought, as a share
    of one alone; None for the first.
    """

    size: int
    samples_per_second: float
    efficiency: float
    gain: float | None


def scaling(speeds: Mapping[int, float]) -> list[Scaled]:
    """Return a row per size, the smallest first. speeds: samples per second by number of nodes."""
    rows: list[Scaled] = []
    for size, speed in sorted(speeds.items()):
        first = rows[0] if rows else None
        alone = first.samples_per_second / first.size if first else speed / size
        gain = (speed - rows[-1].samples_per_second) / (size - rows[-1].size) / alone if rows else None
        rows.append(Scaled(size, speed, speed / size / alone, gain))
    return rows


def worthwhile(rows: Sequence[Scaled], share: float) -> tuple[int, int | None]:
    """Return the largest size up to which each added node brought `share` of one alone, and the next one measured; None
    if there is none, so that more might be worth it.
    """
    for before, row in pairwise(rows):
        if row.gain is not None and row.gain < share:
            return before.size, row.size
    return rows[-1].size, None


class Noise(NamedTuple):
    """The gradient noise scale in samples, with its standard error; and what it is the ratio of.

    scale: None where the squared norm of the true gradient cannot be told from 0: the batches were too small.
    """

    scale: float | None
    error: float | None
    square: float  # of the true gradient's norm
    variance: float  # trace of the covariance of a sample's gradient


def noise_scale(norms: Sequence[tuple[float, float]], small: int, big: int) -> Noise:
    """Estimate tr(S) / |G|^2 of McCandlish et al. 2018 (arXiv:1812.06162), appendix A.1.

    norms: squared norms of the gradient's mean over `small` and over `big` samples, once per step. Both estimates are
    unbiased and are averaged before they are divided. The error is the jackknife's over the steps.

    Raises ValueError for fewer than two steps, or batches of the same size.
    """
    if len(norms) < 2 or small >= big:
        raise ValueError("needs two steps, and a small and a big batch")
    squares = [(big * at_big - small * at_small) / (big - small) for at_small, at_big in norms]
    variances = [(at_small - at_big) / (1 / small - 1 / big) for at_small, at_big in norms]
    count, square, variance = len(norms), math.fsum(squares), math.fsum(variances)
    if square <= 0:
        return Noise(None, None, square / count, variance / count)
    scale = variance / square
    left_out = [(variance - one) / (square - two) for one, two in zip(variances, squares, strict=True) if square != two]
    if len(left_out) < count or any(square - two <= 0 for two in squares):
        return Noise(None, None, square / count, variance / count)
    mean = math.fsum(left_out) / count
    error = math.sqrt((count - 1) / count * math.fsum((each - mean) ** 2 for each in left_out))
    return Noise(scale, error, square / count, variance / count)


def limit_first(parts: Mapping[str, float], loader: float | None, share: float = 0.1) -> str:
    """Return what holds up a step: "data", "network", or "compute".

    parts: seconds of a step by part. loader: seconds that the loader alone needs for the samples of a step. Waits below
    `share` of the step do not count; a loader that is as slow as the step holds it up whatever was measured.
    """
    step = sum(parts.values())
    data, network = parts.get("data", 0.0), parts.get("network", 0.0)
    if loader is not None and loader >= step > 0:
        return "data"
    if max(data, network) < share * step:
        return "compute"
    return "data" if data >= network else "network"
