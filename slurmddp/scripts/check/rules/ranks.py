"""Ranks that srun starts itself: one task per GPU, without a launcher."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slurmddp.scripts.check.finding import Hit, rule
from slurmddp.scripts.check.launches import Launch
from slurmddp.scripts.check.rule import Severity
from slurmddp.scripts.check.rules.common import launches, several_nodes, tasks_per_node
from slurmddp.scripts.check.script import Script
from slurmddp.scripts.check.values import number, symbol_name

_READS_SLURM = re.compile(r"lightning|\bpl_|idr_torch|litgpt", re.IGNORECASE)
_USES_RANKS = re.compile(r"torch|MASTER_ADDR|lightning|ddp|nccl|train", re.IGNORECASE)
_TRAINER = re.compile(r"(?<!\S)[-+]*trainer\.(devices|num_nodes)[= ](\d{1,4})(?!\S)")
_RANK_ARGUMENT = re.compile(
    r"--?(local[-_]?rank|rank|global[-_]?rank|node[-_]?rank|dist[-_]rank|gpu|device|world[-_]?rank)\b"
)


def _tasks(launch: Launch) -> int:
    return (launch.step.resources.tasks if launch.step and not launch.step.fan_out else 1) or 1


@rule
def rank_in_batch_shell(script: Script) -> Iterator[Hit]:
    for launch in launches(script, "python"):
        if _tasks(launch) < 2:
            continue
        for name in ("RANK", "LOCAL_RANK"):
            variable = symbol_name(launch.env(name) or "", "early")
            if variable and not (
                name == "LOCAL_RANK" and launch.env("RANK") is None and (launch.step and tasks_per_node(launch) == 1)
            ):
                severity: Severity | None = "warning" if _READS_SLURM.search(script.text) else None
                yield Hit(script.assigned(name), f"{name}=${variable} is 0 in all {_tasks(launch)} tasks", severity)
        previous = ""
        for word in launch.program:
            variable = symbol_name(word, "early")
            if variable and _RANK_ARGUMENT.match(word if "=" in word else previous):
                yield Hit(launch.line, f"the batch shell expands ${variable}, so it is 0 in all {_tasks(launch)} tasks")
            previous = word


@rule
def world_size(script: Script) -> Iterator[Hit]:
    for launch in launches(script, "python"):
        told, tasks = number(launch.env("WORLD_SIZE")), launch.step and _tasks(launch)
        if re.fullmatch(r"\d+(\*\d+)+", launch.env("WORLD_SIZE") or ""):
            yield Hit(script.assigned("WORLD_SIZE"), f"WORLD_SIZE is the text {launch.env('WORLD_SIZE')}; write $(( ))")
        if not told or not tasks or tasks < 2 or told == tasks or not launch.env("MASTER_ADDR"):
            continue
        if told < tasks:
            severity: Severity | None = "warning" if _READS_SLURM.search(script.text) else None
            yield Hit(script.assigned("WORLD_SIZE"), f"WORLD_SIZE is {told}, but srun starts {tasks} tasks", severity)
        elif (tasks_per_node(launch) or 1) > 1:
            yield Hit(script.assigned("WORLD_SIZE"), f"WORLD_SIZE is {told}, but srun starts {tasks} tasks", "warning")


@rule
def tasks_gpus(script: Script) -> Iterator[Hit]:
    gpus = script.job.gpus_per_node
    for launch in launches(script, "python"):
        per_node = tasks_per_node(launch) if launch.step and not launch.step.fan_out else None
        if not gpus or not per_node:
            continue
        if per_node > gpus:  # tasks on CPUs may be meant
            severity: Severity | None = None if per_node <= 8 or _USES_RANKS.search(script.text) else "warning"
            yield Hit(launch.line, f"srun starts {per_node} tasks per node for {gpus} GPU(s)", severity)
        elif 1 < per_node < gpus:
            yield Hit(launch.line, f"srun starts {per_node} tasks per node for {gpus} GPUs", "warning")


@rule
def gpus_per_task(script: Script) -> Iterator[Hit]:
    for launch in launches(script):
        step = launch.step
        if step is None or _tasks(launch) < 2 or (tasks_per_node(launch) or 1) < 2:
            continue
        bind = step.options.get("gpu-bind") or script.option("gpu-bind")
        if bind == "none":
            continue
        if bind and not bind.startswith("verbose"):
            yield Hit(step.line if "gpu-bind" in step.options else script.line_of("gpu-bind"), f"--gpu-bind={bind}")
        elif step.resources.gpus_per_task:
            where = step.line if "gpus-per-task" in step.options else script.line_of("gpus-per-task")
            yield Hit(where, f"--gpus-per-task with {tasks_per_node(launch)} tasks per node")


@rule
def not_exported(script: Script) -> Iterator[Hit]:
    for launch in launches(script, "python"):
        if launch.step is None or not several_nodes(script, launch):
            continue
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name in launch.hidden and not _used(script, name):
                yield Hit(script.assigned(name), f"{name} is set, but not exported")


def _used(script: Script, name: str) -> bool:
    return any(f"${name}" in word or f"${{{name}" in word for command in script.commands for word in command.words)


@rule
def lightning_devices(script: Script) -> Iterator[Hit]:
    for launch in launches(script, "python"):
        asked = launch.step.resources if launch.step else script.job
        expected = {"devices": asked.ntasks_per_node, "num_nodes": asked.nodes}
        option = {"devices": "--ntasks-per-node", "num_nodes": "--nodes"}
        for name, value in _TRAINER.findall(" ".join(launch.program)):
            if expected[name] and int(value) != expected[name]:
                yield Hit(launch.line, f"trainer.{name} is {value}, and {option[name]} is {expected[name]}")
