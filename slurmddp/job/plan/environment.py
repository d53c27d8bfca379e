"""The variables that every rank gets, in groups, each for a reason. Facts: NCCL's and PyTorch's documentation."""

import json

from slurmddp.container import Container
from slurmddp.job.job import Job
from slurmddp.job.plan.model import Layout, NodePlan, Variable, VariableGroup
from slurmddp.job.resolve import Resolved

#: Collectives that the flight recorder remembers on each rank: a few hundred kB.
FLIGHT_RECORDER_ENTRIES = "2000"


def plan_environment(
    resolved: Resolved, nodes: NodePlan, layout: Layout, container: Container, cache: str | None, watch: tuple[str, ...]
) -> tuple[VariableGroup, ...]:
    """Groups in the order in which they are exported; a later group wins, the user's own comes last.

    cache: the shared folder for caches, absolute. watch: where a script of the user's own saves.
    """
    job = resolved.job
    groups = [
        _group("python: unbuffered logs", PYTHONUNBUFFERED="1"),
        # Without a container, ~/.local may be just where the user's packages are.
        _group("the image's own packages, not those of ~/.local", PYTHONNOUSERSITE="1") if container.image else None,
        # Where only a node knows how many ranks it starts, node.sh sets their threads.
        _group("threads per rank", OMP_NUM_THREADS=str(layout.threads_per_rank)) if nodes.world else None,
        _flight_recorder(gpus=layout.gpus_per_node > 0),
        _group("downloads, outside the home folder", HF_HOME=f"{cache}/huggingface") if cache else None,
        _node_caches(amd=resolved.site.gpu_vendor == "amd"),
        _network(job),
        _debug() if job.network.debug else None,
        _observe(job) if job.train.task is None and job.train.observe != "off" else None,
        _resume(job, watch) if job.train.task is None else None,
        _group("recovery.fork: fork the ranks from a process that has imported torch", SLURMDDP_FORK="1")
        if job.recovery.fork
        else None,
        VariableGroup("the job's own", tuple(Variable(name, value) for name, value in job.environment.items())),
    ]
    return tuple(group for group in groups if group and group.variables)


def _flight_recorder(*, gpus: bool) -> VariableGroup:
    # Newer PyTorch tells every rank that the old name is deprecated; the versions that need it record NCCL alone.
    old = (Variable("TORCH_NCCL_TRACE_BUFFER_SIZE", FLIGHT_RECORDER_ENTRIES),) if gpus else ()
    names = " (both the old and the new names)" if gpus else ""
    return VariableGroup(
        f"flight recorder: what each rank was doing when a collective hung{names}",
        (
            Variable("TORCH_FR_BUFFER_SIZE", FLIGHT_RECORDER_ENTRIES),
            *old,
            Variable("TORCH_FR_DUMP_TEMP_FILE", "flight_recorder/rank_", "logs"),
            Variable("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "flight_recorder/rank_", "logs"),
            Variable("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
            # torchrun would set 1, which ends a rank before it has written its dump.
            Variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"),
        ),
        of_run=True,
    )


def _observe(job: Job) -> VariableGroup:
    options = json.dumps({"hang": job.timeouts.hang, "restart": job.train.observe == "restart"})
    title = "a thread in each rank watches the script; train.observe: off turns it off"
    return VariableGroup(title, (Variable("SLURMDDP_OBSERVE", options),), of_run=True)


def _resume(job: Job, watch: tuple[str, ...]) -> VariableGroup:
    options = json.dumps({"watch": watch, "args": job.train.resume_args})
    title = "where the script saves, and the arguments with which it loads its newest save"
    return VariableGroup(title, (Variable("SLURMDDP_RESUME", options),), of_run=True)


def _group(title: str, **variables: str) -> VariableGroup:
    return VariableGroup(title, tuple(Variable(name, value) for name, value in variables.items()))


def _network(job: Job) -> VariableGroup:
    variables = dict(job.network.variables)
    if job.network.interface:
        variables.setdefault("NCCL_SOCKET_IFNAME", job.network.interface)
    return _group("network", **variables)


def _node_caches(*, amd: bool) -> VariableGroup:
    # Nodes that share these folders replace each other's files while they are in use (pytorch#173679, triton#2688,
    # triton#11512). MIOpen's two hold SQLite databases, whose locks do not work well on Lustre (LUMI's AI guide).
    names = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    if amd:
        names |= {"MIOPEN_USER_DB_PATH": "miopen", "MIOPEN_CUSTOM_CACHE_DIR": "miopen"}
    variables = tuple(Variable(name, folder, "scratch") for name, folder in names.items())
    return VariableGroup("compilers' caches, on the node's own disk", variables, of_run=True)


def _debug() -> VariableGroup:
    return VariableGroup(
        "network.debug: verbose logs; slow, not for production",
        (
            Variable("NCCL_DEBUG", "INFO"),
            Variable("NCCL_DEBUG_SUBSYS", "INIT,BOOTSTRAP,ENV,NET,GRAPH,TUNING"),
            Variable("NCCL_DEBUG_FILE", "nccl.%h.%p.log", "logs"),
            Variable("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),
            Variable("TORCH_CPP_LOG_LEVEL", "INFO"),
        ),
    )
