"""Variables that slow NCCL down or switch the fast network off, wherever they come from; hosts of alerts."""

import re
import shutil
from collections.abc import Iterator
from typing import NamedTuple

from slurmddp.launch.job_check.rule import Hit, Subject, rule
from slurmddp.scripts.check.rule import Severity

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


@rule
def no_store_tls(subject: Subject) -> Iterator[Hit]:
    if subject.prepared.plan.encrypts_store and shutil.which("openssl") is None:
        severity: Severity | None = "error" if subject.prepared.plan.job.network.store_tls else None
        yield Hit(
            subject.where("network.store_tls"), "this machine has no openssl to make a key pair with", None, severity
        )


@rule
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


@rule
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


@rule
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


@rule
def alert_address(subject: Subject) -> Iterator[Hit]:
    import socket
    from urllib.parse import urlsplit

    plan = subject.prepared.plan
    for index, target in enumerate(plan.alerts.targets if plan.alerts else ()):
        url = subject.environment.get(target.url_env or "")
        host = urlsplit(url).hostname if url else None
        if host is None or (plan.alerts and plan.alerts.leave == "proxy"):
            continue  # `submit` tells where the address is missing
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            message = f"the host of alert target {target.name} does not resolve on this machine: {error.strerror}"
            yield Hit(subject.where(f"alerts.{index}"), message)
