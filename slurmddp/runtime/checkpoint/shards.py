"""Shards and table of contents as torch.distributed.checkpoint (DCP) has them, with our own collectives.

DCP's own `save` sends its plans with torch's object collectives: pickles, made with numpy, which a container with
torch need not have. Here ranks send each other names and numbers. It is the same files, which
`torch.distributed.checkpoint.load` reads as well. And one plan serves all saves of the same tensors, and each rank
copies no more than the parts that it writes.

DCP is imported where it is used: that takes seconds, which a script need not wait for before its first line.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import torch

from slurmddp.records.checkpoint import FileFacts
from slurmddp.runtime import torch_private
from slurmddp.runtime.checkpoint import tensorfile
from slurmddp.runtime.checkpoint.files import hashed
from slurmddp.runtime.errors import UserError
from slurmddp.runtime.world import World
from slurmddp.shared.checkpoint import contents, layout
from slurmddp.shared.checkpoint.checkpoints import read_contents

if TYPE_CHECKING:
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
    from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData

#: A block of a tensor: the tensor's name, and where in it the block begins.
Part = tuple[str, tuple[int, ...]]
#: Rows that ranks exchange, as JSON. Of a block that one holds: the tensor's name, type and size; the block's beginning
#: and size. Of a block that one has written: name and beginning; file, first byte, and bytes.
Row = Sequence[Any]


@dataclass(frozen=True)
class Plan:
    """Who writes what. `own`: this rank's parts. `metadata`: of the whole, without where it is stored."""

    own: list[Part]
    metadata: Metadata


def plan(tensors: dict[str, torch.Tensor], world: World) -> Plan:
    """Deal tensors and shards of DTensors among the ranks that hold them; every rank has to call it.

    The plan holds for all tensors of the same names, shapes, types and placements. A failure on any rank is raised
    on all.
    """

    return deal(world.gather(world.together(lambda: _held(tensors))), world.rank)


def _held(tensors: Mapping[str, torch.Tensor]) -> list[Row]:
    from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

    rows: list[Row] = []
    for item in create_default_local_save_plan(dict(tensors), True).items:
        tensor = cast("TensorWriteData", item.tensor_data)
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        rows.append((item.index.fqn, dtype, [*tensor.size], [*tensor.chunk.offsets], [*tensor.chunk.sizes]))
    return rows


def deal(held: Sequence[Sequence[Row]], rank: int) -> Plan:
    """Return the plan, the same on all ranks: of those that hold a block, the one with least to write writes it.

    Raises ValueError where the blocks do not make whole tensors."""
    from torch.distributed.checkpoint import metadata as of

    found: dict[str, TensorStorageMetadata] = {}
    holders: dict[Part, list[int]] = {}
    sizes: dict[Part, int] = {}
    for holder, rows in enumerate(held):
        for name, dtype, whole, begin, size in rows:
            part = (name, tuple(begin))
            if part not in holders:
                properties = of.TensorProperties(dtype=_dtype(dtype))
                stored = found.setdefault(name, of.TensorStorageMetadata(properties, torch.Size(whole), []))
                stored.chunks.append(of.ChunkStorageMetadata(torch.Size(begin), torch.Size(size)))
                sizes[part] = math.prod(size) * stored.properties.dtype.itemsize
            holders.setdefault(part, []).append(holder)
    for name, stored in found.items():
        if sum(chunk.sizes.numel() for chunk in stored.chunks) != stored.size.numel():
            raise ValueError(f"the ranks' parts of {name} do not form one tensor of {list(stored.size)}")
    own, load = [], [0] * len(held)
    for part, ranks in holders.items():
        writer = min(ranks, key=load.__getitem__)
        load[writer] += sizes[part]
        if writer == rank:
            own.append(part)
    return Plan(own, of.Metadata(dict(found), planner_data={name: (name,) for name in found}))


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"is of type {name}, which this torch does not have")
    return dtype


