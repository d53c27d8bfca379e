"""Where the ranks meet, and under which rank of the node."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slurmddp.scripts.check.finding import Finding
from slurmddp.scripts.check.fix import Draft, fixes
from slurmddp.scripts.check.fixes.places import (
    HEAD,
    PORT,
    assignments,
    behind_launcher,
    code_lines,
    cut,
    head_variable,
    launcher,
    option,
    set_option,
    with_line,
    without,
)
from slurmddp.scripts.check.launches import Launch
from slurmddp.scripts.check.rules.common import static

_KINDS = ("torchrun", "accelerate", "python")
_OWN_NAME = re.compile(r"\$\(hostname[^()]*\)|`hostname[^`]*`|\$\{?(?:HOSTNAME|SLURMD_NODENAME)\b\}?")
_ADDRESSES = ("rdzv-endpoint", "master-addr", "main-process-ip", "dist-url", "dist_url", "init-method", "master_addr")


@fixes("local-rendezvous", "rendezvous-address", "fixed-host", "hostname-ip")
def address(draft: Draft, finding: Finding) -> Iterator[Draft]:
    for launch in with_line(draft, finding.line, *_KINDS):
        if "no address is given" in finding.message:
            yield from _added(draft, launch)
            continue
        if name := re.match(r"(\w+) is not exported", finding.message):
            yield from _exported(draft, launch, name[1])
        yield from _reassigned(draft, launch)
        for line, match in option(draft, launch, *_ADDRESSES):
            yield _replaced(draft, launch, line, match)
        if "own name" in finding.message:
            yield _not_own(draft, launch)


def _not_own(draft: Draft, launch: Launch) -> Draft:
    """Put the first node's name in the place of the node's own, in the shell of the task."""
    lines = len(draft.lines)
    draft, name = head_variable(draft, launch)
    for line in range(launch.step.line if launch.step else launch.line, launch.line + 1):
        at = line + len(draft.lines) - lines
        draft = draft.put(at, _OWN_NAME.sub(f"${name}", draft.line(at)))
    return draft


def _added(draft: Draft, launch: Launch) -> Iterator[Draft]:
    draft, name = head_variable(draft, launch)
    launch = next((each for each in with_line(draft, 0, *_KINDS) if _same(each, launch)), launch)
    if launch.kind == "accelerate":
        yield from behind_launcher(draft, launch, f" --main_process_ip=${name} --main_process_port={PORT}")
    elif "node-rank" in launch.options and static(launch):
        yield from behind_launcher(draft, launch, f" --master_addr=${name} --master_port={PORT}")
    else:
        backend = " --rdzv_backend=c10d" if static(launch) else ""
        number = "" if "rdzv-id" in launch.options else " --rdzv_id=$SLURM_JOB_ID"
        yield from behind_launcher(draft, launch, f"{backend}{number} --rdzv_endpoint=${name}:{PORT}")


def _same(one: Launch, other: Launch) -> bool:
    return one.kind == other.kind and one.command.words == other.command.words


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
            yield cut(draft, line, match, 2, f"${{{match[1]}:-{HEAD}}}" if default else HEAD)


def _replaced(draft: Draft, launch: Launch, line: int, match: re.Match[str]) -> Draft:
    """Put the first node's name in the place of the host of an address."""
    old = match[2].strip('"')
    protocol = "tcp://" if old.startswith("tcp://") else ""
    host = re.match(r"(?:\[[^]]*\]|\$\((?:[^()]|\([^()]*\))*\)|\$\{[^}]*\}|`[^`]*`|[^:])*", old.removeprefix("tcp://"))
    port = old.removeprefix("tcp://")[host.end() if host else 0 :]
    if port in ("", ":0") and "endpoint" in match[1].replace("_", "-"):
        port = f":{PORT}"
    before = draft
    draft, name = head_variable(draft, launch)
    return cut(draft, line + len(draft.lines) - len(before.lines), match, 2, f"{protocol}${name}{port}")


