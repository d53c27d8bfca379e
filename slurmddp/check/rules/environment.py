"""Variables and tools that the program finds."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slurmddp.check.finding import Hit, rule
from slurmddp.check.rules.common import launches, several_nodes
from slurmddp.check.rules.sources import CONDA, NCCL_ENV
from slurmddp.check.script import Script
from slurmddp.check.values import symbol_name

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


@rule(
    "nccl-disabled",
    "warning",
    reason="Such a variable hides a fault of the network, and makes training slow on every cluster that has no "
    "such fault.",
    source=NCCL_ENV,
    fix="Remove the line, and look at what NCCL_DEBUG=INFO prints.",
)
def nccl_disabled(script: Script) -> Iterator[Hit]:
    for name, effect in _SLOW.items():
        if script.batch.values.get(name) == "1":
            yield Hit(script.assigned(name), f"{name}=1: {effect}")


@rule(
    "loopback-interface",
    "error",
    reason="The loopback interface reaches no other node.",
    source=NCCL_ENV,
    fix="Name the interface of the cluster network, or remove the variable.",
)
def loopback_interface(script: Script) -> Iterator[Hit]:
    if any(several_nodes(script, launch) for launch in launches(script)):
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            if str(script.batch.values.get(name, "")).lstrip("=") == "lo":
                yield Hit(script.assigned(name), f"{name}=lo in a job of several nodes")


@rule(
    "conda-activate",
    "warning",
    reason="A batch script is no interactive shell, so conda activate works only after conda's shell functions "
    "are loaded.",
    source=CONDA,
    fix='Write source "$(conda info --base)/etc/profile.d/conda.sh" before it.',
)
def conda_activate(script: Script) -> Iterator[Hit]:
    if re.search(r"\s-\S*l", script.lines[0]) or script.option("get-user-env") is not None:
        return
    for command, words, _ in script.found.seen:
        if words[0] in ("source", ".", "module", "ml", "eval") or "hook" in words:
            return
        if words[:2] in (["conda", "activate"], ["mamba", "activate"], ["micromamba", "activate"]):
            yield Hit(command.line, f"{words[0]} activate without its shell functions")
            return


@rule(
    "blank-in-assignment",
    "error",
    reason="With blanks around =, bash runs a command with the name of the variable, and the variable stays empty.",
    source="https://www.gnu.org/software/bash/manual/bash.html#Shell-Parameters",
    fix="Remove the blanks: NAME=value.",
)
def blank_in_assignment(script: Script) -> Iterator[Hit]:
    for command, words, _ in script.found.seen:
        if re.fullmatch(r"[A-Z][A-Z0-9_]+", command.words[0]) and words[1:] and words[1].startswith("="):
            yield Hit(command.line, f"{words[0]} is run as a command")
        elif words[0] == "export" and words[2:] and words[2].startswith("="):
            yield Hit(command.line, f"{words[1]} is not assigned")


@rule(
    "undefined-variable",
    "warning",
    reason="The script never sets this variable. It is empty, unless the shell that submits the job exports it.",
    source="https://slurm.schedmd.com/sbatch.html",
    fix="Set it in the script.",
)
def undefined_variable(script: Script) -> Iterator[Hit]:
    if script.found.sourced:
        return
    for launch in launches(script, "torchrun", "accelerate"):
        for name, value in launch.options.items():
            variable = symbol_name(value, "?")
            if name in _NEEDED and variable and not variable.startswith("SLURM"):
                yield Hit(launch.line, f"--{name} uses {variable}, which the script never sets")
