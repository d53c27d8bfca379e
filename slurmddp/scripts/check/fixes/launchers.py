"""How often, and on how many nodes, a launcher starts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slurmddp.scripts.check.finding import Finding
from slurmddp.scripts.check.fix import Draft, fixes
from slurmddp.scripts.check.fixes.places import (
    VALUE,
    behind_launcher,
    code_lines,
    cut,
    option,
    set_option,
    set_world_size,
    srun,
    with_line,
    without,
)
from slurmddp.scripts.check.launches import Launch
from slurmddp.scripts.check.rules.common import nodes_option
from slurmddp.scripts.check.script import Script
from slurmddp.scripts.check.values import number

_AGENTS = ("torchrun", "accelerate")


def _once_per_node(script: Script) -> str:
    """Return the options of srun that start one task per node with all CPUs of the node's tasks."""
    job, tasks = script.job, script.job.tasks_per_node or 1
    counted = job.ntasks is not None or (job.ntasks_per_node or 1) > 1
    options = (["--ntasks=$SLURM_NNODES"] if counted else []) + ["--ntasks-per-node=1"]
    if script.option("cpus-per-task"):
        cpus = f"$(({tasks} * SLURM_CPUS_PER_TASK))" if tasks > 1 else "$SLURM_CPUS_PER_TASK"
        options.append(f"--cpus-per-task={cpus}")
    return " ".join(options)


@fixes("one-node-only")
def one_node_only(draft: Draft, finding: Finding) -> Iterator[Draft]:
    for launch in with_line(draft, finding.line, *_AGENTS):
        words, lines = launch.command.words, launch.command.lines
        at = next((at for at, word in enumerate(words) if not re.match(r"[A-Za-z_]\w*\+?=", word)), None)
        if at is not None and words[at] in ("exec", "time", "nohup") and at + 1 < len(words):
            at += 1
        if at is None or launch.step:
            continue
        text, first = draft.line(lines[at]), words[at].split("\n")[0]
        start = re.search(rf"(?<![\w./=-]){re.escape(first)}", text)
        if start:
            added = f"srun {_once_per_node(draft.script)} "
            yield draft.put(lines[at], text[: start.start()] + added + text[start.start() :])


@fixes("srun-in-turn")
def srun_in_turn(draft: Draft, finding: Finding) -> Iterator[Draft]:
    for launch in with_line(draft, finding.line, *_AGENTS):
        end = launch.line
        while draft.line(end).endswith("\\"):
            end += 1
        done = next((at for at in range(end + 1, len(draft.lines) + 1) if re.match(r"\s*done\b", draft.line(at))), 0)
        if done and "#" not in draft.line(end) and draft.line(done).strip() == "done":
            indent = draft.line(done)[: -len("done")] if draft.line(done).endswith("done") else ""
            yield draft.put(end, draft.line(end).rstrip() + " &").insert(done + 1, indent + "wait")


@fixes("launcher-per-task")
def launcher_per_task(draft: Draft, finding: Finding) -> Iterator[Draft]:
    if "all of them have local rank 0" not in finding.message:
        for launch in with_line(draft, finding.line, *_AGENTS):
            yield from _spread(draft, launch)


def _spread(draft: Draft, launch: Launch) -> Iterator[Draft]:
    """Yield a draft in which srun starts the launcher once on each node."""
    if (place := srun(draft, launch)) is None:
        return
    if launch.step and "srun" not in launch.command.words:
        inside = " ".join(launch.command.words)
        if re.search(r"SLURM_(N?TASKS|NPROCS)", inside):
            return  # in the task, they would be those of the new step
    added = _once_per_node(draft.script)
    names = {"ntasks": r"(?:--ntasks|-n)", "ntasks-per-node": r"(?:--ntasks-per-node|--tasks-per-node)"}
    names |= {"cpus-per-task": r"(?:--cpus-per-task|-c)"} if "--cpus-per-task" in added else {}
    line, match = place
    text = draft.line(line)
    draft = draft.put(line, text[: match.end()] + " " + added + text[match.end() :])
    for name in names.keys() & (launch.step.options.keys() if launch.step else set()):
        for at in code_lines(draft, launch):
            start = match.end() + len(added) + 1 if at == line else 0
            text = draft.line(at)
            old = re.compile(rf"(?<!\S){names[name]}(?:=|\s+|(?=\d)){VALUE}").search(text, start)
            if at >= line and old:
                draft = without(draft, at, old)
                break
    yield draft


