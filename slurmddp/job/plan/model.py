"""The plan: frozen, complete; what the templates and the run folder are made from.

Named tuples, here and in job: a frozen dataclass takes five times as long to define, and every command defines
them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from slurmddp import __version__

if TYPE_CHECKING:  # what looks at a run needs no model of job files, whose library takes a while to load
    from slurmddp.container import Container
    from slurmddp.job.job import Job
    from slurmddp.job.site import Site

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

    def by_tensor(self, tensor: int) -> NodePlan:
        """Return the nodes with each tensor group as one rank, which is how they take samples."""
        return self if self.ranks_per_node is None else self._replace(ranks_per_node=self.ranks_per_node // tensor)


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
        return bool(self.script or self.module)

    @property
    def bash(self) -> bool:
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
    must_save:   the job is not requeued at its time limit where it saved nothing: a script of the user's own, which
                 may begin again.
    from_zero:   starts from step 1 again that such a script may make after faults; None: any number.
    watch:       where a script of the user's own saves, besides the run's checkpoints/, as the ranks see it: absolute,
                 or begins with {run}.
    warm:        each node keeps a process that has imported torch, for the ranks of all attempts.
    standby:     the guard of another node supervises the job if the node of the batch script is lost.
    """

    requeue: Literal["requeue", "chain", "none"]
    expedite: bool = False
    must_save: bool = False
    watch: tuple[str, ...] = ()
    from_zero: int | None = None
    warm: bool = False
    standby: bool = False


class AlertTarget(NamedTuple):
    """One receiver of alerts. Where its address is read from at submission: a variable, a file, or by its name."""

    name: str
    to: str
    on: tuple[str, ...]
    insecure: bool
    url_env: str | None
    url_file: str | None


class AlertsPlan(NamedTuple):
    """leave: from where messages leave."""

    targets: tuple[AlertTarget, ...]
    leave: Literal["node", "proxy", "login"]


class Plan(NamedTuple):
    """The job and its site, and what follows from both. cwd: the folder of submission. workdir: where the ranks'
    command runs, which may begin with {run}; empty for the run folder. watchdog: sbatch's options for the job that
    looks at how the run ended.

    stop_lead, cancel_grace: in seconds. runs_root, cache, node_folder: absolute. accelerate: a config file of
    Accelerate, of which the run folder gets a copy.
    """

    job: Job
    site: Site
    version: str
    inside: bool
    cwd: str
    workdir: str
    nodes: NodePlan
    layout: Layout
    batch: BatchPlan | None
    stop_lead: int | None
    cancel_grace: int | None
    sbatch: tuple[str, ...]
    container: Container
    environment: tuple[VariableGroup, ...]
    srun: SrunPlan | None
    accelerate: str | None
    max_restarts: int
    recovery: RecoveryPlan
    alerts: AlertsPlan | None
    watchdog: tuple[str, ...] | None
    program: Program
    runs_root: str
    cache: str | None
    node_folder: str
    resume_from: tuple[str, ...]
    runtime_job: dict[str, Any] | None
    data_paths: tuple[str, ...]
    notes: tuple[Note, ...]

    @property
    def queued(self) -> bool:
        """Return whether the job is one of its own that waits in Slurm's queue."""
        return self.site.queues and not self.inside

    def variable(self, name: str) -> str:
        """Return the value of a variable of the ranks; empty without one."""
        values = [each.value for group in self.environment for each in group.variables if each.name == name]
        return values[-1] if values else ""

    @property
    def measures_network(self) -> bool:
        """Return whether the network is measured before the ranks start. Without GPUs there is only TCP to choose."""
        setting = self.job.network.measure
        return self.nodes.max > 1 and (self.layout.gpus_per_node > 0 if setting is None else setting)

    @property
    def encrypts_store(self) -> bool:
        """Return whether agents of several nodes shall use TLS. With launch.mode srun there are none."""
        return self.nodes.max > 1 and not self.srun and self.job.network.store_tls is not False

    @property
    def gpu_hours(self) -> float | None:
        """GPU-hours that the job may use, at most; None where no time limit is known, or not how many GPUs."""
        hours = self.node_hours
        return None if hours is None or self.nodes.world is None else hours * self.layout.gpus_per_node

    @property
    def node_hours(self) -> float | None:
        time = self.job.resources.time
        return None if time is None else self.nodes.total * time / 3600
