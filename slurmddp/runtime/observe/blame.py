"""Which rank did not join the others, judged from the ranks' beats. No torch, no clock."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from slurmddp.runtime.observe.beats import Beat


@dataclass(frozen=True)
class Verdict:
    """Who holds up the others. ranks: none, where all have issued the same collectives and wait.

    kind: silent (it writes no beats), behind (the others wait for it), all (none is behind).
    """

    kind: str
    ranks: tuple[int, ...]


def blame(beats: Mapping[int, Beat], silent: Collection[int]) -> Verdict | None:
    """Return who did not join. None while nobody is late, or while the rank that is behind still works.

    beats: the newest of each rank. silent: ranks that have written none for a while.
    """
    if not any(beat.late for beat in beats.values()):
        return None
    lost = sorted(rank for rank in silent if rank not in beats or not beats[rank].gone)
    if lost:
        return Verdict("silent", tuple(lost))
    behind = _behind(beats)
    if behind:
        stuck = all(beats[rank].over or beats[rank].gone for rank in behind)
        return Verdict("behind", tuple(behind)) if stuck else None
    # All wait for the same collective. Where a rank has exited, the others may have something left to do alone.
    if all(beat.over for beat in beats.values()):
        return Verdict("all", ()) if len(beats) > 1 else Verdict("behind", tuple(beats))
    return None


def _behind(beats: Mapping[int, Beat]) -> list[int]:
    """The ranks for which others wait, and which wait for nobody themselves; else those with the fewest steps."""
    low: set[int] = set()
    high: set[int] = set()
    for group in {name for beat in beats.values() for name in beat.collectives}:
        issued = {rank: beat.collectives[group] for rank, beat in beats.items() if group in beat.collectives}
        low |= {rank for rank, number in issued.items() if number < max(issued.values())}
        high |= {rank for rank, number in issued.items() if number > min(issued.values())}
    if low:
        return sorted(low - high or low)
    steps = {rank: beat.step for rank, beat in beats.items()}
    return sorted(rank for rank, step in steps.items() if step < max(steps.values()))
