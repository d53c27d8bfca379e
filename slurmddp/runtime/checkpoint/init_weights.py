"""Starting from given weights: a file, a checkpoint, or a run. Weights and buffers only, by name and shape."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slurmddp.runtime.checkpoint import plain, shards, state
from slurmddp.runtime.errors import UserError
from slurmddp.shared.checkpoint import layout
from slurmddp.shared.checkpoint.checkpoints import Checkpoints
from slurmddp.shared.run_folder import RunFolder

_MODEL = "model."
#: What wrappers put before names: DDP and DataParallel, torch.compile. The latter's may stand inside a name.
_WRAPPERS = ("module.", "_orig_mod.")


@dataclass(frozen=True)
class Given:
    """What was loaded. path: the file or checkpoint folder; remarks: what was done to make it fit, for people."""

    path: Path
    tensors: int
    remarks: tuple[str, ...]


def resolve_given(path: Path | str) -> Path:
    """Return the file or checkpoint folder that `path` stands for; a checkpoint has been verified.

    path: a file; a checkpoint folder (step-XXXXXXXX); a run folder or its folder `checkpoints`, whose newest good one
    is taken. Raises UserError for anything else.
    """
    path = Path(path)
    try:
        if path.is_file():
            return path
        if not path.is_dir():
            raise UserError(f"train.init_from: {path} does not exist (does the container see it?)")
        if layout.step_of(path) is not None:
            return _verified(path)
        own = RunFolder(path).checkpoints
        refused: list[layout.Rejected] = []
        newest = Checkpoints(own if own.is_dir() else path).newest(_verified, refused.append)
        if newest is not None:
            return newest
    except layout.Rejected as rejected:
        raise UserError(f"train.init_from: {rejected}. Use another checkpoint") from rejected
    except OSError as error:
        raise UserError(f"train.init_from: cannot read {error.filename or path}: {error.strerror}") from error
    if refused:
        raise UserError(f"train.init_from: no checkpoint in {path} is good; the newest: {refused[0]}") from refused[0]
    raise UserError(
        f"train.init_from: {path} contains no checkpoints. Set it to a run folder, a checkpoint folder step-XXXXXXXX, "
        f"a file of torch.save, or a {plain.SAFETENSORS} file"
    )


def _verified(folder: Path) -> Path:
    Checkpoints.verify(folder)
    return folder


def load_given(path: Path | str, model: nn.Module, *, verify: bool = True) -> Given:
    """Load given weights into `model` in place: before or behind DDP, FSDP2 and torch.compile, on any device.

    No collectives: each rank reads for itself what it needs, so a plain module can be loaded on every rank by itself;
    a sharded parameter (DTensor) takes its own part. All names and shapes must match, but for what wrappers put before
    names; types are converted. verify: False where `path` is what `resolve_given` returned, on rank 0 for all.
    Raises UserError that names the first differences; nothing is loaded then.
    """
    source = resolve_given(path) if verify else Path(path)
    targets = {_bare(name): value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    if source.is_dir():
        metadata = shards.read_metadata(source)
        held: Mapping[str, Any] = metadata.state_dict_metadata
        stored = {name: item for name, item in held.items() if name.startswith(_MODEL)}
        sizes = {name: tuple(item.size) for name, item in stored.items()}
        types = {name: item.properties.dtype for name, item in stored.items()}
        tensors: Mapping[str, torch.Tensor] = {}
    else:
        tensors = plain.read(source)
        sizes = {name: tuple(value.shape) for name, value in tensors.items()}
        types = {name: value.dtype for name, value in tensors.items()}
    names, remarks = _fitting(sizes, targets, checkpoint=source.is_dir())
    shapes = {name: tuple(value.shape) for name, value in targets.items()}
    differences = state.differences(
        shapes, {new: sizes[old] for new, old in names.items()}, there="there", here="in the model"
    )
    if differences:
        raise UserError(
            f"train.init_from: {source} does not fit the model: {differences}. Change train.model, or use other weights"
        )
    other = sorted({str(types[old]).removeprefix("torch.") for new, old in names.items()
                    if types[old] != targets[new].dtype})  # fmt: skip
    if other:
        remarks.append(f"converted from {', '.join(other)}")
    wanted = {old: targets[new] for new, old in names.items()}
    if source.is_dir():
        shards.read(source, metadata, wanted)
    else:
        shards.fill(source, {old: tensors[old] for old in wanted}, wanted)
    return Given(source, len(names), tuple(remarks))


def _fitting(given: Iterable[str], wanted: Iterable[str], *, checkpoint: bool) -> tuple[dict[str, str], list[str]]:
    """Name in the model, without wrappers' prefixes, to name in the file; and remarks on what was left out."""
    given, wanted = list(given), set(wanted)
    remarks: list[str] = []
    if checkpoint:
        return {_bare(name.removeprefix(_MODEL)): name for name in given}, remarks
    names = {_bare(name): name for name in given}
    for wrapper in _WRAPPERS:
        if any(wrapper in name and _bare(name) != name for name in given):
            remarks.append(f"{wrapper} removed from the names")
    weights = {name.removeprefix(_MODEL): old for name, old in names.items() if name.startswith(_MODEL)}
    # A whole training state (export --what all), or one of a trainer that keeps the model in an attribute.
    if not wanted & names.keys() and wanted & weights.keys():
        remarks.append(f"used only the tensors named {_MODEL}*")
        return weights, remarks
    return names, remarks


def _bare(name: str) -> str:
    """A name without what wrappers put into it: module. at its beginning, _orig_mod. anywhere."""
    name = name.replace("_orig_mod.", "")
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name