@fixes("gpus-per-task", "too-many-ranks")
def gpus_per_task(draft: Draft, finding: Finding) -> Iterator[Draft]:
    """The GPUs of a node's tasks become those of the node."""
    tasks = draft.script.job.tasks_per_node
    places = [each.line for each in draft.script.directives if each.name == "gpus-per-task"]
    if finding.rule.id == "gpus-per-task":
        places = [finding.line]
        launch = next((each for each in with_line(draft, finding.line) if each.step), None)
        tasks = launch.step.resources.tasks_per_node if launch and launch.step else tasks
    for line in places:
        match = re.search(r"--gpus-per-task(?:=|\s+)((?:[\w-]+:)?)(\d+)", draft.line(line))
        if match and tasks:
            yield draft.swap(line, match[0], f"--gpus-per-node={match[1]}{int(match[2]) * tasks}")


@fixes("standalone")
def standalone(draft: Draft, finding: Finding) -> Iterator[Draft]:
    for launch in with_line(draft, finding.line, "torchrun"):
        for line in code_lines(draft, launch):
            yield draft.put(line, re.sub(r"\s--standalone(?!\S)", "", draft.line(line), count=1))


@fixes("nnodes")
def nnodes(draft: Draft, finding: Finding) -> Iterator[Draft]:
    job = draft.script.job
    for launch in with_line(draft, finding.line, *_AGENTS):
        name = "num-machines" if launch.kind == "accelerate" else "nnodes"
        told = number(nodes_option(launch))
        if told is not None and told == job.nodes and launch.step and launch.step.resources.nodes != job.nodes:
            yield _one_task_per_node(draft)  # sbatch allocates no more nodes than tasks
            yield from _spread(draft, launch)
        elif launch.kind == "torchrun":
            yield from set_option(draft, launch, "$SLURM_NNODES", name)
        elif told:
            yield from _machines(draft, launch, told)


def _one_task_per_node(draft: Draft) -> Draft:
    for each in draft.script.directives:
        if each.name == "ntasks" and (draft.script.job.ntasks or 0) < (draft.script.job.nodes or 0):
            new = "" if draft.script.option("ntasks-per-node") else "--ntasks-per-node=1"
            old = re.search(r"(?:--ntasks[= ]|-n ?)\d+(?!\S)", draft.line(each.line))
            return draft.swap(each.line, old[0], new) if old else draft
    return draft


def _machines(draft: Draft, launch: Launch, told: int) -> Iterator[Draft]:
    """accelerate counts the ranks of all nodes, so their number follows."""
    ranks = number(launch.option("num-processes"))
    for line, match in option(draft, launch, "num-machines"):
        after = cut(draft, line, match, 2, "$SLURM_NNODES")
        if ranks and ranks % told == 0:
            for at, processes in option(after, launch, "num-processes"):
                yield cut(after, at, processes, 2, f"$((SLURM_NNODES * {ranks // told}))")
        elif ranks is None:
            yield after


@fixes("empty-variable")
def empty_variable(draft: Draft, finding: Finding) -> Iterator[Draft]:
    meant = {"nnodes": "$SLURM_NNODES", "num-machines": "$SLURM_NNODES", "nproc-per-node": "$SLURM_GPUS_ON_NODE"}
    name = re.search(r"--([\w-]+)", finding.message)
    for launch in with_line(draft, finding.line):
        if finding.message.startswith("WORLD_SIZE"):
            yield from set_world_size(draft, launch)
        elif name and name[1] in meant and "is not exported" not in finding.message:
            for line, match in option(draft, launch, name[1]):
                yield cut(draft, line, match, 2, meant[name[1]])
        elif name and finding.message.startswith("srun"):  # the job's own value then holds for the step
            for line, match in option(draft, launch, name[1]):
                yield without(draft, line, match)


@fixes("idle-gpus")
def idle_gpus(draft: Draft, finding: Finding) -> Iterator[Draft]:
    for launch in with_line(draft, finding.line, "torchrun"):
        if launch.option("nproc-per-node") is None:  # one rank is torchrun's default, and nobody's wish
            yield from behind_launcher(draft, launch, f" --nproc_per_node={draft.script.job.gpus_per_node}")
