"""Removes old checkpoints of a run, and never the newest good one; without torch. `clean` removes whole runs."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from slurmddp.errors import UserError
from slurmddp.run import checkpoints
from slurmddp.run.checkpoints import Leftover, Stored
from slurmddp.run.gate import OwnRun
from slurmddp.run.layout import RunFolder
from slurmddp.shared.checkpoint import layout


@dataclass(frozen=True)
class Pruning:
    """What `prune` is to remove and what stays, newest first. left: ones that are not usable and stay, too."""

    removed: tuple[Stored, ...]
    kept: tuple[Stored, ...]
    left: tuple[Stored, ...]
    leftovers: tuple[Leftover, ...]

    @property
    def going(self) -> list[Stored | Leftover]:
        return [*self.removed, *self.leftovers]

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.going)


def plan(
    folder: RunFolder,
    *,
    keep: int,
    keep_every: int | None,
    running: bool = False,
    checked: Callable[[Stored], Stored] = checkpoints.check,
) -> Pruning:
    """Return what to remove so that the `keep` newest good ones stay, and each whose step is a multiple of
    `keep_every`.

    A checkpoint counts when `checked` finds its content whole. Unfinished and damaged ones go where a good one is
    newer; what cannot be read stays, and so does a link: whoever put it there had a reason. running: folders of
    unfinished saves stay, too. Raises UserError where nothing good is left, which is no moment to remove anything.
    """
    kept: list[Stored] = []
    removed: list[Stored] = []
    left: list[Stored] = []
    good = 0
    for item in checkpoints.own(folder):
        if good < keep and item.fault is None:
            item = checked(item)
        if item.fault is not None:
            (removed if good and not item.unreadable else left).append(item)
        elif good < keep or (keep_every and item.step % keep_every == 0) or item.path.is_symlink():
            kept.append(item)
            good += 1
        else:
            removed.append(item)
    if not good:
        raise UserError(
            f"run {folder.id} has no good checkpoint: nothing is removed ({left[0].path.name}: {left[0].fault})",
            where=str(folder.checkpoints),
            todo="if you are sure, remove its folders by hand",
        )
    removed = [item for item in removed if not item.path.is_symlink()]
    unfinished = [] if running else checkpoints.leftovers(folder)
    return Pruning(tuple(removed), tuple(kept), tuple(left), tuple(unfinished))


def prune(run: OwnRun, planned: Pruning) -> Iterator[Stored | Leftover]:
    """Remove what was planned, and give each one as soon as it is gone. Raises OSError."""
    for item in planned.going:
        hidden = item.path
        if isinstance(item, Stored):  # It loses its name first: one half removed is never taken for a checkpoint.
            hidden = item.path.with_name(layout.temporary_name("old", item.step, 0, secrets.token_hex(4)))
            run.held.move(item.path, hidden)
        run.held.remove_tree(hidden)
        yield item
