"""How many ranks a node starts: a number known here, or, with `auto`, what each node finds that it was given."""

import re

from slurmddp.container import Container
from slurmddp.errors import UserError
from slurmddp.job.job import Job
from slurmddp.job.plan.model import Layout, NodePlan, Note, SrunPlan
from slurmddp.job.resolve import Resolved

#: With `auto` on cores: threads of a rank where OMP_NUM_THREADS does not say. Gradients of more ranks cost more to
#: exchange, and eight threads still share one rank's matrix products well.
THREADS_PER_RANK = 8

#: Flags by which a user says which GPUs or whole nodes the job gets: ours would only be in their way.
_OWN_WORDS = ("--gpus", "-G", "--gres", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket", "--exclusive")


def is_auto(resolved: Resolved) -> bool:
    """Return whether `auto` is asked for where nodes may differ; this one machine is known."""
    return resolved.job.resources.ranks_per_node == "auto" and resolved.site.queues


def asks_itself(resolved: Resolved) -> bool:
    """Return whether sbatch_extra says by itself which GPUs or whole nodes are wanted."""
    return any(extra.split("=")[0] in _OWN_WORDS for extra in resolved.job.resources.sbatch_extra)


def takes_whole_nodes(resolved: Resolved, gpus: int) -> bool:
    """Return whether the job asks for whole nodes, so that each one gives all it has. `gpus`: per node, at least.

    Raises UserError where the site rejects --exclusive: then only the user knows how its nodes are asked for.
    """
    resources = resolved.job.resources
    if not is_auto(resolved) or resources.exclusive is False or asks_itself(resolved):
        return False
    if not gpus and resources.cpus_per_node:
        return False
    if "--exclusive" in resolved.site.unsupported_flags:
        raise UserError(
            f"site {resolved.site.name} rejects --exclusive, which ranks_per_node: auto needs",
            where=resolved.location("resources", "ranks_per_node"),
            todo="set what to ask for (sbatch_extra: [--gpus=TOTAL]), or set ranks_per_node to a number",
        )
    return True


def threads_wanted(job: Job) -> int:
    """Threads of a rank for `auto` on cores: the job's own OMP_NUM_THREADS, or THREADS_PER_RANK."""
    threads = job.environment.get("OMP_NUM_THREADS", "")
    return int(threads) if re.fullmatch("0*[1-9][0-9]{0,3}", threads) else THREADS_PER_RANK


def plan_ranks(resolved: Resolved, gpus: int, whole: bool) -> tuple[int | None, list[Note]]:
    """Ranks on each node, None where only the nodes will know. `gpus`: of a node, with `auto` at least.
    `whole`: whether the job asks for whole nodes.

    Raises UserError for more ranks than GPUs, and for `auto` where nothing could tell a node its number.
    """
    resources, location = resolved.job.resources, resolved.location("resources", "ranks_per_node")
    if not is_auto(resolved):
        ranks = resources.ranks_per_node if isinstance(resources.ranks_per_node, int) else gpus or 1
        if gpus and ranks > gpus:
            todo = "remove ranks_per_node: one rank per GPU is the default"
            raise UserError(f"{ranks} ranks share {gpus} GPUs", where=location, todo=todo)
        return ranks, [
            Note("warning", f"{gpus - ranks} of {gpus} GPUs per node are unused: they get no rank")
        ] if ranks < gpus else []
    if gpus and resolved.site.gpu_request == "none":
        raise UserError(
            f"ranks_per_node: auto does not work at site {resolved.site.name}: its Slurm does not count GPUs",
            where=location,
            todo="remove ranks_per_node, or set it to a number",
        )
    threads = threads_wanted(resolved.job)
    if not gpus and resources.cpus_per_node:
        return max(1, resources.cpus_per_node // threads), []
    each = "GPU that Slurm gives the node" if gpus else f"{threads} of its cores"
    given = "the job asks for whole nodes" if whole else "as the job's own options ask for them"
    text = f"ranks_per_node is auto: each node starts one rank per {each} ({given})"
    return None, [Note("note", text)]


def plan_srun(resolved: Resolved, nodes: NodePlan, layout: Layout, container: Container) -> SrunPlan | None:
    """None with torchrun. Raises UserError where Slurm cannot start the ranks of this job by itself."""
    launch, ranks, cores = resolved.job.launch, nodes.ranks_per_node, layout.cpus_per_node
    if launch.mode != "srun":
        return None
    reason = None
    if resolved.job.train.task is not None:
        reason = "a task needs torchrun, which restarts its ranks in place and signs their rendezvous"
    elif not resolved.site.queues:
        reason = f"site {resolved.site.name} has no Slurm"
    elif container.made_by_srun:
        reason = f"{container.runtime} starts each container with a separate srun"
    elif ranks is None:
        reason = "it does not work with resources.ranks_per_node: auto"
    elif cores is not None and cores < ranks:
        reason = f"Slurm gives each rank its own core, but {ranks} ranks share {cores}"
    if reason is not None or ranks is None:
        todo = "remove launch.mode: torchrun then starts the ranks"
        raise UserError(f"launch.mode is srun: {reason}", where=resolved.location("launch", "mode"), todo=todo)
    options = [f"--cpus-per-task={cores // ranks}"] if cores else []
    options += [f"--mpi={launch.mpi}"] if launch.mpi else []
    return SrunPlan(ranks, tuple(options))
