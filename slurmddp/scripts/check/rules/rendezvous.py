"""Where the ranks meet, and under which rank of the node."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slurmddp.scripts.check.finding import Hit, rule
from slurmddp.scripts.check.launches import Launch
from slurmddp.scripts.check.rule import Severity
from slurmddp.scripts.check.rules.common import (
    farmed,
    has_config,
    launches,
    nodes_option,
    several_nodes,
    spread,
    static,
    tasks_per_node,
)
from slurmddp.scripts.check.script import Script
from slurmddp.scripts.check.values import likely, number, symbol_name, symbols

_LOOPBACK = re.compile(r"(tcp://)?(localhost|127\.\d+\.\d+\.\d+|0\.0\.0\.0|\[?::1\]?)(:|$)")


def address(launch: Launch) -> str | None:
    """Return the address at which the ranks meet; None, if the launch gives none."""
    if launch.kind == "python":
        given = re.search(
            r"--?(?:dist|init|master)[-_]?(?:url|method|addr|address)[= ]['\"]?(?:tcp://)?([^ '\"]+)",
            " ".join(launch.program),
        )
        return given[1] if given else launch.env("MASTER_ADDR")
    if launch.kind == "deepspeed":
        return launch.option("master-addr")
    if launch.kind == "accelerate":
        return launch.option("main-process-ip", "rdzv-endpoint")
    endpoint = launch.option("rdzv-endpoint")
    return endpoint or (launch.option("master-addr") if static(launch) else None)


def _meets(script: Script, launch: Launch) -> bool:
    """Tell whether launchers of several nodes meet, as far as it can be read."""
    if farmed(launch):
        return False
    if launch.kind == "python":
        return several_nodes(script, launch)
    told = number(nodes_option(launch))
    return several_nodes(script, launch) and told != 1 and (told is not None or nodes_option(launch) is not None)


@rule
def local_rendezvous(script: Script) -> Iterator[Hit]:
    for launch in launches(script, "torchrun", "accelerate", "python"):
        if not _meets(script, launch) or "standalone" in launch.options:
            continue
        value = address(launch)
        if value and _LOOPBACK.match(likely(value) or ""):
            nodes, doubt = spread(script, launch) or nodes_option(launch), "maybe" in symbols(value)
            message = f"{nodes} nodes meet at {(likely(value) or '').split(':')[0]}"
            yield Hit(launch.line, message, "warning" if doubt else None)
        elif not value and launch.kind != "python" and not has_config(launch):
            yield Hit(launch.line, "no address is given, so each node waits at its own 127.0.0.1")


@rule
def rendezvous_address(script: Script) -> Iterator[Hit]:
    for launch in launches(script, "torchrun", "accelerate", "python"):
        value = address(launch) or ""
        if not _meets(script, launch):
            continue
        if "own" in symbols(value):
            yield Hit(launch.line, "each node uses its own name as the address of the first one")
        elif "nodelist" in symbols(value):
            yield Hit(launch.line, "the address is Slurm's compressed list of nodes, such as node[1-2]")
        elif "login" in symbols(value):
            yield Hit(launch.line, "the address is the node that the job was submitted from (SLURM_SUBMIT_HOST)")
        elif name := symbol_name(value, "unexported"):
            yield Hit(launch.line, f"{name} is not exported, so the address is empty in the task")
        elif name := symbol_name(value, "nosuch"):
            yield Hit(launch.line, f"Slurm has no variable {name}, so the address is empty")


@rule
def node_rank(script: Script) -> Iterator[Hit]:
    for launch in launches(script, "torchrun", "accelerate"):
        if not _meets(script, launch) or not static(launch) or (tasks_per_node(launch) or 1) > 1:
            continue
        option = "--machine_rank" if launch.kind == "accelerate" else "--node_rank"
        value = launch.option("machine-rank" if launch.kind == "accelerate" else "node-rank")
        fan_out = launch.step is not None and (launch.step.fan_out or launch.background)
        severity: Severity | None = "warning" if "config-file" in launch.options else None
        if value is None and not launch.opaque:
            yield Hit(launch.line, f"no {option}: all nodes have rank 0", severity)
        elif value is None or fan_out:
            continue
        elif name := symbol_name(value, "early"):
            yield Hit(launch.line, f"{option}: the batch shell expands ${name}, so all nodes have rank 0")
        elif symbol_name(value, "task") == "SLURM_LOCALID":
            yield Hit(launch.line, f"{option}: $SLURM_LOCALID is 0 on every node")
        elif number(value) is not None:
            yield Hit(launch.line, f"{option} is {value} on all nodes", severity)


@rule
def fixed_port(script: Script) -> Iterator[Hit]:
    if script.option("exclusive") in ("", "exclusive"):
        return
    for launch in script.found.launches:
        port, line = _port(script, launch)
        if port and (not launch.unsure or str(port) in script.text):  # what one job alone has may be of that job
            yield Hit(line, f"port {port} is the same in each job")


def _port(script: Script, launch: Launch) -> tuple[int | str | None, int]:
    """(fixed port of a launch, line)."""
    if launch.kind == "python":
        port = number(likely(launch.env("MASTER_PORT")))
        return port, _written(script, launch, str(port))
    alone = launch.kind == "accelerate" and launch.option("num-processes") == "1" and "multi-gpu" not in launch.options
    if "standalone" in launch.options or alone:
        return None, launch.line
    names = ("main-process-port", "master-port", "rdzv-endpoint")
    given = next((launch.option(name) for name in names if launch.option(name)), None)
    if given is None and launch.opaque:
        return None, launch.line
    if launch.kind == "torchrun" and (not static(launch) or launch.option("rdzv-endpoint")):
        given = launch.option("rdzv-endpoint") or "localhost:29400"
        if ":" not in given and "?" not in symbols(given):
            given += ":29400"
    if given is None and not has_config(launch) and launch.kind != "deepspeed":
        given = "29500"
    if user := re.search("(?:^|:)\0user:(E?UID)\0$", given or ""):
        return f"${user[1]}", launch.line
    port = number((likely(given) or "").rpartition(":")[2]) or None
    return port, _written(script, launch, str(port))


def _written(script: Script, launch: Launch, pattern: str) -> int:
    """Return the line of a value: in the command itself, or in the last assignment above it; else the launcher's."""
    value = re.compile(rf"(?<!\w)({pattern})(?!\w)")
    for line, word in zip(launch.command.lines, launch.command.words, strict=True):
        if value.search(word) and "\n" not in word:
            return line
    found = ((at, text, value.search(text)) for at, text in enumerate(script.lines[: launch.line], 1))
    above = [at for at, text, match in found if match and {"=", "#"} & set(text[: match.start()]) == {"="}]
    return above[-1] if above else launch.line


