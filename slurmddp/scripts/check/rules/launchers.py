"""How often, and where, a launcher starts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from slurmddp.scripts.check.finding import Hit, rule
from slurmddp.scripts.check.launches import Launch
from slurmddp.scripts.check.rules.common import (
    NAMES,
    farmed,
    has_config,
    launches,
    nodes_option,
    several_nodes,
    spread,
    tasks_per_node,
)
from slurmddp.scripts.check.script import Script
from slurmddp.scripts.check.values import number, symbol_name, symbols

_SPREADS = re.compile(
    r"\b(srun|mpirun|mpiexec|ssh|pdsh|clush|ray|horovodrun|sbatch|colossalai|parallel|submitit|dask)\b"
)
_ASKS = {"help", "h", "version", "config-file"}
_AGENTS = ("torchrun", "accelerate")


@rule
def one_node_only(script: Script) -> Iterator[Hit]:
    nodes = script.job.nodes or 1
    if nodes < 2:
        return
    for launch in launches(script, *_AGENTS, "deepspeed"):
        hostfile = launch.opaque or {"hostfile", "deepspeed-hostfile"} & set(launch.options)
        ranked = symbol_name(launch.option("machine-rank") or "", "early")  # meant to start on each node
        if launch.step is None and (launch.kind == "torchrun" or not hostfile):
            doubt = "config-file" in launch.options and not ranked  # the file may name a hostfile of DeepSpeed
            message = f"{NAMES[launch.kind]} starts on the first of {nodes} nodes only"
            yield Hit(launch.line, message, "warning" if doubt else None)
    if _SPREADS.search(script.text) or any(each.kind != "python" for each in script.found.launches):
        return
    python = [each.line for each in launches(script, "python") if each.step is None and not each.branch]
    if python:
        yield Hit(python[-1], f"the program starts on the first of {nodes} nodes only")


@rule
def launcher_per_task(script: Script) -> Iterator[Hit]:
    for launch in launches(script, *_AGENTS, "deepspeed"):
        per_node = tasks_per_node(launch) or 1
        if launch.step is None or launch.step.fan_out or "no-ssh" in launch.options:
            continue
        tasks, told = launch.step.resources.tasks, nodes_option(launch) or "1"
        if tasks_per_node(launch) is None and tasks and (most := number(told.rpartition(":")[2])) and tasks > most:
            yield Hit(launch.line, f"srun starts {NAMES[launch.kind]} {tasks} times, for {most} node{'s' * (most > 1)}")
        if _ignored(script, launch):
            yield Hit(launch.line, f"srun starts {script.job.tasks} tasks: --ntasks of the job wins", "warning")
        if per_node < 2:
            continue
        ranks = ranks_per_launcher(launch)
        message = f"srun starts {NAMES[launch.kind]} {per_node} times per node"
        if ranks == 1:
            yield Hit(launch.line, f"{message}, each with one rank: all of them have local rank 0", "warning")
        else:
            yield Hit(launch.line, message + (f", each with {ranks} ranks" if ranks else ""))


def _ignored(script: Script, launch: Launch) -> bool:
    """Tell whether srun ignores its --ntasks-per-node, since the job's number of tasks is in its environment."""
    step, job = launch.step, script.job
    if step is None or "ntasks-per-node" not in step.options or "ntasks" in step.options or not job.tasks:
        return False
    told = step.resources.ntasks_per_node
    given = script.option("ntasks") is not None or script.option("ntasks-per-node") is not None
    return bool(given and told and step.resources.nodes and told * step.resources.nodes < job.tasks)


def ranks_per_launcher(launch: Launch) -> int | None:
    """Return how many ranks one launcher starts."""
    if launch.kind == "torchrun":
        return number(launch.option("nproc-per-node"))
    if launch.kind == "deepspeed":
        return number(launch.option("num-gpus"))
    total, machines = number(launch.option("num-processes")), number(launch.option("num-machines"))
    return total // (machines or 1) if total else None


