"""The job: what a user writes in job.yaml. Every default is one that an expert would choose."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from slurmddp.container import Runtime, runtime_named
from slurmddp.job.alerts import Target
from slurmddp.job.train import Parallel, Train
from slurmddp.job.types import (
    Adds,
    Count,
    EnvMap,
    EnvName,
    Interface,
    Line,
    Mebibytes,
    Model,
    Name,
    OutputPath,
    PathStr,
    RuntimeOption,
    SbatchFlag,
    SbatchValue,
    Seconds,
    Text,
    TimeLimit,
)

#: Set by torchrun on every rank: a value of the user's would be overwritten or, worse, not.
RESERVED = frozenset(
    {
        "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
        "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
        # Read-only in bash.
        "UID", "EUID", "PPID", "SHELLOPTS", "BASHOPTS", "BASH_VERSINFO",
        # node.sh reads these after it has set the user's, which without a container are variables of the same shell.
        # tests/unit/render/test_render_names.py finds in the scripts what is missing here.
        "run", "logs", "interface", "container", "torchrun", "program",
    }
)  # fmt: skip


def without_reserved(variables: dict[str, str]) -> dict[str, str]:
    """Raises ValueError for a variable that is not the user's to set."""
    for name in variables:
        if name in RESERVED or name.startswith("SLURMDDP_"):
            raise ValueError(f"sets {name}, which is reserved: torchrun, bash or slurmddp sets it on every rank")
    return variables


Variables = Annotated[EnvMap, AfterValidator(without_reserved)]


def _ranks(value: Any) -> Any:
    """A number of ranks or the word auto; one message for both."""
    if value is None or value == "auto":
        return value
    if isinstance(value, bool) or not re.fullmatch(r"0*[0-9]{1,4}", str(value)) or not 1 <= int(value) <= 1024:
        raise ValueError("must be a whole number from 1 to 1024, or auto")
    return int(value)


_NODES = r"([0-9]{1,5})(?:-([0-9]{1,5}))?(?:\+([0-9]{1,5}))?"


class Nodes(Model):
    """`min` to `max` nodes train; `spares` further nodes of the allocation wait. As text: 2-4, 4+1, 2-4+1."""

    min: Annotated[int, Field(ge=1, le=65536)]
    max: Annotated[int, Field(ge=1, le=65536)]
    spares: Annotated[int, Field(ge=0, le=65536)] = 0

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if isinstance(value, dict) and "min" not in value and "max" in value:
            return {"min": value["max"], **value}
        match = re.fullmatch(_NODES, value) if isinstance(value, str) else None
        if match is None:
            return value
        least, most, spares = match.groups()
        return {"min": least, "max": most or least, "spares": spares or "0"}

    @model_validator(mode="after")
    def _in_order(self) -> "Nodes":
        if self.min > self.max:
            raise ValueError(f"has min {self.min} above max {self.max}")
        return self


def _no_sign(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("+"):
        raise ValueError("has only spares: write 4+1 for four nodes and one spare")
    return value


def _form_of_nodes(value: Any) -> str:
    """Return which of the two forms it is written in; the names never stand in a message."""
    text = isinstance(value, str) and not value.isdigit() and re.fullmatch(_NODES, value)
    return "[range]" if text or isinstance(value, dict | Nodes) else "[number]"


class Resources(Model):
    """What the job asks Slurm for. Default: the site's values for the partition.

    nodes: a number, or minimum and maximum. ranks_per_node: auto lets each node start one rank per GPU that Slurm gave
    it, or as many as its cores allow.
    """

    nodes: Annotated[
        Annotated[int, BeforeValidator(_no_sign), Field(ge=1, le=65536), Tag("[number]")]
        | Annotated[Nodes, Tag("[range]")],
        Discriminator(_form_of_nodes),
    ] = 1
    gpus_per_node: Annotated[int, Field(ge=0, le=64)] | None = None
    ranks_per_node: Annotated[int | Literal["auto"] | None, BeforeValidator(_ranks)] = None
    gpu_type: SbatchValue | None = None
    cpus_per_node: Annotated[int, Field(ge=1, le=4096)] | None = None
    mem_per_node: Mebibytes | None = None
    time: TimeLimit | None = None
    account: SbatchValue | None = None
    partition: SbatchValue | None = None
    qos: SbatchValue | None = None
    constraint: SbatchValue | None = None
    exclusive: bool | None = None
    sbatch_extra: Annotated[tuple[SbatchFlag, ...], Adds()] = ()

    @property
    def node_range(self) -> Nodes:
        """`nodes`, whichever way it is written."""
        if isinstance(self.nodes, Nodes):
            return self.nodes
        return Nodes.model_construct(min=self.nodes, max=self.nodes, spares=0)


class Bind(Model):
    """One folder or file that the container sees: `source[:destination[:ro|rw]]`."""

    source: PathStr
    destination: PathStr | None = None
    mode: Literal["ro", "rw"] = "rw"

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        parts = value.split(":")
        if len(parts) > 3 or not all(parts):
            raise ValueError("must be source, source:destination or source:destination:ro")
        return dict(zip(("source", "destination", "mode"), parts, strict=False))

    @field_validator("source", "destination")
    @classmethod
    def _plain(cls, value: str | None) -> str | None:
        # The runtime's --bind splits its value at both, and has no way to quote them.
        if value is not None and any(char in value for char in ':,"\\'):
            raise ValueError("contains ':', ',', '\"' or '\\', which --bind does not accept")
        return value

    @field_validator("destination")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("/", "$", "~/")):
            raise ValueError("must be an absolute path in the container")
        return value


