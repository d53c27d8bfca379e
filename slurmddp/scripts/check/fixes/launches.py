"""How often, and on how many nodes, a launcher or a program starts, and what its ranks are told."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slurmddp.scripts.check.finding import Finding
from slurmddp.scripts.check.fix import Draft, fixes
from slurmddp.scripts.check.fixes.places import (
    VALUE,
    assignments,
    behind_launcher,
    cut,
    launch_fixes,
    option,
    places,
    replaced,
    set_option,
    set_world_size,
    without,
)
from slurmddp.scripts.check.launches import Launch
from slurmddp.scripts.check.rules.common import AGENTS, launches, nodes_option
from slurmddp.scripts.check.script import Script
from slurmddp.scripts.check.values import number, symbol_name

_NODES = r"tasks|--(nnodes|num-machines|num-processes)"
_PYTHON = r"(?<![\w./-])[\w./-]*python[\d.]*(?=\s)"


def _once_per_node(script: Script) -> str:
    """Return the options of srun that start one task per node with all CPUs of the node's tasks."""
    job, tasks = script.job, script.job.tasks_per_node or 1
    counted = job.ntasks is not None or (job.ntasks_per_node or 1) > 1
    options = (["--ntasks=$SLURM_NNODES"] if counted else []) + ["--ntasks-per-node=1"]
    if script.option("cpus-per-task"):
        cpus = f"$(({tasks} * SLURM_CPUS_PER_TASK))" if tasks > 1 else "$SLURM_CPUS_PER_TASK"
        options.append(f"--cpus-per-task={cpus}")
    return " ".join(options)


@launch_fixes("one-node-only", kinds=AGENTS, changes="tasks")
def one_node_only(draft: Draft, finding: Finding, launch: Launch) -> Iterator[Draft]:
    """Srun stands before all words but assignments and what only bash has."""
    written = list(zip(launch.command.words, launch.command.lines, strict=True))
    while written[1:] and re.match(r"[A-Za-z_]\w*\+?=|(exec|time|nohup)\Z", written[0][0]):
        del written[0]
    for word, line in written[:1] if launch.step is None else ():
        if start := re.search(rf"(?<![\w./=-]){re.escape(word.partition(chr(10))[0])}", draft.line(line)):
            yield draft.splice(line, start.start(), start.start(), f"srun {_once_per_node(draft.script)} ")


@launch_fixes("srun-in-turn", kinds=AGENTS)
def srun_in_turn(draft: Draft, finding: Finding, launch: Launch) -> Iterator[Draft]:
    """Each pass starts in the background, and all are waited for."""
    end = launch.line
    while draft.line(end).endswith("\\"):
        end += 1
    done = next((at for at in range(end + 1, len(draft.lines) + 1) if re.match(r"\s*done\b", draft.line(at))), 0)
    if draft.line(done).strip() == "done" and "#" not in draft.line(end):
        wait = draft.line(done).rstrip().replace("done", "wait")
        yield draft.put(end, draft.line(end).rstrip() + " &").insert(done + 1, wait)


@launch_fixes("launcher-per-task", kinds=AGENTS, changes="tasks")
def launcher_per_task(draft: Draft, finding: Finding, launch: Launch) -> Iterator[Draft]:
    """Srun starts the launcher once on each node."""
    match = re.search(r"(?<![\w./-])srun(?=\s|$)", draft.line(launch.step.line)) if launch.step else None
    if launch.step is None or match is None or "all of them have local rank 0" in finding.message:
        return
    if "srun" not in launch.command.words and re.search(r"SLURM_(N?TASKS|NPROCS)", " ".join(launch.command.words)):
        return  # in the task, they would be those of the new step
    line, added = launch.step.line, " " + _once_per_node(draft.script)
    draft = draft.splice(line, match.end(), match.end(), added)
    names = {"ntasks": "--ntasks|-n", "ntasks-per-node": "--ntasks-per-node|--tasks-per-node"}
    names |= {"cpus-per-task": "--cpus-per-task|-c"} if "--cpus-per-task" in added else {}
    for name in names.keys() & launch.step.options.keys():
        old = re.compile(rf"(?<!\S)(?:{names[name]})(?:=|\s+|(?=\d)){VALUE}")
        for at in range(line, max([*launch.command.lines, launch.line]) + 1):
            if found := old.search(draft.line(at), match.end() + len(added) if at == line else 0):
                draft = without(draft, (at, found))
                break
    yield draft


@fixes("gpus-per-task", "too-many-ranks")
def gpus_per_task(draft: Draft, finding: Finding) -> Iterator[Draft]:
    """The GPUs of a node's tasks become those of the node."""
    tasks = draft.script.job.tasks_per_node
    lines = [each.line for each in draft.script.directives if each.name == "gpus-per-task"]
    if finding.rule.id == "gpus-per-task":
        lines = [finding.line]
        steps = [each.step for each in launches(draft.script) if each.step]
        steps = [each for each in steps if each.line == finding.line] or steps
        tasks = steps[0].resources.tasks_per_node if steps else tasks
    for line in lines:
        match = re.search(r"--gpus-per-task(?:=|\s+)((?:[\w-]+:)?)(\d+)", draft.line(line))
        if match and tasks:
            yield draft.splice(line, *match.span(), f"--gpus-per-node={match[1]}{int(match[2]) * tasks}")


