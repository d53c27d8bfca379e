"""Messages about checkpoints for people and events.jsonl: the same from the entrypoint and from the library."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from slurmddp.records.events import Facts
from slurmddp.records.rank_events import CheckpointFailed, CheckpointRejected, CheckpointSaved, Resumed
from slurmddp.runtime.checkpoint import reader
from slurmddp.runtime.checkpoint.saving import Failed, Saved
from slurmddp.runtime.console import Console
from slurmddp.runtime.errors import RuntimeFailure
from slurmddp.runtime.world import World
from slurmddp.shared.checkpoint import layout
from slurmddp.shared.units import human


class Speaker(Protocol):
    """Who speaks: on rank 0, and nowhere else."""

    @property
    def console(self) -> Console:
        """To people."""
        ...

    def record(self, facts: Facts) -> None:
        """Write an event."""
        ...


def choose(world: World, speaker: Speaker, roots: Sequence[Path]) -> tuple[reader.Choice | None, list[Path]]:
    """Return the newest checkpoint that verifies, and the rejected ones, each with a message. Rank 0 chooses; a
    collective.
    """
    rejected: list[str] = []

    def note(one: layout.Rejected) -> None:
        rejected.append(str(one.folder))
        speaker.console.warn(f"checkpoint rejected: {one}; trying the one before")
        speaker.record(CheckpointRejected(str(one.folder), one.file, one.why))

    def choose_on_main() -> tuple[Any, list[str]]:
        found = reader.choose(roots, note)
        return (str(found.path), found.step, found.world, found.data) if found else None, rejected

    chosen, refused = world.on_main(choose_on_main)
    return reader.Choice(Path(chosen[0]), *chosen[1:]) if chosen else None, [Path(path) for path in refused]


def resumed(speaker: Speaker, world: World, choice: reader.Choice, *, restored: bool) -> None:
    """A checkpoint has been loaded. `restored`: with the ranks' random states."""
    say, were = speaker.console.say, choice.world
    say(f"resumed    step {choice.step} from {choice.path}, saved by {were} rank{'s' * (were > 1)}")
    if not restored:
        say(
            f"           saved by {were} ranks, now {world.size}: the ranks get new random states, derived from "
            "(seed, step, rank)"
        )
    speaker.record(Resumed(choice.step, str(choice.path), were, choice.data.get("samples"), restored))


def ended(speaker: Speaker, results: Sequence[Saved | Failed]) -> list[Failed]:
    """Saves have ended. Returns those that failed. Raises RuntimeFailure if the ranks have lost each other."""
    failed = [result for result in results if isinstance(result, Failed)]
    for result in results:
        if isinstance(result, Saved):
            _saved(speaker, result)
        elif result.fatal:
            raise RuntimeFailure(f"the checkpoint of step {result.step} could not be written: {result.message}")
        else:
            older = "training continues, an older checkpoint exists" if result.older else "there is no older checkpoint"
            speaker.console.warn(f"checkpoint of step {result.step} could not be written: {result.message}; {older}")
            speaker.record(CheckpointFailed(result.step, result.message, result.older))
    return failed


def _saved(speaker: Speaker, result: Saved) -> None:
    if result.remark:
        speaker.console.warn(f"checkpoint {result.path.name}: {result.remark}")
    speaker.console.say(
        f"checkpoint {result.path.name}, {human(result.bytes)} in {result.seconds:.2f} s, "
        f"training waited {result.stall:.2f} s"
    )
    times = round(result.seconds, 3), round(result.stall, 4)
    speaker.record(CheckpointSaved(result.step, *times, result.bytes, str(result.path)))