class Container(Model):
    """The container of the ranks. `slurmddp build-image --job` makes the image from `recipe`, `base` and `pip`. compat:
    each node with NVIDIA GPUs chooses by its driver between its own libcuda and the image's; false: as the
    image has it."""

    runtime: Runtime | None = None
    image: PathStr | None = None
    python: Line | None = None
    binds: Annotated[tuple[Bind, ...], Adds()] = ()
    options: Annotated[tuple[RuntimeOption, ...], Adds()] = ()
    compat: bool = True
    recipe: Line | None = None
    base: Line | None = None
    pip: Annotated[tuple[Line, ...], Adds()] = ()

    @property
    def needs_image(self) -> bool:
        """Return whether the ranks run in an image."""
        return runtime_named(self.runtime).needs_image


class Network(Model):
    """Interface and variables of NCCL and Gloo. measure: the nodes' network is measured before the ranks start, null:
    with GPUs on several nodes; min_bandwidth: GB/s on the bus that this measurement should reach; allow_socket: TCP is
    good enough where the site has a faster network; store_tls: the agents encrypt PyTorch's store on several nodes, and
    accept nobody without the run's key pair, null: if openssl can make one at submission."""

    interface: Interface | None = None
    variables: Variables = {}
    debug: bool = False
    measure: bool | None = None
    min_bandwidth: Annotated[float, Field(gt=0, le=100_000)] | None = None
    allow_socket: bool = False
    store_tls: bool | None = None


def _preflight(value: Any) -> Any:
    """One message for a value that may be of two types."""
    if not isinstance(value, bool) and str(value).lower() not in ("true", "false", "yes", "no", "on", "off", "only"):
        raise ValueError("must be true, false or only")
    return value


class Launch(Model):
    """How the ranks start. mode: `srun` starts them as tasks of Slurm, without torchrun; mpi: the option --mpi of srun.

    accelerate: a config file of Accelerate; the ranks get the variables that `accelerate launch` makes of it.
    rendezvous: how torchrun's agents find each other. max_restarts: how often they restart the ranks in place. null:
    with c10d up to 100 times (recovery.no_progress may stop them earlier), never with static. wrap: a command and its
    arguments, which starts each rank's program, such as a profiler.
    """

    mode: Literal["torchrun", "srun"] = "torchrun"
    mpi: SbatchValue | None = None
    accelerate: PathStr | None = None
    rendezvous: Literal["c10d", "static"] = "c10d"
    max_restarts: Annotated[int, Field(ge=0, le=1000)] | None = None
    wrap: tuple[Text, ...] = ()

    @model_validator(mode="after")
    def _of_its_mode(self) -> "Launch":
        if self.mode == "srun" and (self.max_restarts or self.rendezvous == "static"):
            raise ValueError(
                "has mode srun with rendezvous static or max_restarts, which are for torchrun: remove them"
            )
        if self.mode == "srun" and self.accelerate is not None:
            raise ValueError("has mode srun with accelerate, which torchrun's agents read: remove one of them")
        if self.mode == "torchrun" and self.mpi is not None:
            raise ValueError(f"has mpi {self.mpi}, which needs mode srun")
        return self

    @model_validator(mode="after")
    def _restarts_need_c10d(self) -> "Launch":
        if self.rendezvous == "static" and self.max_restarts:
            raise ValueError(
                f"has max_restarts {self.max_restarts} with rendezvous static, which cannot restart ranks in place"
                "\n  -> set rendezvous: c10d, or remove max_restarts: job.sh then restarts the ranks"
            )
        return self


def _requeue(value: object) -> object:
    return {"true": "auto", "yes": "auto", "false": "never", "no": "never"}.get(str(value).lower(), value)


