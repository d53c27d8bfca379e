"""What the ranks of an observed script tell each other: a small file per rank in the run folder, written over and over.

No sockets: it works wherever the run folder does, and a rank that is killed leaves its last words.
"""

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path


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
        """Return a rank's newest beat; None without one, or while it is being written."""
        try:
            return Beat(**json.loads(self._path(rank).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def all(self) -> dict[int, Beat]:
        """Return the beats of the ranks that have written one."""
        found = {rank: self.read(rank) for rank in range(self._world)}
        return {rank: beat for rank, beat in found.items() if beat is not None}

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank:05d}.json"
