"""Stragglers among the ranks of a script of the user's own, from what their beats tell."""

from collections.abc import Mapping

from slurmddp.runtime.journal import Events
from slurmddp.runtime.measure.straggler_detection import Figures, Persistence, slow_hosts
from slurmddp.runtime.observe.beats import Beat
from slurmddp.runtime.watch.process_exit import say


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
