"""The plan: frozen, complete; what the templates and the run folder are made from.

Named tuples, here and in spec: a frozen dataclass takes five times as long to define, and every command defines
them all.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from slurmddp import __version__
from slurmddp.container import Container

#: How the name of a script ends that bash runs, instead of Python.
BASH_SUFFIX = ".sh"


class Allocation(NamedTuple):
    """The Slurm allocation that we are in. cpus_per_node: what it has of each node, None where that is not known."""

    nodes: int
    cpus_per_node: int | None


class Context(NamedTuple):
    """What a plan needs to know of the moment of submission; everything else comes from the job and the site.

    cwd:         absolute; relative paths are meant from here, and the job runs here.
    python:      the interpreter that runs slurmddp, which the `local` site uses for the ranks as well.
    resume_from: checkpoints folders of earlier runs, the newest first.
    inside:      True for `slurmddp run`: the job becomes a step of an allocation that exists.
    allocation:  that allocation, where its size is known.
    save_seconds: the longest that a checkpoint of those runs took to save, None where nothing is known.
    version:     of slurmddp, as the scripts name it.
    """

    cwd: str
    python: str
    resume_from: tuple[str, ...] = ()
    inside: bool = False
    allocation: Allocation | None = None
    save_seconds: float | None = None
    version: str = __version__


class NodePlan(NamedTuple):
    """How many nodes the job has and how many ranks each starts. `plan_nodes` decides it; everything else reads it.

    min:            nodes that an attempt needs at least.
    max:            nodes that an attempt takes where there are so many; they share the global batch.
    spares:         further nodes of the allocation, which wait to take the place of a lost node.
    ranks_per_node: None where only the nodes will know (`auto`); then they may differ.
    whole:          whether `auto` asks for whole nodes, so that each one gives all that it has.
    """

    min: int
    max: int
    spares: int
    ranks_per_node: int | None
    whole: bool = False

    @property
    def total(self) -> int:
        """Nodes of the allocation, at most: those that train, and the spares."""
        return self.max + self.spares

    @property
    def elastic(self) -> bool:
        """Return whether the job can lose nodes and continue in its allocation."""
        return self.min < self.max or self.spares > 0

    @property
    def below_max(self) -> range:
        """The numbers of nodes, below max, on which an attempt may run."""
        return range(self.min, self.max)

    @property
    def world(self) -> int | None:
        """Ranks on max nodes; None where only the nodes will know."""
        return None if self.ranks_per_node is None else self.max * self.ranks_per_node


class Layout(NamedTuple):
    """What each node gives. cpus_per_node None: whatever Slurm allots. mem_per_node in MiB, 0 for all.

    Where only the nodes know their ranks (NodePlan), gpus_per_node is 0 for ranks on cores, else the GPUs that a node
    has at least, and threads_per_rank is what a rank gets at least.
    """

    gpus_per_node: int
    cpus_per_node: int | None
    mem_per_node: int | None
    threads_per_rank: int


class BatchPlan(NamedTuple):
    """Samples: `total` an optimizer step, at most `micro` a rank and micro step, `accumulation` micro steps.

    accumulation, even: None where they follow on the nodes, from the ranks or the weights found there.
    """

    total: int
    micro: int
    accumulation: int | None
    even: bool | None


class SrunPlan(NamedTuple):
    """launch.mode srun: the ranks are so many tasks per node; options: of their srun, in addition to all others."""

    ranks_per_node: int
    options: tuple[str, ...]


class Variable(NamedTuple):
    """One variable of the ranks. base: empty, or the script's variable that the value is a path below of."""

    name: str
    value: str
    base: Literal["", "run", "logs", "scratch"] = ""


class VariableGroup(NamedTuple):
    """of_run: it needs the run folder or our code on the nodes."""

    title: str
    variables: tuple[Variable, ...]
    of_run: bool = False


class Program(NamedTuple):
    """What runs on each rank. script: below code/ of the run folder, or an absolute path; module: a Python module.

    Both are empty for the bundled entrypoint, which gets the run folder as its argument. wrap: a command before it.
    """

    script: str
    in_snapshot: bool
    args: tuple[str, ...]
    project: str | None
    python_path: tuple[str, ...]
    module: str = ""
    wrap: tuple[str, ...] = ()

    @property
    def wrapper(self) -> tuple[str, ...]:
        """Return the words between python and its `-m MODULE`; each may name {run}."""
        return ("-m", "slurmddp.runtime.wrap", str(len(self.wrap)), *self.wrap) if self.wrap else ()

    @property
    def own(self) -> bool:
        """Return whether it is the user's own program."""
        return bool(self.script or self.module)

    @property
    def bash(self) -> bool:
        """Return whether bash runs the script."""
        return self.script.endswith(BASH_SUFFIX)

    @property
    def source(self) -> str:
        """The script on this machine: the file that a snapshot copies."""
        if self.in_snapshot and self.project is not None:
            return f"{self.project}/{self.script.removeprefix('code/project/')}"
        return self.script

    def words(self, script: str) -> list[str]:
        """Return the command behind `slurmddp.runtime.begin`. script: how it names the script."""
        start = ["-m", self.module] if self.module else ["bash", script] if self.bash else [script]
        return [*start, *self.args]


