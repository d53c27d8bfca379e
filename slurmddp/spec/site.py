"""A site's profile: what its cluster has and how it wants to be asked."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from slurmddp.spec.alerts import Outlet, Watchdog
from slurmddp.spec.types import Adds, Count, Line, Mebibytes, Model, Name, PathStr, SbatchFlag, SbatchValue, TimeLimit


def _driver(text: str) -> str:
    if not re.fullmatch(r"[0-9]{3,}(\.[0-9]+)*", text):
        raise ValueError("must be a driver version, such as 535.183.01")
    return text


Driver = Annotated[str, AfterValidator(_driver)]


class Partition(Model):
    """One kind of node. `ask` overrides how it is asked for: some sites want a constraint, not a partition. driver: the
    version of NVIDIA's, such as 535.183.01, where it is not the site's."""

    gpus_per_node: Annotated[int, Field(ge=0, le=64)] | None = None
    gpu_type: SbatchValue | None = None
    driver: Driver | None = None
    cpus_per_node: Annotated[int, Field(ge=1)] | None = None
    mem_per_node: Mebibytes | None = None
    max_time: TimeLimit | None = None
    max_nodes: Annotated[int, Field(ge=1)] | None = None
    ask: dict[Literal["partition", "constraint", "qos"], SbatchValue] | None = None


def _absolute(text: str) -> str:
    if not text.startswith("/"):
        raise ValueError("must be an absolute path")
    return text


class Detect(Model):
    """How the program finds out that it runs here. All values are patterns. A base does not hand these rules on.

    cluster_names: Slurm's ClusterName; hostnames: the name of the host; environment: a variable and its value; files: a
    path and one of its lines (`*`: the path exists).
    """

    cluster_names: tuple[Line, ...] = ()
    hostnames: tuple[Line, ...] = ()
    environment: dict[str, Line] = {}
    files: dict[Annotated[Line, AfterValidator(_absolute)], Line] = {}


class Fact(Model):
    """Where a value of the profile comes from; `verified` means read in text of the site or its vendor."""

    source: Line
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
    """What `build-image --on-node` asks Slurm for; what is not said here is as jobs have it.

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
    compressing the image may take of a login node that others use; on_node: the job of --on-node. proxy:
    http://HOST:PORT on the way to registries and packages; mirrors: a registry's host -> HOST[:PORT][/PATH] that is
    asked instead; insecure: hosts with which plain HTTP is spoken.
    """

    cache: PathStr | None = None
    processors: Count | None = 4
    memory: Mebibytes | None = None
    on_node: BuildJob = BuildJob.model_construct()
    proxy: Line | None = None
    mirrors: dict[Line, Line] = {}
    insecure: tuple[Line, ...] = ()


class Site(Model):
    """site_configs/NAME.yaml. `job` is a layer of the job: whatever the site knows, the job does not say.

    requeue: whether a job may go back to the queue by itself; where it may not, it submits its successor (chain).
    """

    name: Name
    title: Line
    documentation: Line | None = None
    experimental: bool = False
    bases: tuple[Name, ...] = ()
    scheduler: Literal["slurm", "local"] = "slurm"
    detect: Detect = Detect.model_construct()
    partitions: dict[Name, Partition] = {}
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
    requeue: Literal["allowed", "chain"] = "allowed"
    notes: Annotated[tuple[Line, ...], Adds()] = ()
    facts: dict[str, Fact] = {}
    job: dict[str, Any] = {}
