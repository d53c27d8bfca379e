"""Loading: rank 0 chooses the newest checkpoint that verifies, and every rank loads that one. What is said of
checkpoints, on the console and in events.jsonl, is the same from the entrypoint and from the library.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from slurmddp.records.events import Facts
from slurmddp.records.rank_events import CheckpointFailed, CheckpointRejected, CheckpointSaved, Resumed
from slurmddp.runtime import randomness
from slurmddp.runtime.checkpoint import shards, state, tensorfile
from slurmddp.runtime.checkpoint.saving import Failed, Saved
from slurmddp.runtime.console import Console
from slurmddp.runtime.errors import RuntimeFailure, UserError
from slurmddp.runtime.world import World
from slurmddp.shared.checkpoint import layout
from slurmddp.shared.checkpoint.checkpoints import Checkpoints
from slurmddp.shared.units import human

#: Where a run was asked for by name, starting from nothing instead is not what was meant.
NOTHING_GOOD = (
    "none of the checkpoints to resume from is good (see the warnings above): start a new run without --resume, or "
    "resume another one"
)


@dataclass(frozen=True)
class Choice:
    """A verified checkpoint. `data` is the content of its data.json."""

    path: Path
    step: int
    world: int
    data: dict[str, Any]


def choose(roots: Sequence[Path], on_rejected: Callable[[layout.Rejected], None]) -> Choice | None:
    """Return the newest checkpoint that verifies, of the first root that has one; None if there is none.

    Each one refused on the way is reported to `on_rejected`. Only reads.
    """
    choices = (Checkpoints(root).newest(_verified, on_rejected) for root in roots)
    return next((choice for choice in choices if choice is not None), None)


def _verified(folder: Path) -> Choice:
    manifest = Checkpoints.verify(folder)
    try:
        data = json.loads((folder / layout.DATA).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise layout.Rejected(folder, layout.DATA, f"cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise layout.Rejected(folder, layout.DATA, f"holds a {type(data).__name__}, not an object")
    return Choice(folder, manifest.step, manifest.world, data)


def check_data(choice: Choice, now: Mapping[str, Any]) -> list[str]:
    """Compare data.json with the present run's; returns remarks on what differs and does no harm.

    Raises UserError, on all ranks alike, if the stream of samples could not continue: other data, another
    seed or another optimizer.
    """
    then = choice.data
    fatal = {
        "fingerprint": "the dataset has changed (its fingerprint differs)",
        "length": "the dataset has changed: it had {then} samples and now has {now}",
        "seed": "train.seed was {then} and is now {now}",
        "optimizer": "train.optimizer.name was {then} and is now {now}",
    }
    for key in ("length", "fingerprint", "seed", "optimizer"):
        if then[key] != now[key]:
            what = fatal[key].format(then=then[key], now=now[key])
            raise UserError(
                f"cannot resume from {choice.path}: {what}. Restore it, or start a new run without --resume",
                shared=True,
            )
    if then["global_batch"] != now["global_batch"]:
        return [
            f"the global batch was {then['global_batch']} and is now {now['global_batch']}: "
            "training continues with the next sample; steps are of another size"
        ]
    return []


def load(
    choice: Choice, trained: state.Trained, world: World, *, check: Callable[[], None] = lambda: None, todo: str = ""
) -> None:
    """Load weights and optimizer of `choice` in place, on any number of ranks; every rank has to call it.

    Raises UserError, which `todo` ends, where the model is another one or `check` raises it; nothing is loaded then.
    """
    metadata = world.together(lambda: shards.read_metadata(choice.path))
    stored = metadata.state_dict_metadata
    try:
        state.check(trained, stored)
        check()
    except UserError as error:
        raise UserError(f"cannot resume from {choice.path}: {error}{todo}", shared=True) from error
    tensors = state.prepare(trained, stored)
    world.together(lambda: shards.read(choice.path, metadata, tensors))
    state.adopt(trained, tensors)


def restore_randomness(choice: Choice, world: World, seed: int) -> bool:
    """Put the random states of `choice` back where the number of ranks is the same: True.

    Else derive new ones from (seed, step, rank): False. Every rank has to call it.
    """
    if choice.world != world.size:
        randomness.seed_all(randomness.derive(seed, choice.step, world.rank))
        return False
    path = choice.path / layout.RNG / f"rank-{world.rank:05d}.pt"
    randomness.restore(world.together(lambda: tensorfile.load(path)), world.device)
    return True


class Speaker(Protocol):
    """Who speaks: on rank 0, and nowhere else."""

    @property
    def console(self) -> Console: ...

    def record(self, facts: Facts) -> None: ...


def find(world: World, speaker: Speaker, own: Path, older: Sequence[Path]) -> tuple[Choice | None, list[Path]]:
    """Return the newest checkpoint that verifies, and the rejected ones, each with a message: a collective.

    Rank 0 removes leftovers of dead attempts in `own`, and chooses; a checkpoint in `older` only if `own` has none.
    Raises UserError if `older` has checkpoints, and none is good.
    """
    rejected: list[str] = []

    def note(one: layout.Rejected) -> None:
        rejected.append(str(one.folder))
        speaker.console.warn(f"checkpoint rejected: {one}; trying the one before")
        speaker.record(CheckpointRejected(str(one.folder), one.file, one.why))

    def choose_on_main() -> tuple[Any, list[str]]:
        Checkpoints(own).remove_leftovers(world.attempt)
        choice = choose([own, *older], note)
        return (str(choice.path), choice.step, choice.world, choice.data) if choice else None, rejected

    chosen, refused = world.on_main(choose_on_main)
    if chosen is None and refused:
        if older:
            raise UserError(NOTHING_GOOD, shared=True)
        speaker.console.warn("no good checkpoint found: starting from the beginning")
    return Choice(Path(chosen[0]), *chosen[1:]) if chosen else None, [Path(path) for path in refused]


def resumed(speaker: Speaker, world: World, choice: Choice, *, restored: bool) -> None:
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
