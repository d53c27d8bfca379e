"""What the ranks of an observed script tell each other, a small file per rank in the run folder, written over and over;
and who slows the others down.

No sockets: it works wherever the run folder does, and a rank that is killed leaves its last words.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from slurmddp.runtime.journal import Events
from slurmddp.runtime.measure.straggler_detection import Figures, Persistence, slow_hosts
from slurmddp.runtime.watch.blame import Beat
from slurmddp.runtime.watch.process_exit import say


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
        beats = ((rank, self.read(rank)) for rank in range(self._world))
        return {rank: beat for rank, beat in beats if beat is not None}

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank:05d}.json"


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
