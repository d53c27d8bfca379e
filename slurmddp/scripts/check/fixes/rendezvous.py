"""Where the ranks meet, and under which rank of the node."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slurmddp.scripts.check.finding import Finding
from slurmddp.scripts.check.fix import Draft
from slurmddp.scripts.check.fixes.places import (
    HEAD,
    PORT,
    Place,
    assignments,
    behind_launcher,
    code_lines,
    cut,
    head_variable,
    launch_fixes,
    launcher,
    option,
    replaced,
    set_option,
    without,
)
from slurmddp.scripts.check.launches import Launch
from slurmddp.scripts.check.rules.common import AGENTS, static

_KINDS = (*AGENTS, "python")
_MEETING = r"--(rdzv-\w+|master-\w+|main-process-\w+)|(MASTER_ADDR|MASTER_PORT|HEAD_NODE|FIRST_NODE)"
_OWN_NAME = re.compile(r"\$\(hostname[^()]*\)|`hostname[^`]*`|\$\{?(?:HOSTNAME|SLURMD_NODENAME)\b\}?")
_ADDRESSES = ("rdzv-endpoint", "master-addr", "main-process-ip", "dist-url", "init-method")
_HOST = re.compile(r"(tcp://)?(?:\[[^]]*\]|\$\((?:[^()]|\([^()]*\))*\)|\$\{[^}]*\}|`[^`]*`|[^:])*")


@launch_fixes(
    "local-rendezvous", "rendezvous-address", "fixed-host", "hostname-ip", kinds=_KINDS, changes=_MEETING
)  # fmt: skip
def address(draft: Draft, finding: Finding, launch: Launch) -> Iterator[Draft]:
    """Ranks meet at the first node."""
    name, assigned = head_variable(draft, launch)
    if "no address is given" in finding.message:
        for after in _added(draft, launch, name):
            yield assigned(after)
        return
    if unexported := re.match(r"(\w+) is not exported", finding.message):
        yield from _exported(draft, launch, unexported[1])
    yield from _reassigned(draft, launch)
    for place in option(draft, launch, *_ADDRESSES):
        yield assigned(_at_host(draft, place, name))
    if "own name" in finding.message:  # in the shell of the task
        for line in range(launch.step.line if launch.step else launch.line, launch.line + 1):
            draft = draft.put(line, _OWN_NAME.sub(f"${name}", draft.line(line)))
        yield assigned(draft)


def _added(draft: Draft, launch: Launch, name: str) -> Iterator[Draft]:
    if launch.kind == "accelerate":
        yield from behind_launcher(draft, launch, f" --main_process_ip=${name} --main_process_port={PORT}")
    elif "node-rank" in launch.options and static(launch):
        yield from behind_launcher(draft, launch, f" --master_addr=${name} --master_port={PORT}")
    else:
        backend = " --rdzv_backend=c10d" if static(launch) else ""
        number = "" if "rdzv-id" in launch.options else " --rdzv_id=$SLURM_JOB_ID"
        yield from behind_launcher(draft, launch, f"{backend}{number} --rdzv_endpoint=${name}:{PORT}")


def _reassigned(draft: Draft, launch: Launch) -> Iterator[Draft]:
    """Yield drafts in which a variable of the address holds the first node's name."""
    names = {"MASTER_ADDR"}
    for _, match in option(draft, launch, *_ADDRESSES):
        names |= set(re.findall(r"\$\{?(\w+)", match[2].partition(":$")[0]))
    seen = list(assignments(draft, launch))
    for _ in range(3):
        names |= {name for _, each in seen if each[1] in names for name in re.findall(r"\$\{?([A-Za-z_]\w*)", each[2])}
    for line, match in seen:
        if match[1] in names and line < (launch.step.line if launch.step else launch.line):
            default = re.fullmatch(r"\"?\$\{\w+:?-(.*)\}\"?", match[2])
            yield cut(draft, (line, match), f"${{{match[1]}:-{HEAD}}}" if default else HEAD)