def _exported(draft: Draft, launch: Launch, name: str) -> Iterator[Draft]:
    for line, match in assignments(draft, launch, name):
        text = draft.line(line)
        if text.lstrip().startswith(f"{name}="):
            yield draft.put(line, f"{text[: match.start(1)]}export {text[match.start(1) :]}")


@fixes("not-exported")
def not_exported(draft: Draft, finding: Finding) -> Iterator[Draft]:
    for launch in with_line(draft, finding.line):
        yield from _exported(draft, launch, finding.message.partition(" ")[0])


@fixes("random-per-node")
def random_per_node(draft: Draft, finding: Finding) -> Iterator[Draft]:
    for launch in with_line(draft, finding.line, *_KINDS):
        if finding.message.startswith("--rdzv-id"):
            yield from set_option(draft, launch, "$SLURM_JOB_ID", "rdzv-id")
        for line, match in option(draft, launch, "master-port", "main-process-port"):
            yield cut(draft, line, match, 2, PORT)
        for line, match in option(draft, launch, "rdzv-endpoint"):
            host = match[2].partition(":")[0]
            yield draft.swap(line, match[0], f"{match[1]}{host}:{PORT}" + '"' * (host[:1] == '"'))


@fixes("fixed-port")
def fixed_port(draft: Draft, finding: Finding) -> Iterator[Draft]:
    port = re.escape(finding.message.split()[1])
    written = re.compile(rf"(?<=[\s=:'\"-]){port}(?![\w.])")
    code = [text for text in draft.lines if not text.lstrip().startswith("#")]
    if len(re.findall(rf"(?<!\w){port}(?!\w)", "\n".join(code))) > 1:
        return  # another program may use the port, too
    for launch in with_line(draft, finding.line):
        for line in dict.fromkeys([finding.line, *code_lines(draft, launch)]):
            text = draft.line(line)
            if match := written.search(text):
                start, end = match.span()
                if text[start - 1] == text[end : end + 1] and text[start - 1] in "'\"":
                    start, end = start - 1, end + 1
                yield draft.put(line, text[:start] + PORT + text[end:])
        # The port is a default.
        alone = draft.script.job.nodes == 1 and (launch.option("nnodes") or "1") == "1"
        if launch.kind == "torchrun" and alone and not _meets_elsewhere(launch):
            yield from behind_launcher(draft, launch, " --standalone")
        for line, match in option(draft, launch, "rdzv-endpoint"):
            if ":" not in match[2]:
                yield cut(draft, line, match, 2, f"{match[2].strip(chr(34))}:{PORT}")
        if launch.kind == "torchrun" and "master-addr" in launch.options:
            yield from set_option(draft, launch, PORT, "master-port")
        elif launch.kind == "accelerate":
            yield from set_option(draft, launch, PORT, "main-process-port")


def _meets_elsewhere(launch: Launch) -> bool:
    return bool({"rdzv-endpoint", "rdzv-backend", "master-addr", "master-port"} & set(launch.options))


@fixes("node-rank")
def node_rank(draft: Draft, finding: Finding) -> Iterator[Draft]:
    for launch in with_line(draft, finding.line, "torchrun", "accelerate"):
        name = "machine-rank" if launch.kind == "accelerate" else "node-rank"
        if "srun" not in launch.command.words:  # a shell of the task reads it
            yield from set_option(draft, launch, "$SLURM_NODEID", name)
            yield from set_option(draft, launch, "\\$SLURM_NODEID", name)
            continue
        for line, match in option(draft, launch, name):
            draft = without(draft, line, match)
            break
        option_name = name.replace("-", "_")
        for line, match in launcher(draft, launch):
            text = draft.line(line)
            wrapped = f'bash -c \'exec {match[0]} --{option_name}="$SLURM_NODEID" "$@"\' bash'
            yield draft.put(line, text[: match.start()] + wrapped + text[match.end() :])