@rule
def hostname_ip(script: Script) -> Iterator[Hit]:
    for launch in launches(script):
        if several_nodes(script, launch) and "hostname-ip" in symbols(address(launch) or ""):
            line = _written(script, launch, r"hostname\s+(-i|-I|--ip-address|--all-ip-addresses)")
            yield Hit(line, "the address comes from hostname --ip-address")


@rule
def random_per_node(script: Script) -> Iterator[Hit]:
    for launch in launches(script, "torchrun", "accelerate", "python"):
        if not _meets(script, launch):
            continue
        names = ["rdzv-id", "rdzv-endpoint", "master-port", "main-process-port"] if launch.kind != "python" else []
        values = {f"--{name}": launch.option(name) for name in names} or {"MASTER_PORT": launch.env("MASTER_PORT")}
        for name, value in values.items():
            if value and "random" in symbols(value):
                yield Hit(launch.line, f"{name} has another value on each node")


@rule
def fixed_host(script: Script) -> Iterator[Hit]:
    pinned = script.option("nodelist") or ""
    for launch in launches(script, "torchrun", "accelerate", "python"):
        value = address(launch) or ""
        host = re.fullmatch(r"(?:tcp://)?([A-Za-z0-9][\w.-]*)(?::.*)?", likely(value) or "", re.DOTALL)
        if not host or _LOOPBACK.match(host[1]) or not _meets(script, launch):
            continue
        sure = not pinned and "maybe" not in symbols(value) and not re.search("your|master|head|host", host[1])
        if host[1] not in pinned:
            yield Hit(
                _written(script, launch, re.escape(host[1])),
                f"{host[1]} need not be a node of this job",
                None if sure else "warning",
            )
