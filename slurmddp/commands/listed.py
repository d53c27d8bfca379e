"""The commands: what `slurmddp --help` says of each, and where each runs with --host. The rest of a command is in the
module of its name, which is imported when the command is called."""

from typing import Literal, NamedTuple

#: What --host does with a command before it runs on the login node. nothing: it only looks at runs, or is of that
#: machine; copy: it gets a copy of the project first; refuse: it writes a file of the project, which lies here.
Host = Literal["nothing", "copy", "refuse"]


class Listed(NamedTuple):
    """A command.

    Attributes:
        panel: its heading in the help; "" for a command that no help lists.
        summary: the first sentence of its help.
        example: a command line, for the end of its help; "" for a group, whose commands have their own.
        aliases: other names, which no help lists.
        submits: whether it submits jobs: with --host it finishes although the connection is lost.
    """

    name: str
    panel: str
    summary: str
    example: str = ""
    aliases: tuple[str, ...] = ()
    host: Host = "nothing"
    submits: bool = False

    @property
    def module(self) -> str:
        """Return the name of its module, and of its function there: that of a group is `group`."""
        return {"import": "import_"}.get(self.name, self.name.replace("-", "_"))


_JOBS, _RUNS, _IMAGES, _SITES = "Jobs", "Runs", "Images", "Sites and alerts"
COMMANDS = (
    Listed(
        "init",
        _JOBS,
        "Write a commented job file from what is found here: the cluster, its partitions and GPUs, your training "
        "script, an image or the active Python environment",
        "slurmddp init job.yaml --site leonardo",
        host="refuse",
    ),
    Listed(
        "import",
        _JOBS,
        "Write the job file of a batch script",
        "slurmddp import train.sbatch -o job.yaml",
        host="refuse",
    ),
    Listed(
        "submit",
        _JOBS,
        "Check the job, write its run folder, and submit it with sbatch",
        "slurmddp submit train.py --nodes 4 --image image.sif -- --lr 3e-4",
        host="copy",
        submits=True,
    ),
    Listed(
        "resume",
        _JOBS,
        "Continue a run from its newest checkpoint, in a new run",
        "slurmddp resume last --nodes 3",
        host="copy",
        submits=True,
    ),
    Listed(
        "rerun",
        _JOBS,
        "Submit a run again from its start, with the code, image and configuration that it had",
        "slurmddp rerun last",
        submits=True,
    ),
    Listed(
        "run",
        _JOBS,
        "Run a job now, inside an allocation (salloc, a batch job) or on this machine",
        "slurmddp run train.py --ranks 2",
        host="copy",
    ),
    Listed(
        "check",
        _JOBS,
        "Show what a job will do, what would make it fail, and what it costs",
        "slurmddp check job.yaml --nodes 8",
        host="copy",
    ),
    Listed(
        "tune",
        _JOBS,
        "Measure in minutes how large the batch may be, how many nodes are worth it, and what the limit is",
        "slurmddp tune job.yaml --nodes 4",
        host="refuse",
    ),
    Listed(
        "sweep",
        _JOBS,
        "Submit a job once for each point of a grid, compare the runs, and submit again what failed",
        host="copy",
        submits=True,
    ),
    Listed("runs", _RUNS, "List your runs, newest last", "slurmddp runs --state running", ("ls", "ps")),
    Listed("status", _RUNS, "Show the state of a run", "slurmddp status last --watch"),
    Listed(
        "logs",
        _RUNS,
        "Show the logs of a run: job.sh first, then each node, attempt by attempt",
        "slurmddp logs last -f --tail 20",
    ),
    Listed("cancel", _RUNS, "Cancel a run", "slurmddp cancel last --wait", ("stop",)),
    Listed(
        "doctor",
        _RUNS,
        "Find the root cause of a failure in the logs of a run, also of one that slurmddp did not start",
        "slurmddp doctor slurm-1234.out",
    ),
    Listed(
        "report",
        _RUNS,
        "Write an HTML file about a run: curves, where its time went, faults, network, configuration",
        "slurmddp report last -o report.html --compare gpt-20261120-090000-a1b2",
    ),
    Listed(
        "sync",
        _RUNS,
        "Send the metrics of a run to a tracker, from this machine",
        "slurmddp sync last --to mlflow --follow",
    ),
    Listed(
        "clean",
        _RUNS,
        "List the disk space of your runs, the largest first",
        "slurmddp clean --older-than 30d --state failed",
    ),
    Listed("debug", _RUNS, "Look into a running job: a shell, a port, stacks, a profile; pack a run for support"),
    Listed("checkpoint", _RUNS, "List, verify, prune and export the checkpoints of a run"),
    Listed(
        "build-image",
        _IMAGES,
        "Build an image with Apptainer or Singularity",
        "slurmddp build-image image.sif --base 25.04",
        host="copy",
    ),
    Listed("image", _IMAGES, "List and inspect images"),
    Listed("site", _SITES, "List, show, compare, detect and validate site profiles"),
    Listed("alert", _SITES, "Test whether alerts arrive, and send those that nodes could not", host="copy"),
    Listed(
        "schema",
        "",
        "Print the JSON Schema of job, site or recipe files, for editors and other programs",
        "slurmddp schema job > job.schema.json",
    ),
)
#: By their names, without the aliases.
BY_NAME = {command.name: command for command in COMMANDS}
