"""Ranks that srun starts itself, one task per GPU, and what reaches them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slurmddp.scripts.check.finding import Hit, rule
from slurmddp.scripts.check.launches import Launch
from slurmddp.scripts.check.rules.common import AGENTS, NAMES, launch_rule, launches, several_nodes
from slurmddp.scripts.check.script import Script
from slurmddp.scripts.check.values import number, symbol_name

_READS_SLURM = re.compile(r"lightning|\bpl_|idr_torch|litgpt", re.IGNORECASE)
_TRAINER = re.compile(r"(?<!\S)[-+]*trainer\.(devices|num_nodes)[= ](\d{1,4})(?!\S)")
_RANK_ARGUMENT = re.compile(
    r"--?(local[-_]?rank|rank|global[-_]?rank|node[-_]?rank|dist[-_]rank|gpu|device|world[-_]?rank)\b"
)
_ONE_WORD = re.compile(r"--?[A-Za-z][^\s=]*\s+\S[^\0]*")
_SLOW = {
    "NCCL_IB_DISABLE": "NCCL does not use InfiniBand or RoCE",
    "NCCL_P2P_DISABLE": "NCCL does not use NVLink and PCIe between GPUs",
    "NCCL_SHM_DISABLE": "NCCL does not use shared memory in a node",
    "NCCL_NET_DISABLE": "NCCL does not use the network plugin",
}


def _tasks(launch: Launch) -> int:
    return (launch.step.resources.tasks if launch.step and not launch.step.fan_out else 1) or 1


@launch_rule("python")
def rank_in_batch_shell(script: Script, launch: Launch) -> Iterator[Hit]:
    tasks = _tasks(launch)
    if tasks < 2:
        return
    one_per_node = launch.env("RANK") is None and launch.per_node == 1  # so all local ranks are 0
    for name in ("RANK",) if one_per_node else ("RANK", "LOCAL_RANK"):
        if variable := symbol_name(launch.env(name) or "", "early"):
            doubt = _READS_SLURM.search(script.text)
            message = f"{name}=${variable} is 0 in all {tasks} tasks"
            yield Hit(message, script.assigned(name), "warning" if doubt else None)
    for before, word in zip(["", *launch.program], launch.program, strict=False):
        variable = symbol_name(word, "early")
        if variable and _RANK_ARGUMENT.match(word if "=" in word else before):
            yield Hit(f"the batch shell expands ${variable}, so it is 0 in all {tasks} tasks")


@launch_rule("python")
def world_size(script: Script, launch: Launch) -> Iterator[Hit]:
    told, tasks, line = launch.env("WORLD_SIZE") or "", _tasks(launch), script.assigned("WORLD_SIZE")
    if re.fullmatch(r"\d+(\*\d+)+", told):
        yield Hit(f"WORLD_SIZE is the text {told}; write $(( ))", line)
    ranks = number(told)
    if ranks and tasks not in (1, ranks) and launch.env("MASTER_ADDR") and (ranks < tasks or launch.per_node != 1):
        sure = ranks < tasks and not _READS_SLURM.search(script.text)
        yield Hit(f"WORLD_SIZE is {ranks}, but srun starts {tasks} tasks", line, None if sure else "warning")


@launch_rule()
def gpus_per_task(script: Script, launch: Launch) -> Iterator[Hit]:
    step = launch.step
    if step is None or _tasks(launch) < 2 or (launch.per_node or 1) < 2:
        return
    bind = step.options.get("gpu-bind") or script.option("gpu-bind") or "verbose"
    if bind != "none" and not bind.startswith("verbose"):
        yield Hit(f"--gpu-bind={bind}", step.line if "gpu-bind" in step.options else script.line_of("gpu-bind"))
    elif bind != "none" and step.resources.gpus_per_task:
        where = step.line if "gpus-per-task" in step.options else script.line_of("gpus-per-task")
        yield Hit(f"--gpus-per-task with {launch.per_node} tasks per node", where)


@launch_rule("python", where=several_nodes)
def not_exported(script: Script, launch: Launch) -> Iterator[Hit]:
    for name in sorted({"MASTER_ADDR", "MASTER_PORT"} & launch.hidden) if launch.step else ():
        if not re.search(rf"\$\{{?{name}", script.text):
            yield Hit(f"{name} is set, but not exported", script.assigned(name))


@launch_rule("python")
def lightning_devices(script: Script, launch: Launch) -> Iterator[Hit]:
    given = launch.step.resources if launch.step else script.job
    expected = {
        "devices": ("--ntasks-per-node", given.ntasks_per_node), "num_nodes": ("--nodes", given.nodes),
    }  # fmt: skip
    for name, value in _TRAINER.findall(" ".join(launch.program)):
        option, number_there = expected[name]
        if number_there and int(value) != number_there:
            yield Hit(f"trainer.{name} is {value}, and {option} is {number_there}")


@launch_rule()
def quoted_list(script: Script, launch: Launch) -> Iterator[Hit]:
    for before, word in zip(launch.program, launch.program[1:], strict=False):
        if _ONE_WORD.fullmatch(word) and not before.startswith("-"):
            yield Hit(f"'{word[:60]}' is one argument: the quotes keep the blanks in it")


@rule
def option_twice(script: Script) -> Iterator[Hit]:
    given: dict[str, str] = {}
    for each in script.directives:
        if each.name and given.get(each.name, each.value) != each.value:
            yield Hit(f"--{each.name} is given twice: {given[each.name]} is ignored", each.line)
        given[each.name] = each.value
    for launch in launches(script, *AGENTS):
        before = launch.words[: len(launch.words) - len(launch.program)]
        names = [word.partition("=")[0].lstrip("-").replace("_", "-") for word in before if word.startswith("--")]
        for name in sorted({name for name in names if names.count(name) > 1} & launch.options.keys()):
            yield Hit(f"{NAMES[launch.kind]} is given --{name} twice: the first one is ignored", launch.line)


@rule
def nccl_disabled(script: Script) -> Iterator[Hit]:
    for name, effect in _SLOW.items():
        if script.found.value(name) == "1":
            yield Hit(f"{name}=1: {effect}", script.assigned(name))


@rule
def loopback_interface(script: Script) -> Iterator[Hit]:
    if any(map(several_nodes, launches(script))):
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            if (script.found.value(name) or "").lstrip("=") == "lo":
                yield Hit(f"{name}=lo in a job of several nodes", script.assigned(name))