def write(folder: Path, rank: int, parts: Mapping[Part, torch.Tensor]) -> tuple[list[Row], dict[str, FileFacts]]:
    """Write one rank's parts, contiguous CPU tensors, into `folder`, which has to be there: no collectives.

    Returns what `finish` needs of every rank, and the file, which is on stable storage. Raises OSError that names it.
    """
    name = f"__{rank}_0.distcp"
    written: list[Row] = []
    files: dict[str, FileFacts] = {}
    with hashed(folder / name, files) as stream:
        for (tensor, begin), part in parts.items():
            start = stream.tell()
            torch.save(part, cast(IO[bytes], stream))
            written.append((tensor, begin, name, start, stream.tell() - start))
    return written, files


def finish(folder: Path, metadata: Metadata, written: Sequence[Sequence[Row]]) -> dict[str, FileFacts]:
    """Write .metadata from what `write` returned on each rank, on rank 0. Return it with its facts."""
    from torch.distributed.checkpoint import filesystem, storage
    from torch.distributed.checkpoint import metadata as of

    results = [
        storage.WriteResult(
            of.MetadataIndex(name, torch.Size(begin)), size, torch_private.storage_info(file, start, size)
        )
        for rows in written
        for name, begin, file, start, size in rows
    ]
    # A copy: `finish` enters the storage of this one save, and the plan is used again.
    filesystem.FileSystemWriter(folder, sync_files=False).finish(dataclasses.replace(metadata), [results])
    return {contents.FILE: layout.facts(folder / contents.FILE, sync=True)}


def read_metadata(folder: Path) -> Metadata:
    """Return what a checkpoint holds and where, from values that were checked: DCP's own reader unpickles the file.

    Raises UserError that names the folder and what was refused."""
    from torch.distributed.checkpoint import metadata as of

    try:
        listed = read_contents(folder)
    except layout.Rejected as rejected:
        raise UserError(f"{rejected}") from rejected
    tensors: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    for name, item in listed.items():
        try:
            dtype = _dtype(item.dtype)
        except ValueError as error:
            raise UserError(f"{folder / contents.FILE}: {name} {error}") from error
        chunks = [of.ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.sizes)) for one in item.chunks]
        tensors[name] = of.TensorStorageMetadata(of.TensorProperties(dtype=dtype), torch.Size(item.size), chunks)
        for chunk in item.chunks:
            storage[of.MetadataIndex(name, chunk.offsets)] = torch_private.storage_info(
                chunk.file, chunk.start, chunk.bytes
            )
    return of.Metadata(tensors, {}, storage, of.StorageMeta())


def read(folder: Path, metadata: Metadata, tensors: dict[str, torch.Tensor]) -> None:
    """Load into `tensors` in place. Each rank reads what it needs, by itself: no collectives.

    metadata: from `read_metadata`. Raises UserError that names the file for one that is damaged or holds more than
    tensors, OSError.
    """
    planner = _planner(metadata, tensors)
    by_file: dict[str, list[ReadItem]] = {}
    for item in planner.create_local_plan().items:
        by_file.setdefault(metadata.storage_data[item.storage_index].relative_path, []).append(item)
    # Not by DCP's FileSystemReader: with torch 2.4 it unpickles the tensors' files without weights_only.
    for name, items in by_file.items():
        with (folder / name).open("rb") as file:
            for item in items:
                info = metadata.storage_data[item.storage_index]
                stored = tensorfile.load_part(file, info.offset, info.length)
                _copy(folder / name, item, stored, planner)


def fill(source: Path, whole: Mapping[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    """Copy whole tensors, those of the file `source`, into `tensors` as `read` does."""
    planner = _planner(deal([_held(whole)], 0).metadata, tensors)
    for item in planner.create_local_plan().items:
        _copy(source, item, whole[item.storage_index.fqn], planner)


def _planner(metadata: Metadata, tensors: dict[str, torch.Tensor]) -> DefaultLoadPlanner:
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    planner = DefaultLoadPlanner()
    planner.set_up_planner(tensors, metadata, True)
    return planner


def _copy(path: Path, item: ReadItem, stored: Any, planner: DefaultLoadPlanner) -> None:
    target = planner.resolve_tensor(item).detach()
    try:
        part = stored
        for dimension, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            part = part.narrow(dimension, begin, length)
        if part.size() != target.size():
            raise ValueError(f"{tuple(part.size())}, not {tuple(target.size())}")
        target.copy_(part)
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise UserError(f"{path}: {item.storage_index.fqn} has another shape than {contents.FILE} says") from error
    planner.commit_tensor(item, target)
