"""Variables that slow NCCL down or switch the fast network off, wherever they come from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from slurmddp.launch.job_check.rule import Hit, Subject, rule

_NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_TORCH = "https://docs.pytorch.org/docs/stable/torch_cuda_environment_variables.html"
_OFF = re.compile(r"(?:1|y|yes|t|true|on)", re.IGNORECASE)


class _Setting(NamedTuple):
    """A variable of the ranks, its value, and where it is set."""

    name: str
    value: str
    where: str


def _settings(subject: Subject) -> Iterator[_Setting]:
    """Yield what the job, its setup lines and the submitting shell set; not what the site's profile sets."""
    resolved, job = subject.prepared.resolved, subject.prepared.resolved.job
    groups = (("environment", job.environment), ("network.variables", job.network.variables))
    known = {name for _, variables in groups for name in variables}
    known |= {each.name for group in subject.prepared.plan.environment for each in group.variables}
    for key, variables in groups:
        for name, value in variables.items():
            origin = resolved.layered.origins.get((*key.split("."), name))
            if origin is None or not origin.layer.startswith("site "):
                yield _Setting(name, value, subject.where(f"{key}.{name}"))
    for index, line in enumerate(job.setup):
        origin = resolved.layered.origins.get(("setup", str(index)))
        if origin is None or not origin.layer.startswith("site "):
            for name, value in re.findall(r"\bexport\s+([A-Z][A-Z0-9_]*)=[\"']?([^\s;\"']*)", line):
                known.add(name)
                yield _Setting(name, value, subject.where(f"setup.{index}"))
    if subject.prepared.plan.site.queues:  # sbatch hands the shell's environment to the job
        for name, value in subject.environment.items():
            if name not in known:
                yield _Setting(name, value, f"${name} in this shell")


def _many(subject: Subject) -> bool:
    return subject.prepared.plan.nodes.max > 1


@rule(
    "slow-network",
    "warning",
    reason="Without InfiniBand, peer-to-peer or shared memory, NCCL uses TCP or copies through the host: many times "
    "slower, and without a message.",
    source=_NCCL,
    fix="remove the variable: it is meant for debugging. If this network really needs it, set it in the site's profile",
)
def slow_network(subject: Subject) -> Iterator[Hit]:
    plan = subject.prepared.plan
    if not plan.layout.gpus_per_node:
        return
    for name, value, where in _settings(subject):
        off = name in ("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE") and _OFF.fullmatch(value)
        socket = name == "NCCL_NET" and value.lower() == "socket"
        local = name in ("NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL") and value.upper() in ("LOC", "0")
        between = name in ("NCCL_IB_DISABLE", "NCCL_NET", "NCCL_NET_GDR_LEVEL")
        if (off or socket or local) and (_many(subject) or not between):
            yield Hit(where, f"{name}={value} switches a fast path of NCCL off")


@rule(
    "wrong-interface",
    "error",
    reason="Ranks of other nodes cannot reach the loopback interface, nor a bridge of this node's containers.",
    source=_NCCL,
    fix="set it to the interface of the cluster's network, or remove it: each node then finds its own",
)
def wrong_interface(subject: Subject) -> Iterator[Hit]:
    if not _many(subject):
        return
    job = subject.prepared.resolved.job
    named = [_Setting("network.interface", job.network.interface or "", subject.where("network.interface"))]
    named += [each for each in _settings(subject) if each.name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")]
    for name, value, where in named:
        interfaces = [each for each in value.split(",") if re.fullmatch(r"=?(lo|docker\d*|virbr\d*|br-.*)", each)]
        if interfaces and not value.startswith("^"):
            yield Hit(where, f"{name} is {value}: {interfaces[0].lstrip('=')} does not reach other nodes")


@rule(
    "debug-variable",
    "warning",
    reason="These variables make training slow, or let a failed collective hang instead of ending the rank.",
    source=_TORCH,
    fix="remove it for production; `--debug` sets all that helps to find a fault",
)
def debug_variable(subject: Subject) -> Iterator[Hit]:
    slow = {
        "CUDA_LAUNCH_BLOCKING": ("1", "makes every kernel wait for the one before"),
        "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "checks every collective on all ranks"),
        "NCCL_DEBUG": ("TRACE", "logs every call of NCCL"),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", "lets ranks wait for ever for a rank that failed"),
        "NCCL_ASYNC_ERROR_HANDLING": ("0", "lets ranks wait for ever for a rank that failed"),
    }
    for name, value, where in _settings(subject):
        slow_value, effect = slow.get(name, (None, ""))
        if slow_value is not None and value.upper() == slow_value:
            yield Hit(where, f"{name}={value} {effect}")
