"""The checkpoints of a run as a login node sees them: listed, verified and pruned, without torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slurmddp.errors import UserError
from slurmddp.run.gate import OwnRun
from slurmddp.run.layout import RunFolder
from slurmddp.run.usage import extent
from slurmddp.shared.beneath import check_folder
from slurmddp.shared.checkpoint import layout
from slurmddp.shared.checkpoint.checkpoints import Checkpoint, Checkpoints, Retention, retain
from slurmddp.shared.files import read_json


@dataclass(frozen=True, kw_only=True)
class Stored(Checkpoint):
    """One checkpoint of a run. Its fault comes from sizes; content is compared by `check` only.

    run: the run that wrote it, own: whether that is the run that was asked about. files and bytes: all that lies in
    it. saved: when it was completed, in unix seconds (for an unfinished one: when it last changed).
    """

    run: str
    own: bool
    files: int = 0
    bytes: int = 0
    saved: float = 0.0
    world: int | None = None


@dataclass(frozen=True)
class Leftover:
    """A folder of a save that is going on, or was cut off."""

    path: Path
    bytes: int


def survey(folder: RunFolder) -> list[Stored]:
    """Return the checkpoints of a run, newest first, then those of the runs that it continues, in the order of loading.

    Nothing is hashed. Raises UserError where the run keeps none that slurmddp knows, or they cannot be read.
    """
    stored: list[Stored] = []
    for root in _roots(folder):
        try:
            is_own = root == folder.checkpoints
            if is_own and root.is_symlink():
                check_folder(root, folder.path)
            if root.exists() and not root.is_dir():
                raise NotADirectoryError(20, "it is a file, not a folder", str(root))
            for step, path in Checkpoints(root).folders():
                stored.append(_look(Stored(path=path, step=step, run=root.parent.name, own=is_own)))
        except OSError as error:
            raise _unreadable(error, root) from error
    return stored


def own(folder: RunFolder) -> list[Stored]:
    """Return the run's own checkpoints, newest first, at least one. Raises UserError if it has none."""
    stored = survey(folder)
    mine = [item for item in stored if item.own]
    if not mine:
        todo = (
            "checkpoints of slurmddp's trainer and Checkpointer are listed, as soon as one is complete; what else a "
            "script has saved there, torch.load reads"
        )
        if stored:
            todo = f"it resumed from a checkpoint of {stored[0].run}: use that run instead"
        raise UserError(f"run {folder.id} has no checkpoints yet", where=str(folder.checkpoints), todo=todo)
    return mine


def at_step(stored: list[Stored], step: int) -> Stored:
    """Return the checkpoint of a step. Raises UserError that lists the steps there are."""
    for item in stored:
        if item.step == step:
            return item
    steps = ", ".join(str(item.step) for item in stored[:10]) + (", ..." if len(stored) > 10 else "")
    todo = f"its checkpoints are of steps {steps}"
    raise UserError(f"run {stored[0].run} has no checkpoint of step {step}", todo=todo)


def resumed_from(stored: list[Stored]) -> Stored | None:
    """Return the one that an attempt would load now, as far as sizes tell: the ranks compare the content as well."""
    return next((item for item in stored if item.fault is None), None)


def leftovers(folder: RunFolder) -> list[Leftover]:
    """Return folders of saves that are not finished. Raises UserError if they cannot be read."""
    try:
        return [Leftover(path, extent(path)[0]) for path in Checkpoints(folder.checkpoints).leftovers()]
    except OSError as error:
        raise _unreadable(error, folder.checkpoints) from error


def check(item: Stored, progress: Callable[[int], None] = lambda count: None) -> Stored:
    """Return the checkpoint with its `fault`, after hashing each file; progress: gets the bytes of each."""
    try:
        Checkpoints.verify(item.path, strict=True, progress=progress)
    except layout.Rejected as rejected:
        return replace(item, fault=f"{rejected.file} {rejected.why}", unreadable=rejected.unreadable)
    return replace(item, fault=None, unreadable=False)


@dataclass(frozen=True)
class Pruning(Retention[Stored]):
    """What `prune` is to remove and what stays."""

    leftovers: Sequence[Leftover]

    @property
    def going(self) -> list[Stored | Leftover]:
        return [*self.removed, *self.leftovers]

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.going)


def plan_pruning(
    folder: RunFolder,
    *,
    keep: int,
    keep_every: int | None,
    running: bool = False,
    checked: Callable[[Stored], Stored] = check,
) -> Pruning:
    """Return what to remove so that the newest good ones stay (see `retain`).

    checked: compares the content. running: folders of unfinished saves stay, too. Raises UserError where nothing good
    is left, which is no moment to remove anything.
    """
    retention = retain(own(folder), keep, keep_every, checked)
    if not retention.kept:
        worst = retention.left[0]
        raise UserError(
            f"run {folder.id} has no good checkpoint: nothing is removed ({worst.path.name}: {worst.fault})",
            where=str(folder.checkpoints),
            todo="if you are sure, remove its folders by hand",
        )
    return Pruning(**vars(retention), leftovers=[] if running else leftovers(folder))


def prune(run: OwnRun, planned: Pruning) -> Iterator[Stored | Leftover]:
    """Remove what was planned, never the newest good one, and yield each one once it is gone. Raises OSError."""
    for item in planned.going:
        if isinstance(item, Stored):
            layout.discard(item.path, move=run.held.move, remove=run.held.remove_tree)
        else:
            run.held.remove_tree(item.path)
        yield item


def _look(item: Stored) -> Stored:
    """Return a checkpoint with what is known without hashing. A part that cannot be read is its fault, not an error."""
    try:
        item = replace(item, saved=item.path.stat().st_mtime)
        size, files = extent(item.path)
        item = replace(item, files=files, bytes=size)
        world = Checkpoints.verify(item.path, content=False).world
        return replace(item, world=world, saved=(item.path / layout.COMPLETE).stat().st_mtime)
    except layout.Rejected as rejected:
        return replace(item, fault=f"{rejected.file} {rejected.why}", unreadable=rejected.unreadable)
    except OSError as error:
        name = Path(error.filename).name if error.filename else item.path.name
        return replace(item, fault=f"{name} cannot be read: {error.strerror}", unreadable=True)


def _roots(folder: RunFolder) -> list[Path]:
    """The folders of checkpoints that the run's ranks look through, in their order."""
    if not folder.job_json.exists():
        # Its script may take the runtime's Checkpointer, which then writes where a bundled task's lie.
        if folder.checkpoints.exists() and (not folder.checkpoints.is_dir() or any(folder.checkpoints.iterdir())):
            return [folder.checkpoints]
        raise UserError(
            f"run {folder.id} ran your own script: slurmddp does not know where it saves checkpoints",
            todo="look for them where the script writes them",
        )
    try:
        earlier = read_json(folder.job_json, folder.path).get("resume_from", [])
        return [folder.checkpoints, *(Path(text) for text in earlier)]
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(f"is damaged ({error})", where=str(folder.job_json), todo="use another run") from error
    except OSError as error:
        raise _unreadable(error, folder.job_json) from error


def _unreadable(error: OSError, path: Path) -> UserError:
    todo = "ask its owner for access" if isinstance(error, PermissionError) else None
    return UserError(f"cannot be read: {error.strerror}", where=str(error.filename or path), todo=todo)
