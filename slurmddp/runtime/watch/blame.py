"""Who holds up the other ranks, judged from what each tells of itself. No torch, no clock."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Beat:
    """Where a rank is.

    phase: of its main thread. collectives: issued so far, by process group. waited: seconds since the last sign of
    progress. late: longer than it may be. over: late, and it does not compute either. gone: it has exited by itself, or
    is no longer observed. figures: seconds per step of data, compute and network, and of the step, since the beat
    before.
    """

    number: int
    node: str
    step: int
    phase: str = ""
    collectives: Mapping[str, int] = field(default_factory=dict)
    waited: float = 0.0
    late: bool = False
    over: bool = False
    gone: bool = False
    figures: Sequence[float] = ()


@dataclass(frozen=True)
class Verdict:
    """Who holds up the others. ranks: none, where all have issued the same collectives and wait.

    kind: silent (it sends no beats), behind (the others wait for it), all (none is behind). phase, step: where the
    culprit is, or was when it was last heard of.
    """

    kind: str
    ranks: Sequence[int]
    phase: str = ""
    step: int = 0


def blame(beats: Mapping[int, Beat], silent: Collection[int]) -> Verdict | None:
    """Return who did not join. None while nobody is late, or while the rank that is behind still works.

    beats: the newest of each rank. silent: ranks that have sent none for a while.
    """
    if not any(beat.late for beat in beats.values()):
        return None
    lost = sorted(rank for rank in silent if rank not in beats or not beats[rank].gone)
    if lost:
        return _verdict("silent", lost, beats)
    behind = _behind(beats)
    if behind:
        stuck = all(beats[rank].over or beats[rank].gone for rank in behind)
        return _verdict("behind", behind, beats) if stuck else None
    # All wait for the same collective. Where a rank has exited, the others may have something left to do alone.
    if all(beat.over for beat in beats.values()):
        return _verdict("all", [], beats) if len(beats) > 1 else _verdict("behind", list(beats), beats)
    return None


def _verdict(kind: str, ranks: list[int], beats: Mapping[int, Beat]) -> Verdict:
    known = [beats[rank] for rank in ranks or beats if rank in beats]
    slowest = min(known, key=lambda beat: beat.step, default=Beat(0, "", 0, "start"))
    return Verdict(kind, ranks, slowest.phase, slowest.step)


def _behind(beats: Mapping[int, Beat]) -> list[int]:
    """Return the ranks for which others wait, and which wait for nobody themselves; else those with the fewest steps;
    else those that wait for data, on their way to the collective that the others are in.
    """
    low: set[int] = set()
    high: set[int] = set()
    for group in {name for beat in beats.values() for name in beat.collectives}:
        issued = {rank: beat.collectives[group] for rank, beat in beats.items() if group in beat.collectives}
        low |= {rank for rank, number in issued.items() if number < max(issued.values())}
        high |= {rank for rank, number in issued.items() if number > min(issued.values())}
    if low:
        return sorted(low - high or low)
    steps = {rank: beat.step for rank, beat in beats.items()}
    behind = sorted(rank for rank, step in steps.items() if step < max(steps.values()))
    if not behind:
        behind = sorted(rank for rank, beat in beats.items() if beat.phase == "data")
    return behind if len(behind) < len(beats) else []
