"""What people and events.jsonl are told of checkpoints: the same by the entrypoint and by the library."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from slurmddp.runtime.checkpoint import reader
from slurmddp.runtime.checkpoint.saving import Saved
from slurmddp.runtime.console import Console
from slurmddp.runtime.world import World
from slurmddp.shared.checkpoint import layout
from slurmddp.shared.units import human


class Speaker(Protocol):
    """Who speaks: on rank 0, and nowhere else."""

    @property
    def console(self) -> Console:
        """To people."""
        ...

    def record(self, event: str, **facts: object) -> None:
        """Write an event."""
        ...


def choose(world: World, speaker: Speaker, roots: Sequence[Path]) -> tuple[reader.Choice | None, list[Path]]:
    """The newest checkpoint that verifies, and the rejected ones, each with a message. Rank 0 chooses; a collective."""
    rejected: list[str] = []

    def note(one: layout.Rejected) -> None:
        rejected.append(str(one.folder))
        speaker.console.warn(f"checkpoint refused: {one}; looking for the one before")
        speaker.record("checkpoint_rejected", path=str(one.folder), file=one.file, why=one.why)

    def choose_on_main() -> tuple[Any, list[str]]:
        found = reader.choose(roots, note)
        return (str(found.path), found.step, found.world, found.data) if found else None, rejected

    chosen, refused = world.on_main(choose_on_main)
    return reader.Choice(Path(chosen[0]), *chosen[1:]) if chosen else None, [Path(path) for path in refused]


def saved(speaker: Speaker, result: Saved) -> None:
    """A checkpoint has been written."""
    speaker.console.say(
        f"checkpoint {result.path.name}, {human(result.bytes)} in {result.seconds:.2f} s, "
        f"the step held up for {result.stall:.2f} s"
    )
    speaker.record(
        "checkpoint_saved",
        step=result.step,
        seconds=round(result.seconds, 3),
        stall=round(result.stall, 4),
        bytes=result.bytes,
        path=str(result.path),
    )