class Note(NamedTuple):
    """Something that the user should know before submitting. level: note or warning."""

    level: Literal["note", "warning"]
    text: str


class RecoveryPlan(NamedTuple):
    """What job.sh does about faults.

    requeue:     requeue: scontrol requeue; chain: job.sh is submitted again, to begin when this job has ended; none.
    expedite:    Slurm requeues the job by itself if it exits with another code than 0 (sbatch --requeue=expedite).
    no_progress: starts in a row that end no further than the first of them, after which the run is stopped.
    preflight:   whether the nodes are checked before the ranks start; only: the ranks do not start.
    must_save:   the job is not requeued at its time limit where it saved nothing: a script of the user's own, which
                 may begin again.
    max_gpu_hours: of all starts of the run, with the job's GPUs whether they are used or not; None: no limit.
    from_zero:   starts from step 1 again that such a script may make after faults; None: any number.
    watch:       where a script of the user's own saves, besides the run's checkpoints/, as the ranks see it: absolute,
                 or begins with {run}.
    """

    requeue: Literal["requeue", "chain", "none"]
    no_progress: int
    preflight: bool | Literal["only"]
    expedite: bool = False
    must_save: bool = False
    max_gpu_hours: float | None = None
    watch: tuple[str, ...] = ()
    from_zero: int | None = None


class NetworkPlan(NamedTuple):
    """The measurement of the network before the ranks start.

    measure: whether there is one.          fabric: what the site promises, None: unknown.
    min_bandwidth: GB/s that are expected.  allow_socket: whether TCP is good enough on a faster network.
    """

    measure: bool
    fabric: str | None
    min_bandwidth: float | None
    allow_socket: bool


class AlertTarget(NamedTuple):
    """One receiver of alerts. Where its address is read from at submission: a variable, a file, or by its name."""

    name: str
    to: str
    on: tuple[str, ...]
    insecure: bool
    url_env: str | None
    url_file: str | None


class AlertsPlan(NamedTuple):
    """leave: from where messages leave; proxy: its address where they leave through one."""

    targets: tuple[AlertTarget, ...]
    leave: Literal["node", "proxy", "login"]
    proxy: str | None


class WatchdogPlan(NamedTuple):
    """sbatch: the options of the job behind the run that looks at how it ended."""

    sbatch: tuple[str, ...]


class Plan(NamedTuple):
    """cwd: the folder of submission. workdir: where the ranks' command runs, which may begin with {run}; empty for the
    run folder.

    time, stop_lead, cancel_grace and the time-outs in seconds, snapshot_limit in bytes; interface as in
    NCCL_SOCKET_IFNAME.
    environment_from: variables with secrets, whose values are no part of any plan. runs_mode: of a run folder.
    cache: a folder that all nodes share; node_folder: one of each node's own. accelerate: a config file of Accelerate,
    of which the run folder gets a copy.
    """

    name: str
    site: str
    site_title: str
    version: str
    scheduler: Literal["slurm", "local"]
    inside: bool
    cwd: str
    workdir: str
    nodes: NodePlan
    layout: Layout
    batch: BatchPlan | None
    time: int | None
    stop_lead: int | None
    cancel_grace: int | None
    sbatch: tuple[str, ...]
    container: Container
    environment: tuple[VariableGroup, ...]
    environment_from: tuple[str, ...]
    setup: tuple[str, ...]
    srun: SrunPlan | None
    accelerate: str | None
    rendezvous: Literal["c10d", "static"]
    rendezvous_timeout: int
    join_timeout: int
    max_restarts: int
    recovery: RecoveryPlan
    alerts: AlertsPlan | None
    watchdog: WatchdogPlan | None
    interface: str | None
    network: NetworkPlan
    program: Program
    runs_root: str
    runs_mode: int
    cache: str | None
    node_folder: str
    snapshot: bool
    snapshot_limit: int
    resume_from: tuple[str, ...]
    runtime_job: dict[str, Any] | None
    data_paths: tuple[str, ...]
    notes: tuple[Note, ...]

    @property
    def gpu_hours(self) -> float | None:
        """GPU-hours that the job may use, at most; None where no time limit is known, or not how many GPUs."""
        gpus = self.nodes.total * self.layout.gpus_per_node
        return None if self.time is None or self.nodes.world is None else gpus * self.time / 3600

    @property
    def node_hours(self) -> float | None:
        return None if self.time is None else self.nodes.total * self.time / 3600