@launch_fixes("standalone", kinds=("torchrun",), changes="--standalone")
def standalone(draft: Draft, finding: Finding, launch: Launch) -> Iterator[Draft]:
    """Without --standalone, another rule says where the nodes meet."""
    for line, match in places(draft, launch, r"\s--standalone(?!\S)"):
        yield draft.splice(line, *match.span(), "")


@launch_fixes("nnodes", kinds=AGENTS, changes=_NODES)
def nnodes(draft: Draft, finding: Finding, launch: Launch) -> Iterator[Draft]:
    """The launcher expects the nodes of the job."""
    job, expected = draft.script.job, number(nodes_option(launch))
    if expected is not None and expected == job.nodes and launch.step and launch.step.resources.nodes != job.nodes:
        yield _one_task_per_node(draft)  # sbatch allocates no more nodes than tasks
        yield from launcher_per_task(draft, finding, launch)
    elif launch.kind == "torchrun":
        yield from set_option(draft, launch, "$SLURM_NNODES", "nnodes")
    else:  # accelerate counts the ranks of all nodes, so their number follows
        ranks = number(launch.option("num-processes"))
        for after in replaced(draft, launch, "$SLURM_NNODES", "num-machines") if expected else ():
            if ranks and expected and ranks % expected == 0:
                yield from replaced(after, launch, f"$((SLURM_NNODES * {ranks // expected}))", "num-processes")
            elif ranks is None:
                yield after


def _one_task_per_node(draft: Draft) -> Draft:
    new = "" if draft.script.option("ntasks-per-node") else "--ntasks-per-node=1"
    if (draft.script.job.ntasks or 0) < (draft.script.job.nodes or 0):
        draft = draft.sub(draft.script.line_of("ntasks"), r"(?:--ntasks[= ]|-n ?)\d+(?!\S)", new)
    return draft


@launch_fixes("empty-variable", changes=rf"{_NODES}|--nproc-per-node|WORLD_SIZE")
def empty_variable(draft: Draft, finding: Finding, launch: Launch) -> Iterator[Draft]:
    """Slurm's variable for this is put in its place; for a step, the job's own value then holds."""
    meant = {"nnodes": "$SLURM_NNODES", "num-machines": "$SLURM_NNODES", "nproc-per-node": "$SLURM_GPUS_ON_NODE"}
    name = re.search(r"--([\w-]+)", finding.message)
    if finding.message.startswith("WORLD_SIZE"):
        yield from set_world_size(draft, launch)
    elif name and name[1] in meant and "is not exported" not in finding.message:
        yield from replaced(draft, launch, meant[name[1]], name[1])
    elif name and finding.message.startswith("srun"):
        yield from (without(draft, place) for place in option(draft, launch, name[1]))


@launch_fixes("idle-gpus", kinds=("torchrun",), changes="--nproc-per-node")
def idle_gpus(draft: Draft, finding: Finding, launch: Launch) -> Iterator[Draft]:
    """One rank is torchrun's default, and nobody's wish."""
    if launch.option("nproc-per-node") is None:
        yield from behind_launcher(draft, launch, f" --nproc_per_node={draft.script.job.gpus_per_node}")


@launch_fixes("rank-in-batch-shell", kinds=("python",), changes=r"(LOCAL_)?RANK|argument -\S*(?i:rank)\S*")
def rank_in_batch_shell(draft: Draft, finding: Finding, launch: Launch) -> Iterator[Draft]:
    """A shell of the task expands the variables."""
    if "srun" not in launch.command.words:
        return
    ranks = {name: symbol_name(launch.env(name) or "", "early") for name in ("RANK", "LOCAL_RANK")}
    values = " ".join(f"{name}=${variable}" for name, variable in ranks.items() if variable)
    if argument := re.match(r"the batch shell expands \$(\w+),", finding.message):
        for place in places(draft, launch, rf"(--?[\w-]+)(=|\s+)\"?\$\{{?{argument[1]}\}}?\"?(?!\S)"):
            moved = f'{place[1][1]}{place[1][2][:1]}"${argument[1]}"'
            yield from _in_shell(without(draft, place), launch, f'exec "$@" {moved}')
    else:
        yield from _in_shell(draft, launch, f'export {values}; exec "$@"')


def _in_shell(draft: Draft, launch: Launch, shell: str) -> Iterator[Draft]:
    for line, match in [*places(draft, launch, _PYTHON)][:1]:
        yield draft.splice(line, match.start(), match.start(), f"bash -c '{shell}' bash ")


@launch_fixes("world-size", kinds=("python",), changes="WORLD_SIZE")
def world_size(draft: Draft, finding: Finding, launch: Launch) -> Iterator[Draft]:
    """The text of a product is calculated; a wrong number becomes that of the tasks."""
    if not finding.message.endswith("write $(( ))"):
        yield from set_world_size(draft, launch)
        return
    for place in assignments(draft, launch, "WORLD_SIZE"):
        yield cut(draft, place, f"$(({place[1][2]}))")


@launch_fixes("lightning-devices", kinds=("python",), changes=r"argument (--)?trainer\.(devices|num_nodes)")
def lightning_devices(draft: Draft, finding: Finding, launch: Launch) -> Iterator[Draft]:
    """Lightning gets the numbers of the #SBATCH lines."""
    if match := re.match(r"(trainer\.(?:devices|num_nodes)) is (\d+), and --[\w-]+ is (\d+)", finding.message):
        meant = "$SLURM_NNODES" if match[1].endswith("num_nodes") else match[3]
        for place in places(draft, launch, rf"({re.escape(match[1])}[= ])({match[2]})(?!\S)"):
            yield cut(draft, place, meant)