class Recovery(Model):
    """How slurmddp reacts to faults. requeue: requeue the job at its time limit, after preemption, and if too few nodes
    remain (auto: at the time limit, a script of the user's own only if it saved in this job); no_progress: the
    run fails after so many failed starts in a row of which none gets further than the first; max_gpu_hours: what all
    starts of the run may use together, then it stops; preflight: check the nodes before each start of the ranks; only:
    exit after the check; fork: fork the ranks of an own script from a process that has imported torch;
    heartbeats: let the nodes send heartbeats, so that a lost one is replaced before Slurm reports it; spares_warm: keep
    a process on each node, spares too, that has imported torch for the ranks of all attempts; standby: go on in the
    allocation if the node of the batch script is lost."""

    requeue: Annotated[Literal["auto", "always", "never"], BeforeValidator(_requeue)] = "auto"
    no_progress: Annotated[int, Field(ge=1, le=1000)] = 3
    max_gpu_hours: Annotated[float, Field(gt=0, le=1e9)] | None = None
    preflight: Annotated[bool | Literal["only"], BeforeValidator(_preflight)] = True
    fork: bool = False
    heartbeats: bool = False
    spares_warm: bool = False
    standby: bool = False


class Timeouts(Model):
    """Seconds. rendezvous: an agent reaches the head node; join: all agents have come; collective: one collective
    operation; stop: from the stop file to the time limit, room for the last checkpoint, null plans it from what saves
    took; hang: the shortest deadline for a sign of progress (longer ones are learned from the run), null turns hang
    detection off."""

    rendezvous: Seconds = 600
    join: Seconds = 600
    collective: Seconds = 600
    stop: Seconds | None = None
    hang: Seconds | None = 120


class Checkpoint(Model):
    """A checkpoint is saved when either interval is due. slurmddp keeps the newest `keep` complete ones, and each one
    whose step is a multiple of `keep_every`. asynchronous: write while training continues. watch: where a script of the
    user's own saves, besides checkpoints/ of its run: folders, files or patterns, relative to its working directory."""

    interval: Seconds | None = 1800
    every_steps: Count | None = None
    keep: Annotated[int, Field(ge=1, le=10000)] = 3
    keep_every: Count | None = None
    asynchronous: bool = True
    at_end: bool = True
    watch: Annotated[tuple[OutputPath, ...], Adds()] = ()


class Paths(Model):
    """Folders for runs and caches. Do not use a home folder with a small quota.

    mode: who may read a run folder: its owner, the group too, or everybody. Nobody else may write there: whoever can
    replace its scripts runs code as the owner. node: a folder of each node's own disk or memory, for what a shared
    file system is too slow or too strict for.
    """

    runs: PathStr = "runs"
    mode: Literal["0700", "0750", "0755"] = "0700"
    cache: PathStr | None = None
    node: PathStr = "/tmp"

    @property
    def permissions(self) -> int:
        return int(self.mode, 8)


class Job(Model):
    """job.yaml. environment_from: variables with secrets, read at submission, written to no file of the run folder, and
    given to the ranks alone. not_secret: names that look like one and are none."""

    name: Name = "job"
    site: Line
    resources: Resources = Resources.model_construct()
    container: Container = Container.model_construct()
    environment: Variables = {}
    environment_from: Annotated[tuple[EnvName, ...], Adds()] = ()
    not_secret: Annotated[tuple[Line, ...], Adds()] = ()
    setup: Annotated[tuple[Line, ...], Adds()] = ()
    network: Network = Network.model_construct()
    launch: Launch = Launch.model_construct()
    recovery: Recovery = Recovery.model_construct()
    timeouts: Timeouts = Timeouts.model_construct()
    train: Train
    parallel: Parallel = Parallel.model_construct()
    checkpoint: Checkpoint = Checkpoint.model_construct()
    alerts: Annotated[tuple[Target, ...], Adds()] = ()
    paths: Paths = Paths.model_construct()
    snapshot: bool = True
    snapshot_limit: Mebibytes = 50

    @field_validator("environment_from")
    @classmethod
    def _not_ours(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        without_reserved(dict.fromkeys(value, ""))
        return tuple(dict.fromkeys(value))

    @model_validator(mode="after")
    def _saves_of_a_script(self) -> "Job":
        if self.checkpoint.watch and self.train.task is not None:
            raise ValueError(
                "has checkpoint.watch, which is for your own script: a task saves in checkpoints/ of its run"
                "\n  -> remove it"
            )
        return self

    @model_validator(mode="after")
    def _one_source_each(self) -> "Job":
        for name in self.environment_from:
            if name in self.environment:
                raise ValueError(f"environment and environment_from both set {name}: remove one")
        return self
