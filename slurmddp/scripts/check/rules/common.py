"""Questions that several rules ask about a launch."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slurmddp.scripts.check.launches import Launch
from slurmddp.scripts.check.script import Script
from slurmddp.scripts.check.shell import Command
from slurmddp.scripts.check.values import number

#: What a template leaves to be filled in: the script is not submitted as it stands.
PLACEHOLDER = re.compile(r"<[A-Za-z_][^<>\n()]*>|\{\{|\{%|@\w+@|%\(\w+\)s")
#: What watches a launch from the background.
_WATCH = {"nvidia-smi", "rocm-smi", "dcgmi", "sleep", "tail", "watch", "vmstat", "echo"}
NAMES = {"torchrun": "torchrun", "accelerate": "accelerate launch", "deepspeed": "deepspeed", "python": "python"}


def launches(script: Script, *kinds: str) -> Iterator[Launch]:
    """Yield the launches of these kinds that the script surely makes, on nodes and in tasks that are known."""
    for each in script.found.launches:
        if kinds and each.kind not in kinds:
            continue
        if each.unsure or (each.step and each.step.resources.unread):
            continue
        if each.step is None and services(script):
            continue  # other nodes are for other programs
        if not each.branch:  # which may never start, or on one node only
            yield each


def services(script: Script) -> list[Command]:
    """Return the commands in the background that start something else than the last launch: servers, or other parts."""
    found = script.found.launches
    ours = [each for each in found if each.program[:1] == found[-1].program[:1]]
    lines = {each.lines[0] for one in ours for each in (one.command, one.step and one.step.command) if each}
    background = [
        each for each in script.commands if each.then == "&" and each.words[:1] and each.words[0] not in _WATCH
    ]
    return [each for each in background if each.line not in lines]


def spread(script: Script, launch: Launch) -> int | None:
    """Return on how many nodes the launcher starts; None, if it is not known."""
    if launch.step is None:
        return 1
    return script.job.nodes if launch.step.fan_out and launch.step.command.loops else launch.step.resources.nodes


def tasks_per_node(launch: Launch) -> int | None:
    """Return how often srun starts the launcher on each node."""
    if launch.step is None:
        return 1
    return 1 if launch.step.fan_out else launch.step.resources.tasks_per_node


def several_nodes(script: Script, launch: Launch) -> bool:
    """Tell whether the launcher surely starts on more than one node."""
    several = launch.step is not None and launch.step.fan_out and (number(nodes_option(launch)) or 1) > 1
    return several or (spread(script, launch) or 1) > 1


def nodes_option(launch: Launch) -> str | None:
    """Return how many nodes the launcher expects, by its options."""
    return launch.option({"accelerate": "num-machines", "deepspeed": "num-nodes"}.get(launch.kind, "nnodes"))


def has_config(launch: Launch) -> bool:
    """Tell whether options may also come from a place that cannot be read."""
    return bool(launch.opaque) or "config-file" in launch.options


def static(launch: Launch) -> bool:
    """Tell whether nodes are surely ordered by --node-rank: the default of torchrun and accelerate."""
    backend = launch.option("rdzv-backend") or ("" if launch.opaque else "static")
    return backend == "static" and "standalone" not in launch.options


def farmed(launch: Launch) -> bool:
    """Tell whether the launcher is one of several that train apart, each with a srun of its own."""
    fan_out = launch.step is not None and launch.step.fan_out
    return fan_out and ("standalone" in launch.options or nodes_option(launch) in (None, "1", "1:1"))