def _at_host(draft: Draft, place: Place, name: str) -> Draft:
    """Put the first node's name in the place of the host of an address."""
    old, host = place[1][2].strip('"'), _HOST.match(place[1][2].strip('"'))
    port = old[host.end() if host else 0 :]
    if port in ("", ":0") and "endpoint" in place[1][1]:
        port = f":{PORT}"
    return cut(draft, place, f"{'tcp://' if old.startswith('tcp://') else ''}${name}{port}")


def _exported(draft: Draft, launch: Launch, name: str) -> Iterator[Draft]:
    for line, match in assignments(draft, launch, name):
        if match.string.lstrip().startswith(f"{name}="):
            yield draft.splice(line, match.start(), match.start(), "export ")


@launch_fixes("not-exported")
def not_exported(draft: Draft, finding: Finding, launch: Launch) -> Iterator[Draft]:
    """Tasks get a variable that is exported."""
    yield from _exported(draft, launch, finding.message.partition(" ")[0])


@launch_fixes("random-per-node", kinds=_KINDS, changes=_MEETING)
def random_per_node(draft: Draft, finding: Finding, launch: Launch) -> Iterator[Draft]:
    """All nodes get what follows from the job's number."""
    if finding.message.startswith("--rdzv-id"):
        yield from set_option(draft, launch, "$SLURM_JOB_ID", "rdzv-id")
    yield from replaced(draft, launch, PORT, "master-port", "main-process-port")
    for place in option(draft, launch, "rdzv-endpoint"):
        yield cut(draft, place, f"{place[1][2].strip(chr(34)).partition(':')[0]}:{PORT}")


@launch_fixes("fixed-port", changes=r"--(standalone|master-port|main-process-port)")
def fixed_port(draft: Draft, finding: Finding, launch: Launch) -> Iterator[Draft]:
    """The port follows from the job's number, unless another program may use it, too."""
    port = re.escape(finding.message.split()[1])
    code = [text for text in draft.lines if not text.lstrip().startswith("#")]
    if len(re.findall(rf"(?<!\w){port}(?!\w)", "\n".join(code))) > 1:
        return
    for line in dict.fromkeys([finding.line, *code_lines(draft, launch)]):
        if match := re.search(rf"(?<=[\s=:'\"-])(?:(?<=(['\"])){port}\1|{port}(?![\w.]))", draft.line(line)):
            yield draft.splice(line, match.start() - bool(match[1]), match.end(), PORT)
    # The port is a default.
    meets = {"rdzv-endpoint", "rdzv-backend", "master-addr", "master-port"} & launch.options.keys()
    alone = draft.script.job.nodes == 1 and (launch.option("nnodes") or "1") == "1"
    if launch.kind == "torchrun" and alone and not meets:
        yield from behind_launcher(draft, launch, " --standalone")
    for place in option(draft, launch, "rdzv-endpoint"):
        if ":" not in place[1][2]:
            yield cut(draft, place, f"{place[1][2].strip(chr(34))}:{PORT}")
    if launch.kind == "torchrun" and "master-addr" in launch.options:
        yield from set_option(draft, launch, PORT, "master-port")
    elif launch.kind == "accelerate":
        yield from set_option(draft, launch, PORT, "main-process-port")


@launch_fixes("node-rank", kinds=AGENTS, changes="--(node|machine)-rank")
def node_rank(draft: Draft, finding: Finding, launch: Launch) -> Iterator[Draft]:
    """A shell of the task expands the node's number: the one that is there, or one of its own."""
    name = "machine-rank" if launch.kind == "accelerate" else "node-rank"
    if "srun" not in launch.command.words:
        yield from set_option(draft, launch, "$SLURM_NODEID", name)
        yield from set_option(draft, launch, "\\$SLURM_NODEID", name)
        return
    for place in [*option(draft, launch, name)][:1]:
        draft = without(draft, place)
    for line, match in launcher(draft, launch):
        wrapped = f'bash -c \'exec {match[0]} --{name.replace("-", "_")}="$SLURM_NODEID" "$@"\' bash'
        yield draft.splice(line, *match.span(), wrapped)