@rule
def deepspeed_per_node(script: Script) -> Iterator[Hit]:
    for launch in launches(script, "deepspeed"):
        if launch.step and several_nodes(script, launch) and not launch.step.fan_out and "no-ssh" not in launch.options:
            if tasks_per_node(launch) == 1 and not launch.opaque:
                yield Hit(launch.line, f"srun starts deepspeed on each of {spread(script, launch)} nodes")
    for launch in launches(script, "accelerate"):
        remote = launch.option("deepspeed-multinode-launcher") or "pdsh"  # which is its default
        config = has_config(launch) or "deepspeed-hostfile" in launch.options
        if "use-deepspeed" in launch.options and remote == "pdsh" and not config and several_nodes(script, launch):
            if launch.step and not launch.step.fan_out:
                nodes = spread(script, launch)
                yield Hit(launch.line, f"on each of {nodes} nodes, accelerate starts deepspeed with pdsh")


@rule
def nnodes(script: Script) -> Iterator[Hit]:
    for launch in launches(script, *_AGENTS):
        agents = spread(script, launch)
        if (tasks_per_node(launch) or 1) > 1 or agents is None or (launch.step is None and (script.job.nodes or 1) > 1):
            continue
        if farmed(launch) or "-" in (script.option("nodes") or ""):
            continue
        told = nodes_option(launch)
        option = "--num_machines" if launch.kind == "accelerate" else "--nnodes"
        if told is None:
            if agents > 1 and not has_config(launch) and "standalone" not in launch.options:
                if launch.kind == "torchrun":
                    yield Hit(launch.line, f"no {option}: each of {agents} nodes trains alone")
                else:
                    yield Hit(launch.line, f"no {option} on {agents} nodes: only a config file can give it", "warning")
            continue
        match = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", told)
        if match and not int(match[1]) <= agents <= int(match[2] or match[1]):
            if int(match[2] or match[1]) > agents and not launch.step and script.option("nodes") is None:
                continue  # the nodes may come from the command line of sbatch
            yield Hit(launch.line, f"{option} is {told}, but the launcher starts on {agents} node{'s' * (agents > 1)}")


@rule
def standalone(script: Script) -> Iterator[Hit]:
    for launch in launches(script, "torchrun"):
        own_work = any("task" in symbols(word) for word in launch.program)  # each node trains something else
        if "standalone" in launch.options and several_nodes(script, launch) and not farmed(launch) and not own_work:
            yield Hit(launch.line, f"--standalone on {spread(script, launch)} nodes")


def _once_per_node(script: Script) -> Iterator[Launch]:
    """Yield the agents that start once per node, as far as that can be read; of others, launcher-per-task tells."""
    return (launch for launch in launches(script, *_AGENTS) if (tasks_per_node(launch) or 1) == 1)


def _visible_gpus(script: Script, launch: Launch) -> int | None:
    """Return how many GPUs the launcher sees."""
    told = launch.env("CUDA_VISIBLE_DEVICES")
    if told and re.fullmatch(r"\d+(,\d+)*", told):
        return told.count(",") + 1
    if launch.step is None:
        return script.job.gpus_per_node
    per_task = launch.step.resources.gpus_per_task
    return per_task or launch.step.resources.gpus_per_node


@rule
def too_many_ranks(script: Script) -> Iterator[Hit]:
    for launch in _once_per_node(script):
        ranks, gpus = ranks_per_launcher(launch), _visible_gpus(script, launch)
        if ranks and gpus and ranks > gpus and "cpu" not in launch.options:
            yield Hit(
                launch.line, f"{NAMES[launch.kind]} starts {ranks} ranks per node, and {gpus} GPU(s) are there for them"
            )


