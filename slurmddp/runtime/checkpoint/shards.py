"""torch.distributed.checkpoint (DCP) through its planners, with our own collectives.

DCP's own `save` sends its plans with torch's object collectives, which need numpy, which a container with
torch need not have. Done by hand it is the same files, which `torch.distributed.checkpoint.load` reads as
well. And done by hand, one plan serves all saves of the same tensors, and each rank copies no more than the
part that it writes.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem

from slurmddp.runtime.checkpoint import exchange, tensorfile
from slurmddp.runtime.checkpoint.files import HashedFiles
from slurmddp.runtime.errors import UserError
from slurmddp.runtime.world import World
from slurmddp.shared.checkpoint import contents, layout
from slurmddp.shared.checkpoint.layout import FileFacts


@dataclass(frozen=True)
class Plan:
    """Who writes what. `own`: this rank's part. `metadata`: of the whole, on rank 0 only."""

    own: SavePlan
    metadata: Metadata | None


def plan(tensors: dict[str, torch.Tensor], world: World) -> Plan:
    """Deal tensors that all ranks share, and shards of DTensors, among the ranks; every rank has to call it.

    A plain tensor is the same on all ranks, and written by one of them; DCP spreads them evenly. The plan
    holds for all tensors of the same names, shapes, types and placements. A failure on any rank is raised
    on all.
    """
    planner = DefaultSavePlanner()
    writer = _file_writer(Path())

    def plan_own() -> SavePlan:
        planner.set_up_planner(tensors, storage_meta=writer.storage_meta(), is_coordinator=world.is_main)
        return planner.create_local_plan()

    own_plans = world.gather(world.together(lambda: exchange.dump(plan_own())))
    metadata: Metadata | None = None

    def plan_all() -> list[str]:
        nonlocal metadata
        plans, metadata = planner.create_global_plan([exchange.load(text) for text in own_plans])
        return [exchange.dump(each) for each in writer.prepare_global_plan(plans)]

    return Plan(planner.finish_plan(exchange.load(world.on_main(plan_all)[world.rank])), metadata)


def write(folder: Path, own: SavePlan, parts: Mapping[MetadataIndex, torch.Tensor]) -> tuple[str, dict[str, FileFacts]]:
    """Write one rank's part into `folder`, which has to be there: no collectives.

    `parts`: contiguous CPU tensors by the index of their items in `own`. Rank r writes files named __r_*.
    Returns what `finish` needs of every rank, and the files, which are on stable storage. Raises OSError
    that names the file.
    """
    files = HashedFiles()
    writing = _file_writer(folder, files).write_data(own, _Parts(parts))
    writing.wait()
    return exchange.dump(writing.value()), files.facts


def finish(folder: Path, metadata: Metadata, results: list[str]) -> dict[str, FileFacts]:
    """On rank 0: write .metadata from what `write` returned on each rank; returns it with its facts."""
    files = HashedFiles()
    # A copy: `finish` enters the storage of this one save, and the plan is used again.
    _file_writer(folder, files).finish(dataclasses.replace(metadata), [exchange.load(text) for text in results])
    return {path.removesuffix(".tmp"): facts for path, facts in files.facts.items()}


def read_metadata(folder: Path) -> Metadata:
    """What a checkpoint holds and where, made from values that were checked: DCP's own reader unpickles the file.

    Raises UserError that names the folder and what was refused.
    """
    try:
        found = layout.read_contents(folder)
    except layout.Rejected as rejected:
        raise UserError(f"{rejected}") from rejected
    tensors: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for name, item in found.items():
        dtype = getattr(torch, item.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise UserError(f"{folder / contents.FILE}: {name} is of type {item.dtype}, which this torch does not have")
        chunks = [ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.sizes)) for one in item.chunks]
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(item.size), chunks)
        for chunk in item.chunks:
            storage[MetadataIndex(name, chunk.offsets)] = _StorageInfo(chunk.file, chunk.start, chunk.bytes)
    return Metadata(tensors, {}, storage, StorageMeta())


def read(folder: Path, metadata: Metadata, tensors: dict[str, torch.Tensor]) -> None:
    """Load into `tensors` in place. Each rank reads what it needs, by itself: no collectives.

    metadata: from `read_metadata`. Raises UserError that names the file for one that is damaged or holds more than
    tensors, OSError.
    """
    planner = DefaultLoadPlanner()
    planner.set_up_planner(tensors, metadata, True)
    (plan,) = planner.create_global_plan([planner.create_local_plan()])
    by_file: dict[str, list[ReadItem]] = {}
    for item in planner.finish_plan(plan).items:
        by_file.setdefault(metadata.storage_data[item.storage_index].relative_path, []).append(item)
    # Not by DCP's FileSystemReader: with torch 2.4 it unpickles the tensors' files without weights_only.
    for name, items in by_file.items():
        with (folder / name).open("rb") as file:
            for item in items:
                info = metadata.storage_data[item.storage_index]
                stored = tensorfile.load_part(file, info.offset, info.length)
                _copy(folder / name, item, stored, planner)


def _copy(path: Path, item: ReadItem, stored: Any, planner: DefaultLoadPlanner) -> None:
    target = planner.resolve_tensor(item).detach()
    try:
        part = narrow_tensor_by_index(stored, item.storage_offsets, item.lengths)
        if part.size() != target.size():
            raise ValueError(f"{tuple(part.size())}, not {tuple(target.size())}")
        target.copy_(part)
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise UserError(f"{path}: {item.storage_index.fqn} has another shape than {contents.FILE} says") from error
    planner.commit_tensor(item, target)


class _Parts(DefaultSavePlanner):
    """Gives the writer copies instead of the live tensors."""

    def __init__(self, parts: Mapping[MetadataIndex, torch.Tensor]) -> None:
        super().__init__()
        self._parts = parts

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._parts[write_item.index]


def _file_writer(folder: Path, files: HashedFiles | None = None) -> FileSystemWriter:
    # Nothing is copied ahead: that would wait for the GPU, and there is nothing on it.
    writer = FileSystemWriter(
        folder, single_file_per_rank=True, sync_files=False, thread_count=1, per_thread_copy_ahead=0
    )
    if files is not None:
        writer.fs = files
    return writer
