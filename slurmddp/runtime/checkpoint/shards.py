"""torch.distributed.checkpoint (DCP) through its planners, with our own collectives.

DCP's own `save` sends its plans with torch's object collectives, which need numpy, which a container with
torch need not have. Done by hand it is the same files, which `torch.distributed.checkpoint.load` reads as
well.
"""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from slurmddp.runtime.world import World


def write(folder: Path, tensors: dict[str, torch.Tensor], world: World) -> None:
    """Write tensors that all ranks share, or shards of them, into `folder`; every rank has to call it.

    A plain tensor is the same on all ranks, and written by one of them; DCP spreads them evenly. Rank r
    writes files named __r_*, rank 0 writes .metadata. Nothing is synced. A failure on any rank is raised on
    all.
    """
    planner = DefaultSavePlanner()
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=False, thread_count=1)

    def plan_own() -> SavePlan:
        planner.set_up_planner(tensors, storage_meta=writer.storage_meta(), is_coordinator=world.is_main)
        writer.set_up_storage_writer(world.is_main)
        return writer.prepare_local_plan(planner.create_local_plan())

    own_plans = world.gather(world.together(plan_own))
    metadata: Metadata | None = None

    def plan_all() -> list[SavePlan]:
        nonlocal metadata
        plans, metadata = planner.create_global_plan(own_plans)
        return writer.prepare_global_plan(plans)

    plan = world.on_main(plan_all)[world.rank]

    def write_own() -> Any:
        writing = writer.write_data(planner.finish_plan(plan), planner)
        writing.wait()
        return writing.value()

    results = world.gather(world.together(write_own))

    def finish() -> None:
        assert metadata is not None  # Rank 0 has it from plan_all.
        writer.finish(metadata, results)

    world.on_main(finish)


def stored(folder: Path) -> dict[str, Any]:
    """What a checkpoint holds: name to an object with `size`, and `properties.dtype`."""
    return dict(FileSystemReader(folder).read_metadata().state_dict_metadata)


def read(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Load into `tensors` in place. Each rank reads what it needs, by itself: no collectives."""
    planner = DefaultLoadPlanner()
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata()
    planner.set_up_planner(tensors, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    own = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([own]))
    reader.read_data(planner.finish_plan(plan), planner).wait()