@rule
def idle_gpus(script: Script) -> Iterator[Hit]:
    for launch in _once_per_node(script):
        ranks, gpus = ranks_per_launcher(launch), _visible_gpus(script, launch)
        if launch.kind == "torchrun" and launch.option("nproc-per-node") is None and not launch.opaque:
            ranks = 1
        if (launch.step and launch.step.fan_out) or launch.background:
            continue  # several launches may share the node
        if ranks and gpus and ranks < gpus:
            yield Hit(launch.line, f"{NAMES[launch.kind]} starts {ranks} rank(s) per node for {gpus} GPUs")


@rule
def empty_variable(script: Script) -> Iterator[Hit]:
    for step in script.found.steps:
        for name, value in step.options.items():
            if variable := symbol_name(value, "unset"):
                yield Hit(step.line, f"srun --{name}: Slurm does not set {variable} in this job")
    for launch in launches(script, "python"):
        line = script.assigned("WORLD_SIZE")
        for variable in re.findall(r"SLURM_\w+", script.lines[line - 1] if launch.step else ""):
            if symbols(script.slurm.get(variable, "")) & {"unset", "compressed"}:
                yield Hit(line, f"WORLD_SIZE: Slurm does not set {variable} to a number in this job")
    for launch in launches(script, *_AGENTS):
        for name in ("nnodes", "nproc-per-node", "node-rank", "num-machines", "num-processes", "machine-rank"):
            value = launch.options.get(name, "")
            if variable := symbol_name(value, "unset"):
                yield Hit(launch.line, f"--{name}: Slurm does not set {variable} in this job")
            elif variable := symbol_name(value, "compressed"):
                yield Hit(launch.line, f"--{name}: {variable} is written as 4(x2), not as a number")
            elif variable := symbol_name(value, "unexported"):
                yield Hit(launch.line, f"--{name}: {variable} is not exported, so it is empty in the task")
            elif variable := symbol_name(value, "nosuch"):
                yield Hit(launch.line, f"--{name}: Slurm has no variable {variable}")
            elif name == "nproc-per-node" and re.fullmatch(r"(gpu:)?[a-z]\w*:\d+", value):
                yield Hit(launch.line, f"--{name} is {value!r}: the type of the GPU is part of the variable")


@rule
def ntasks_wins(script: Script) -> Iterator[Hit]:
    job = script.job
    if job.nodes and job.ntasks and job.ntasks_per_node and job.ntasks < job.nodes * job.ntasks_per_node:
        meant = job.ntasks_per_node == job.gpus_per_node and not symbols(script.option("ntasks") or "")
        python = any(each.step for each in launches(script, "python"))
        message = f"--ntasks={job.ntasks} wins: not {job.ntasks_per_node} tasks on each of {job.nodes} node(s)"
        yield Hit(script.line_of("ntasks"), message, "error" if meant and python else "warning")


@rule
def no_program(script: Script) -> Iterator[Hit]:
    for launch in script.found.idle:
        words = [word for word in launch.command.words if word.endswith((".py", ".sh", '"$@"', "$@"))]
        words += [
            word for word in launch.command.words[-1:] if word[:1] in '$"' or launch.unsure
        ]  # what it holds is open
        if launch.kind != "python" and launch.options and not words and not _ASKS & launch.options.keys():
            yield Hit(launch.line, f"{NAMES[launch.kind]} is given no program")


@rule
def srun_in_turn(script: Script) -> Iterator[Hit]:
    for launch in launches(script, *_AGENTS):
        step = launch.step
        if step is None or not step.fan_out or not step.command.loops or step.background:
            continue
        if nodes_option(launch) in (None, "1", "1:1"):
            continue
        if (script.job.nodes or 2) > 1 and not _parallel(script, launch):
            yield Hit(launch.line, "the loop starts one node after the other")


def _parallel(script: Script, launch: Launch) -> bool:
    """Tell whether an & stands between the launch and the end of its loop."""
    body = itertools.takewhile(lambda text: text.strip()[:4] != "done", script.lines[launch.line - 1 :])
    return any(re.search(r"(?<![&>])&(?![&>\d])", text) for text in body)
