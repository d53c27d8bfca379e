"""The sbatch script of `submit --plain`: srun and torchrun, and nothing of ours on the nodes."""

import os.path
import re
from collections.abc import Iterator

from slurmddp.errors import UserError
from slurmddp.job.plan.model import Plan, VariableGroup
from slurmddp.render.engine import names_run, quote_run, render
from slurmddp.render.scripts import without_python_path

#: Options of sbatch that only the supervised job has a use for.
_SUPERVISED = ("--requeue", "--open-mode", "--no-kill", "--signal")
#: A setup line of one command, behind which `|| exit` may stand.
_SIMPLE = re.compile(r"(?:module|ml|source|\.|conda|export|eval)\s[^#;&|\\]*")


def plain_script(plan: Plan, file: str) -> str:
    """Return the script; file: its name. The plan's snapshot is off: the script runs where it lies.

    Raises UserError, which lists all that the job asks for and only the supervised form has.
    """
    if refusals := list(_refusals(plan)):
        todo = "remove that from the job, or submit without --plain"
        raise UserError(f"--plain cannot run this job: {'; '.join(refusals)}", todo=todo)
    program = plan.program
    return render(
        "sbatch/plain.sh.j2",
        plan=plan,
        file=quote_run(file),
        sbatch=_sbatch(plan),
        setup=[f"{line} || exit" if _SIMPLE.fullmatch(line) else line for line in plan.job.setup],
        modules=any(re.match(r"(module|ml)\s", line) for line in plan.job.setup),
        python_path=_python_path(plan),
        groups=_groups(plan),
        binds=[
            *(bind.spec for bind in plan.container.binds),
            *([f"{plan.cache}:{plan.cache}:rw"] if plan.cache else []),
        ],
        words=["--no-python", *program.words(program.source)] if program.bash else program.words(program.source),
    )


def _refusals(plan: Plan) -> Iterator[str]:
    """Yield what of the job the plain script cannot do, whose absence would make it another job."""
    if not plan.program.own:
        yield "the bundled trainer (train.task) is a part of slurmddp; --plain is for your own script"
    if not plan.site.queues:
        yield f"site {plan.site.name} has no Slurm (here, `torchrun` alone does it)"
    if plan.srun is not None:
        yield "launch.mode srun starts ranks without torchrun"
    for key, given in (("launch.accelerate", plan.accelerate), ("launch.wrap", plan.program.wrap)):
        if given:
            yield f"{key} needs the supervised job"
    if plan.nodes.ranks_per_node is None and not plan.layout.gpus_per_node:
        yield "torchrun cannot choose the ranks of a node by its cores: resources.ranks_per_node must be a number"
    if plan.container.contained:
        yield "a contained container needs the devices and folders that node.sh binds"
    if plan.resume_from:
        yield "it has no checkpoints of older runs (--resume)"
    words = [*plan.program.args, plan.workdir, _python_path(plan)]
    words += [each.value for group in _groups(plan) for each in group.variables]
    if any(map(names_run, words)):
        yield "it has no run folder for {run}"
    elif plan.program.own and not plan.workdir:
        yield "it has no run folder (train.workdir: run)"


def _sbatch(plan: Plan) -> list[str]:
    nodes = plan.nodes
    count = f"--nodes={nodes.max}" if nodes.min == nodes.max else f"--nodes={nodes.min}-{nodes.max}"
    options = [line for line in plan.sbatch if line.split("=")[0] not in _SUPERVISED]
    return [*(count if line.startswith("--nodes=") else line for line in options), "--output=%x-%j.log"]


def _groups(plan: Plan) -> list[VariableGroup]:
    """Return the variables that mean something without a run folder, PYTHONPATH aside."""
    groups = [group for group in plan.environment if not group.of_run]
    return without_python_path(
        group._replace(variables=tuple(v for v in group.variables if not v.base)) for group in groups
    )


def _python_path(plan: Plan) -> str:
    """Return what the ranks need in PYTHONPATH: not the folder of the script, where Python looks by itself."""
    folder = None if plan.program.module else os.path.dirname(plan.program.source)
    return ":".join(
        [*(path for path in plan.program.python_path if path != folder), *filter(None, [plan.variable("PYTHONPATH")])]
    )


def missing(plan: Plan) -> list[str]:
    """Return what the supervised job of this plan does and the plain one does not, the dearest first."""
    spares = f", no spare node ({plan.nodes.spares} dropped)" if plan.nodes.spares else ""
    alerts = f" ({', '.join(target.name for target in plan.alerts.targets)})" if plan.alerts else ""
    more = []
    if arguments := plan.job.train.resume_args:
        more.append(f"no {' '.join(arguments)} behind a save (train.resume_args): the script starts without it")
    if plan.job.checkpoint.watch:
        more.append("no look at what the script saves (checkpoint.watch)")
    if plan.job.setup:
        more.append("setup lines run on the first node only; the variables that they set reach the others")
    if plan.container.compat:
        more.append("no choice between the image's libcuda and the node's: the image decides")
    return [
        f"no restart: a rank, node or link that fails ends the job{spares}",
        "no requeue: at the time limit, the job is killed; nothing tells the script to save before",
        "no preflight: nodes and network are not checked before the ranks start",
        f"no alerts of slurmddp{alerts}, no hang detection, no flight recorder",
        "no SLURMDDP_RUN, and no slurmddp.runtime to import: a script that needs them fails",
        "no copy of your code: if you change it while the job waits, the job runs the changed code",
        "no run folder: `status`, `logs` and `report` do not know this job; `slurmddp doctor LOG` reads its log",
        *more,
    ]
