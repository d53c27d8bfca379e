"""How ranks share the model: whole on each of them (DDP), in shards (FSDP), or replicas of shards (HSDP); and each
layer split among the ranks of a tensor group."""

from torch import nn

from slurmddp.runtime.errors import UserError
from slurmddp.runtime.job import Job
from slurmddp.runtime.parallel import shaping
from slurmddp.runtime.parallel.model import Parallel
from slurmddp.runtime.parallel.replicating import Replicated
from slurmddp.runtime.parallel.waits import Mark
from slurmddp.runtime.world import World
from slurmddp.shared import mesh


def wrap(bare: nn.Module, job: Job, world: World, mark: Mark | None = None) -> Parallel:
    """Make `bare`, built alike on every rank and on the CPU, what the job asks for; every rank has to call it.

    Build the optimizer afterwards, from the result's `module`. `mark` hears of the waits for other
    ranks. Raises a shared UserError for what the user can put right.
    """
    try:
        sizes = mesh.sizes(world.size, job.parallel.replicate, job.parallel.shard, job.parallel.tensor)
    except ValueError as error:
        raise UserError(str(error), shared=True) from error
    if mesh.TENSOR in sizes:
        from slurmddp.runtime.library.groups import checked

        named = {"data": sizes[mesh.REPLICATE], "shard": sizes[mesh.SHARD], "pipeline": 1, "tensor": sizes[mesh.TENSOR]}
        checked(named, world.gather(world.node), who="parallel")
    sharded = sizes[mesh.SHARD] > 1 or mesh.TENSOR in sizes
    if not sharded:
        bare.to(world.device)
    shaping.shape(bare, job.train, world, sharded=sharded)
    if sharded:
        # Not before it is needed: a DDP run need not wait for the import of DTensors.
        from slurmddp.runtime.parallel.sharding import Sharded

        return Sharded(bare, world, sizes, job.timeouts.collective, mark)
    return Replicated(bare, world, job.train.ddp, mark)
