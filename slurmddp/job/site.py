"""A site's profile: what its cluster has and how it wants to be asked."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from slurmddp.job.alerts import Outlet, Watchdog
from slurmddp.job.types import (
    Adds,
    Count,
    Line,
    Mebibytes,
    Model,
    Name,
    NodeMemory,
    PathStr,
    SbatchFlag,
    SbatchValue,
    SecondsOrNone,
    TimeLimit,
)

#: How far a profile was tried. Most are made from documentation alone: nobody has run a job with them.
Level = Literal["documented", "probed", "ran a job"]
Fabric = Literal["infiniband", "slingshot11", "efa", "roce", "gpudirect-tcp", "ethernet"]


def _driver(text: str) -> str:
    if not re.fullmatch(r"[0-9]{3,}(\.[0-9]+)*", text):
        raise ValueError("must be a driver version, such as 535.183.01")
    return text


Driver = Annotated[str, AfterValidator(_driver)]


def _date(text: str) -> str:
    if not re.fullmatch(r"20[0-9]{2}-[01][0-9](-[0-3][0-9])?", text):
        raise ValueError("must be a date such as 2026-11-23, or a month such as 2026-11")
    return text


def _node_range(text: str) -> str:
    if not re.fullmatch(r"[0-9]{1,5}(-([0-9]{1,5})?)?", text):
        raise ValueError("must be a number of nodes or a range: 1, 2-91, or 2- for two and more")
    return text


class Partition(Model):
    """One kind of node. `ask` replaces the request for it: some sites want a constraint, not a partition. driver:
    version of NVIDIA's driver, such as 535.183.01, if it differs from the site's. mem_per_node 0: ask for all memory
    of a node (--mem=0). account: pattern of the accounts that may use it."""

    gpus_per_node: Annotated[int, Field(ge=0, le=64)] | None = None
    gpu_type: SbatchValue | None = None
    driver: Driver | None = None
    cpus_per_node: Annotated[int, Field(ge=1)] | None = None
    mem_per_node: NodeMemory | None = None
    max_time: TimeLimit | None = None
    max_nodes: Annotated[int, Field(ge=1)] | None = None
    ask: dict[Literal["partition", "constraint", "qos"], SbatchValue] | None = None
    account: Line | None = None


class When(Model):
    """Settings for some jobs only: those that meet all conditions given here. nodes: 1, 2-91, or 2- for two and
    more; the other conditions are patterns, image that of the image's file name. max_time and max_nodes replace the
    partition's; job is a layer of the job.
    """

    nodes: Annotated[str, AfterValidator(_node_range)] | None = None
    partition: Line | None = None
    account: Line | None = None
    qos: Line | None = None
    runtime: Line | None = None
    image: Line | None = None
    max_time: TimeLimit | None = None
    max_nodes: Annotated[int, Field(ge=1)] | None = None
    job: dict[str, Any] = {}

    @field_validator("job")
    @classmethod
    def _no_condition(cls, value: dict[str, Any]) -> dict[str, Any]:
        # Which layers hold is decided from these: they cannot depend on the answer.
        resources, container = value.get("resources") or {}, value.get("container") or {}
        if set(resources) - {"sbatch_extra"} or {"runtime", "image"} & set(container):
            raise ValueError(
                "may set resources.sbatch_extra, but no other key of resources, no container.runtime and no image"
            )
        return value


def _absolute(text: str) -> str:
    if not text.startswith("/"):
        raise ValueError("must be an absolute path")
    return text


class Detect(Model):
    """How slurmddp detects this site. All values are patterns. The rules of a base are not used.

    cluster_names: Slurm's ClusterName; hostnames: the name of the host; environment: a variable and its value; files: a
    path and one of its lines (`*`: the path exists).
    """

    cluster_names: tuple[Line, ...] = ()
    hostnames: tuple[Line, ...] = ()
    environment: dict[str, Line] = {}
    files: dict[Annotated[Line, AfterValidator(_absolute)], Line] = {}


class Fact(Model):
    """Where a value of the profile comes from. verified: whether the site or its vendor has published it; date: date of
    that text or, if it has none, the day on which it was read."""

    source: Line
    date: Annotated[str, AfterValidator(_date)] | None = None
    verified: bool
    note: Line | None = None


#: What `build-image --on-node` sets itself: it follows the job by them.
_FOLLOWED = frozenset(
    ("--output", "--error", "--export", "--chdir", "--array", "--wrap", "--wait", "--parsable", "--requeue")
) | frozenset(("-o", "-e", "-D", "-a", "-W"))


def _not_followed(text: str) -> str:
    if text.split("=")[0] in _FOLLOWED:
        raise ValueError("is set by build-image itself: remove it")
    return text


class BuildJob(Model):
    """What `build-image --on-node` asks Slurm for. Default: as for training jobs.

    partition, account: default resources.partition and resources.account; time: one hour, or the partition's limit;
    cpus_per_node: images.processors; mem_per_node: Slurm's default; sbatch: further options.
    """

    partition: SbatchValue | None = None
    time: TimeLimit | None = None
    account: SbatchValue | None = None
    cpus_per_node: Count | None = None
    mem_per_node: Mebibytes | None = None
    sbatch: tuple[Annotated[SbatchFlag, AfterValidator(_not_followed)], ...] = ()


class Building(Model):
    """How images are built here.

    cache: a folder for layers and for the image while it is built (default: paths.cache); processors, memory: what
    compression of the image may use on a login node; on_node: the job of --on-node. proxy: proxy for registries and
    packages, http://HOST:PORT; mirrors: a registry's host -> HOST[:PORT][/PATH] to ask instead of it; insecure:
    registries that may be asked over plain HTTP.
    """

    cache: PathStr | None = None
    processors: Count | None = 4
    memory: Mebibytes | None = None
    on_node: BuildJob = BuildJob.model_construct()
    proxy: Line | None = None
    mirrors: dict[Line, Line] = {}
    insecure: tuple[Line, ...] = ()


class Site(Model):
    """A site profile, site_configs/NAME.yaml. `job` has defaults for job files, which need not repeat them.

    requeue: whether a job may requeue itself, without delay and first in the queue (expedite); if not, it submits its
    successor (chain). fabric: the network between the
    nodes. gpu: name of the GPUs, for people. architecture: of the nodes' CPUs, for which an image must be built. when:
    settings for some jobs only, each under a name.
    """

    name: Name
    title: Line
    documentation: Line | None = None
    level: Level = "documented"
    bases: tuple[Name, ...] = ()
    scheduler: Literal["slurm", "local"] = "slurm"
    detect: Detect = Detect.model_construct()
    partitions: dict[Name, Partition] = {}
    fabric: Fabric | None = None
    gpu: Line | None = None
    architecture: Literal["x86_64", "aarch64"] | None = None
    gpu_vendor: Literal["nvidia", "amd", "none"] = "nvidia"
    gpu_request: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    gpu_request_type: bool = False
    unsupported_flags: tuple[Line, ...] = ()
    required: Annotated[tuple[Line, ...], Adds()] = ()
    internet_on_nodes: bool | None = None
    alerts: Outlet = Outlet.model_construct()
    watchdog: Watchdog | None = None
    driver: Driver | None = None
    images: Building = Building.model_construct()
    requeue: Literal["allowed", "expedite", "chain"] = "allowed"
    exclude_bad_nodes_for: SecondsOrNone = 86400
    notes: Annotated[tuple[Line, ...], Adds()] = ()
    when: dict[Name, When] = {}
    facts: dict[str, Fact] = {}
    job: dict[str, Any] = {}

    @property
    def queues(self) -> bool:
        """Return whether jobs wait in a queue for nodes of a cluster: else they are processes of this machine."""
        return self.scheduler != "local"
