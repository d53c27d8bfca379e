"""Variables and tools that the program finds."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slurmddp.scripts.check.finding import Hit, rule
from slurmddp.scripts.check.rules.common import launches, several_nodes
from slurmddp.scripts.check.script import Script
from slurmddp.scripts.check.values import SET_BY_SHELL, symbol_name

_NEEDED = {
    "nnodes", "nproc-per-node", "rdzv-endpoint", "master-addr", "master-port", "num-machines", "num-processes",
    "main-process-ip", "main-process-port",
}  # fmt: skip
_SLOW = {
    "NCCL_IB_DISABLE": "NCCL does not use InfiniBand or RoCE",
    "NCCL_P2P_DISABLE": "NCCL does not use NVLink and PCIe between GPUs",
    "NCCL_SHM_DISABLE": "NCCL does not use shared memory in a node",
    "NCCL_NET_DISABLE": "NCCL does not use the network plugin",
}


@rule
def nccl_disabled(script: Script) -> Iterator[Hit]:
    for name, effect in _SLOW.items():
        if script.found.value(name) == "1":
            yield Hit(script.assigned(name), f"{name}=1: {effect}")


@rule
def loopback_interface(script: Script) -> Iterator[Hit]:
    if any(several_nodes(script, launch) for launch in launches(script)):
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            if (script.found.value(name) or "").lstrip("=") == "lo":
                yield Hit(script.assigned(name), f"{name}=lo in a job of several nodes")


@rule
def conda_activate(script: Script) -> Iterator[Hit]:
    if re.search(r"\s-\S*l", script.lines[0]) or script.option("get-user-env") is not None:
        return
    for command in script.commands:
        words = command.words or [""]
        if words[0] in ("source", ".", "module", "ml", "eval") or "hook" in words:
            return
        if words[:2] in (["conda", "activate"], ["mamba", "activate"], ["micromamba", "activate"]):
            yield Hit(command.line, f"{words[0]} activate without its shell functions")
            return


@rule
def blank_in_assignment(script: Script) -> Iterator[Hit]:
    for command in script.commands:
        words = command.words or [""]
        if re.fullmatch(r"[A-Z][A-Z0-9_]+", words[0]) and words[1:] and words[1].startswith("="):
            yield Hit(command.line, f"{words[0]} is run as a command")
        elif words[0] == "export" and words[2:] and words[2].startswith("="):
            yield Hit(command.line, f"{words[1]} is not assigned")


@rule
def undefined_variable(script: Script) -> Iterator[Hit]:
    if script.sourced:
        return
    for launch in launches(script, "torchrun", "accelerate"):
        for name, value in launch.options.items():
            variable = symbol_name(value, "?")
            if name in _NEEDED and not re.match(r"SLURM|\Z", variable) and not SET_BY_SHELL.fullmatch(variable):
                yield Hit(launch.line, f"--{name} uses {variable}, which the script never sets")
