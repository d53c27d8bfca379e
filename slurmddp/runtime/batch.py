"""Dealing a global batch out to ranks and micro steps: arithmetic only, shared with the login side's planner.

A global batch of G samples covers positions 0..G-1. Each rank gets a contiguous share, and runs it as a
number of micro steps that is the same on all ranks (gradients are exchanged in the last one). Where G does
not divide evenly, sizes differ by at most one and every sample has the same weight; nothing is padded,
dropped or repeated.
"""

from itertools import accumulate, pairwise


def split(total: int, parts: int) -> tuple[int, ...]:
    """Sizes of `parts` parts of `total` things; they differ by at most one, the larger ones first.

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


def share(total: int, world: int, rank: int) -> range:
    """The contiguous positions of `total` that `rank` of `world` ranks takes; empty where total <= rank.

    The arithmetic is closed form: it costs the same for one rank and for a hundred thousand.
    Raises ValueError for a rank outside 0..world-1 or a total below zero.
    """
    if total < 0:
        raise ValueError(f"total must not be negative, not {total}")
    if not 0 <= rank < world:
        raise ValueError(f"rank must be between 0 and {world - 1}, not {rank}")
    size, larger = divmod(total, world)
    start = rank * size + min(rank, larger)
    return range(start, start + size + (rank < larger))


def accumulation(global_batch: int, micro: int, world: int) -> int:
    """Micro steps that make up one optimizer step, the same on every rank, none larger than `micro` samples.

    Raises ValueError for a number below one.
    """
    for name, value in (("global batch", global_batch), ("micro batch", micro), ("world size", world)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    largest_share = -(-global_batch // world)
    return -(-largest_share // micro)


def micro_batches(global_batch: int, micro: int, world: int, rank: int) -> tuple[range, ...]:
    """The positions of each micro step of `rank`: `accumulation()` ranges that together are its `share()`.

    Smaller ones come first, so that a rank with fewer samples than micro steps has its empty ones at the
    beginning, where no collective waits for it. All are empty where the rank's share is.
    """
    steps = accumulation(global_batch, micro, world)
    mine = share(global_batch, world, rank)
    ends = list(accumulate(reversed(split(len(mine), steps)), initial=mine.start))
    return tuple(range(start, end) for start, end in pairwise(ends))


def is_even(global_batch: int, micro: int, world: int) -> bool:
    """Whether every micro batch of every rank holds exactly `micro` samples."""
    return global_batch == micro * world * accumulation(global_batch, micro, world)
