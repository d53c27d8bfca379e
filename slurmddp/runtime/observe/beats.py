"""What the ranks of an observed script tell each other, a small file per rank in the run folder, written over and over;
and what follows from it: who did not join the others, and who slows them down.

No sockets: it works wherever the run folder does, and a rank that is killed leaves its last words.
"""

import contextlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from slurmddp.runtime.journal import Events
from slurmddp.runtime.measure.straggler_detection import Figures, Persistence, slow_hosts
from slurmddp.runtime.watch.process_exit import say


@dataclass(frozen=True)
class Beat:
    """Where a rank is.

    collectives: by process group. waited: seconds since the last sign of progress. late: longer than it may be.
    over: late, and it does not compute either. gone: it has exited by itself, or is no longer observed.
    figures: seconds per step of data, compute and network, and of the step, since the beat before.
    """

    number: int
    node: str
    step: int
    collectives: dict[str, int] = field(default_factory=dict)
    waited: float = 0.0
    late: bool = False
    over: bool = False
    gone: bool = False
    figures: Sequence[float] = ()


class Beats:
    """The folder of one start of the ranks."""

    def __init__(self, folder: Path, world: int) -> None:
        """Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._world = folder, world

    def write(self, rank: int, beat: Beat) -> None:
        """Write this rank's beat over its last one. A disk that is full for a while does no harm."""
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path(rank), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                text = json.dumps(asdict(beat)).encode()
                os.pwrite(descriptor, text, 0)
                os.ftruncate(descriptor, len(text))
            finally:
                os.close(descriptor)

    def read(self, rank: int) -> Beat | None:
        try:
            return Beat(**json.loads(self._path(rank).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def all(self) -> dict[int, Beat]:
        found = {rank: self.read(rank) for rank in range(self._world)}
        return {rank: beat for rank, beat in found.items() if beat is not None}

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank:05d}.json"


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


class Comparison:
    """On rank 0: compares the newest windows of all ranks, as measure/stragglers.py does for the bundled tasks."""

    def __init__(self, events: Events, world: int) -> None:
        """world: number of ranks, all of which are needed."""
        self._events, self._world = events, world
        self._persistence = Persistence()
        self._compared: dict[int, int] = {}

    def add(self, beats: Mapping[int, Beat]) -> None:
        """Compare, where each rank has a new window. The first one is like no other: imports, connections, caches."""
        numbers = {rank: beat.number for rank, beat in beats.items() if beat.figures and beat.number > 2}
        if len(numbers) < self._world or any(self._compared.get(rank) == number for rank, number in numbers.items()):
            return
        self._compared = numbers
        ranks = [Figures(beat.node, rank, *beat.figures) for rank, beat in beats.items()]
        for notice in self._persistence.add(slow_hosts(ranks)):
            say(f"slurmddp: straggler: {notice.text()}\n")
            self._events.write(notice.event())
