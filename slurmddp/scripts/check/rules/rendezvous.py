"""Where the ranks meet, and under which rank of the node."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slurmddp.scripts.check.finding import Hit, rule
from slurmddp.scripts.check.launches import AGENTS, Launch
from slurmddp.scripts.check.rule import Severity
from slurmddp.scripts.check.rules.common import launch_rule
from slurmddp.scripts.check.script import Script
from slurmddp.scripts.check.values import likely, symbol_name, symbols
from slurmddp.scripts.sandbox.evaluate import number

_LOOPBACK = re.compile(r"(tcp://)?(localhost|127\.\d+\.\d+\.\d+|0\.0\.0\.0|\[?::1\]?)(:|$)")
#: Why ranks do not meet at an address, by its symbol.
_NOWHERE = {
    "own": "each node uses its own name as the address of the first one",
    "nodelist": "the address is Slurm's compressed list of nodes, such as node[1-2]",
    "login": "the address is the node that the job was submitted from (SLURM_SUBMIT_HOST)",
    "unexported": "{} is not exported, so the address is empty in the task",
    "nosuch": "Slurm has no variable {}, so the address is empty",
}


@launch_rule(*AGENTS, "python", where="meets")
def local_rendezvous(script: Script, launch: Launch) -> Iterator[Hit]:
    value = launch.address
    if "standalone" in launch.options:
        return
    if value and _LOOPBACK.match(likely(value) or ""):
        doubt = "maybe" in symbols(value)
        message = f"{launch.nodes or launch.expected_nodes} nodes meet at {(likely(value) or '').split(':')[0]}"
        yield Hit(message, severity="warning" if doubt else None)
    elif not value and launch.kind != "python" and not launch.has_config:
        yield Hit("no address is given, so each node waits at its own 127.0.0.1")


@launch_rule(*AGENTS, "python", where="meets")
def rendezvous_address(script: Script, launch: Launch) -> Iterator[Hit]:
    value = launch.address or ""
    kind = next((each for each in _NOWHERE if each in symbols(value)), None)
    if kind:
        yield Hit(_NOWHERE[kind].format(symbol_name(value, kind)))


@launch_rule(*AGENTS, "python", "deepspeed", where="several_nodes")
def hostname_ip(script: Script, launch: Launch) -> Iterator[Hit]:
    if "hostname-ip" in symbols(launch.address or ""):
        line = _written(script, launch, r"hostname\s+(-i|-I|--ip-address|--all-ip-addresses)")
        yield Hit("the address comes from hostname --ip-address", line)


@launch_rule(*AGENTS, "python", where="meets")
def fixed_host(script: Script, launch: Launch) -> Iterator[Hit]:
    pinned, value = script.option("nodelist") or "", launch.address or ""
    host = re.fullmatch(r"(?:tcp://)?([A-Za-z0-9][\w.-]*)(?::.*)?", likely(value) or "", re.DOTALL)
    if host and not _LOOPBACK.match(host[1]) and host[1] not in pinned:
        sure = not pinned and "maybe" not in symbols(value) and not re.search("your|master|head|host", host[1])
        line = _written(script, launch, re.escape(host[1]))
        yield Hit(f"{host[1]} need not be a node of this job", line, None if sure else "warning")


@launch_rule(*AGENTS, where="meets")
def node_rank(script: Script, launch: Launch) -> Iterator[Hit]:
    option, value = f"--{launch.names.rank.replace('-', '_')}", launch.option(launch.names.rank)
    if not launch.static or (launch.per_node or 1) > 1:
        return
    severity: Severity | None = "warning" if "config-file" in launch.options else None
    if value is None and not launch.opaque:
        yield Hit(f"no {option}: all nodes have rank 0", severity=severity)
    elif value is None or launch.fan_out or (launch.step and launch.command.background):
        return
    elif name := symbol_name(value, "early"):
        yield Hit(f"{option}: the batch shell expands ${name}, so all nodes have rank 0")
    elif symbol_name(value, "task") == "SLURM_LOCALID":
        yield Hit(f"{option}: $SLURM_LOCALID is 0 on every node")
    elif number(value) is not None:
        yield Hit(f"{option} is {value} on all nodes", severity=severity)


@launch_rule(*AGENTS, "python", where="meets")
def random_per_node(script: Script, launch: Launch) -> Iterator[Hit]:
    values = {"MASTER_PORT": launch.env("MASTER_PORT")}
    if launch.kind != "python":
        names = ("rdzv-id", "rdzv-endpoint", launch.names.port)
        values = {f"--{name}": launch.option(name) for name in names}
    for name, value in values.items():
        if "random" in symbols(value or ""):
            yield Hit(f"{name} has another value on each node")


@rule
def fixed_port(script: Script) -> Iterator[Hit]:
    for launch in [] if script.option("exclusive") in ("", "exclusive") else script.found.launches:
        port = _fixed_port(script, launch)
        if port and (not launch.unsure or port in script.text):  # what one job alone has may be of that job
            yield Hit(f"port {port} is the same in each job", _written(script, launch, re.escape(port)))


def _fixed_port(script: Script, launch: Launch) -> str | None:
    """Return the port of a launch, if it is the same in each job."""
    given = launch.option(launch.names.port, "rdzv-endpoint")
    ranks = launch.option("num-processes") or (script.job.gpus_per_node if script.job.nodes == 1 else None)
    alone = launch.kind == "accelerate" and str(ranks) == "1" and "multi-gpu" not in launch.options
    if launch.kind == "python":
        given = launch.env("MASTER_PORT")
    elif "standalone" in launch.options or alone or (given is None and launch.opaque):
        return None
    elif launch.kind == "torchrun" and (not launch.static or launch.option("rdzv-endpoint")):
        given = launch.option("rdzv-endpoint") or "localhost:29400"
        if ":" not in given and "?" not in symbols(given):
            given += ":29400"
    elif given is None and not launch.has_config and launch.kind != "deepspeed":
        given = "29500"
    if user := re.search("(?:^|:)\0user:(E?UID)\0$", given or ""):
        return f"${user[1]}"
    port = (likely(given) or "").rpartition(":")[2]
    return port if number(port) else None


def _written(script: Script, launch: Launch, pattern: str) -> int:
    """Return the line of a value: in the command itself, or in the last assignment above it; else the launcher's."""
    value = re.compile(rf"(?<!\w)({pattern})(?!\w)")
    for line, word in zip(launch.command.lines, launch.command.words, strict=True):
        if value.search(word) and "\n" not in word:
            return line
    found = ((at, text, value.search(text)) for at, text in enumerate(script.lines[: launch.line], 1))
    above = [at for at, text, match in found if match and {"=", "#"} & set(text[: match.start()]) == {"="}]
    return above[-1] if above else launch.line
