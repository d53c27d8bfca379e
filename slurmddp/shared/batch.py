"""Dealing a global batch out to ranks and micro steps: arithmetic only.

A global batch of G samples covers positions 0..G-1. Each rank gets a contiguous share, and runs it as a
number of micro steps that is the same on all ranks (gradients are exchanged in the last one). Where G does
not divide evenly, sizes differ by at most one and every sample has the same weight; nothing is padded,
dropped or repeated.

Where ranks are not equally quick, `weights` says how much of the batch each takes. Only the shares follow
from them: a sample weighs the same in the gradient wherever it is computed.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise
from math import isfinite
from typing import Any

#: Of each rank, in the order of the ranks; None where all are equal.
Weights = tuple[float, ...] | None


def split(total: int, parts: int) -> tuple[int, ...]:
    """Return sizes of `parts` parts of `total` things; they differ by at most one, the larger ones first.

    >>> split(10, 4)
    (3, 3, 2, 2)

    Raises ValueError for a negative total or less than one part.
    """
    if total < 0:
        raise ValueError(f"total must not be negative, not {total}")
    if parts < 1:
        raise ValueError(f"parts must be at least 1, not {parts}")
    size, larger = divmod(total, parts)
    return (size + 1,) * larger + (size,) * (parts - larger)


@lru_cache(maxsize=64)
def apportion(total: int, weights: tuple[float, ...]) -> tuple[int, ...]:
    """Return sizes of parts of `total` things in proportion to `weights`, by largest remainder (ties: the first).

    Their sum is `total`, and each is less than one away from its exact quota. The arithmetic is exact, so that
    every rank comes to the same result. Equal weights give what `split` gives.

    >>> apportion(10, (1, 1, 2))
    (3, 2, 5)

    Raises ValueError for a negative total, no weights, or a weight that is not a positive number.
    """
    if total < 0:
        raise ValueError(f"total must not be negative, not {total}")
    from fractions import Fraction  # Slow to import, and most jobs have no weights.

    if not weights:
        raise ValueError("there must be at least one weight")
    for weight in weights:
        _check_weight(weight)
    # As it is written: 0.1 and 0.2 are meant to be one to two, which their binary values are not quite.
    exact = [Fraction(str(weight)) for weight in weights]
    whole = sum(exact)
    quotas = [total * part / whole for part in exact]
    sizes = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(sizes)), key=lambda index: (sizes[index] - quotas[index], index))
    for index in by_remainder[: total - sum(sizes)]:
        sizes[index] += 1
    return tuple(sizes)


def shares(total: int, world: int, weights: Weights = None) -> tuple[int, ...]:
    """Return how many of `total` samples each of `world` ranks takes. Raises ValueError as `share` does."""
    if weights is None:
        return split(total, world)
    if len(weights) != world:
        raise ValueError(f"there must be one weight for each of {world} ranks, not {len(weights)}")
    return apportion(total, weights)


def share(total: int, world: int, rank: int, weights: Weights = None) -> range:
    """Return the contiguous positions of `total` that `rank` of `world` ranks takes; may be empty.

    Without weights the arithmetic is closed form: it costs the same for one rank and for a hundred thousand.
    Raises ValueError for a rank outside 0..world-1, a total below zero, or weights that do not fit.
    """
    if total < 0:
        raise ValueError(f"total must not be negative, not {total}")
    if not 0 <= rank < world:
        raise ValueError(f"rank must be between 0 and {world - 1}, not {rank}")
    if weights is not None:
        sizes = shares(total, world, weights)
        start = sum(sizes[:rank])
        return range(start, start + sizes[rank])
    size, larger = divmod(total, world)
    start = rank * size + min(rank, larger)
    return range(start, start + size + (rank < larger))


def accumulation(global_batch: int, micro: int, world: int, weights: Weights = None) -> int:
    """Micro steps that make up one optimizer step, the same on every rank, none larger than `micro` samples.

    Raises ValueError for a number below one, or weights that do not fit.
    """
    for name, value in (("global batch", global_batch), ("micro batch", micro), ("world size", world)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    largest_share = -(-global_batch // world) if weights is None else max(shares(global_batch, world, weights))
    return -(-largest_share // micro)


def micro_batches(
    global_batch: int, micro: int, world: int, rank: int, weights: Weights = None, *, lockstep: bool = False
) -> tuple[range, ...]:
    """Return the positions of each micro step of `rank`: `accumulation()` ranges that together are its `share()`.

    Smaller ones come first, so that a rank with fewer samples than micro steps has its empty ones at the
    beginning, where no collective waits for it. All are empty where the rank's share is.

    `lockstep`: ranks wait for each other in every micro step, so a small share is spread over all of them. Else
    a rank with a small share is done sooner with a few full ones.
    """
    steps = accumulation(global_batch, micro, world, weights)
    mine = share(global_batch, world, rank, weights)
    used = steps if weights is None or lockstep else max(1, -(-len(mine) // micro))
    sizes = split(len(mine), used) + (0,) * (steps - used)
    ends = list(accumulate(reversed(sizes), initial=mine.start))
    return tuple(range(start, end) for start, end in pairwise(ends))


def is_even(global_batch: int, micro: int, world: int, weights: Weights = None) -> bool:
    """Return whether every micro batch of every rank holds exactly `micro` samples."""
    return global_batch == micro * world * accumulation(global_batch, micro, world, weights)


def balanced(lengths: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Deal samples of these lengths to ranks that take `sizes` of them; return each rank's positions, shortest first.

    Longest first, each sample goes to the rank that has least to do for the size of its share and still has
    room. `sizes` adds up to len(lengths). Depends on nothing but the arguments.
    """
    dealt: list[list[int]] = [[] for _ in sizes]
    # One division of integers, correctly rounded: the same float on every machine.
    heap = [(0.0, rank) for rank, size in enumerate(sizes) if size]
    heapify(heap)
    loads = [0] * len(sizes)
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        _, rank = heappop(heap)
        dealt[rank].append(index)
        loads[rank] += lengths[index]
        if len(dealt[rank]) < sizes[rank]:
            heappush(heap, (loads[rank] / sizes[rank], rank))
    for positions in dealt:
        positions.reverse()
    return dealt


def weights_of(patterns: Mapping[str, Any], who: Sequence[tuple[str, str]]) -> Weights:
    """Return each rank's weight, from its node's and its device's name: that of the first pattern that fits either, or
    1.

    `patterns`: shell patterns ("a100-*", "*H100*"), upper and lower case told apart. None where all weights are
    the same. Raises ValueError for a weight that is not a positive number.
    """
    for pattern, weight in patterns.items():
        try:
            _check_weight(weight)
        except ValueError as error:
            raise ValueError(f"{pattern!r}: {error}") from error
    weights = tuple(
        next((float(weight) for pattern, weight in patterns.items() if _fits(pattern, names)), 1.0) for names in who
    )
    return None if len(set(weights)) <= 1 else weights


def unused_patterns(patterns: Mapping[str, Any], who: Sequence[tuple[str, str]]) -> list[str]:
    """Return patterns that fit no rank's node or device: most likely misspelt."""
    return [pattern for pattern in patterns if not any(_fits(pattern, names) for names in who)]


def _fits(pattern: str, names: tuple[str, str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _check_weight(weight: Any) -> None:
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not (number and isfinite(weight) and weight > 0):
        raise ValueError(f"a weight must be a number above 0, not {weight!r}")
