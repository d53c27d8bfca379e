"""Commands before the launch: modules and environments become setup lines, exports become variables."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import takewhile

from slurmddp.check.shell import Command, commands
from slurmddp.check.values import PER_TASK, expand, symbols
from slurmddp.launch.import_script.imported import Imported
from slurmddp.spec.job import RESERVED
from slurmddp.spec.sensitive import is_secret_name

_SETUP = {"module", "ml", "source", ".", "conda", "mamba", "micromamba", "spack", "ulimit", "umask", "pyenv"}
_PRINTS = {"echo", "printf", "date", "hostname", "pwd", "nvidia-smi", "rocm-smi", "env", "printenv", "squeue", "sinfo",
           "which", "lscpu", "free", "df", "ls", "cat", "sleep", "true", ":", "exit", "uname", "whoami", "wait", "set",
           "test", "[", "[[", "scontrol", "nproc", "type", "nvcc", "unset", "shift", "clear", "tee"}  # fmt: skip
#: Slurm, torchrun or slurmddp itself gives the ranks these.
_GIVEN = RESERVED | PER_TASK | {
    "OMP_NUM_THREADS", "SRUN_CPUS_PER_TASK", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES",
    "NODE_RANK", "NNODES", "NPROC_PER_NODE", "NUM_PROCESSES",
}  # fmt: skip
#: How the ranks of the script meet; the names are the script's own.
_MEETING = re.compile(r"(MASTER|HEAD|RDZV|RENDEZVOUS|MAIN_PROCESS)_(NODE_)?(ADDR|ADDRESS|HOST|IP|PORT|ID)")
_NETWORK = re.compile(r"(NCCL|GLOO|TORCH_NCCL|RCCL|FI|UCX)_")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ADDED = re.compile(r"([A-Za-z_]\w*)\+=")
_NAME = re.compile(r"\$\{?([A-Za-z_]\w*)")
_ONCE = "ran on the first node only; run it before you submit, or add it to setup, which each node runs"


def carry_commands(job: Imported, launched: Iterable[Command]) -> None:
    """Carry over all commands but those that launch."""
    launched = list(launched)
    skip = {(tuple(each.words), tuple(each.lines)) for each in launched}
    job.used = _names(job, " ".join(word for each in launched for word in each.words))
    own: dict[str, tuple[str, int]] = {}  # variables of the shell that no program sees, until a setup line needs them
    inside = [each for each, _, scope in job.script.found.seen if scope.task and each.line]
    for command in [*commands(job.script.text), *inside]:
        if (tuple(command.words), tuple(command.lines)) in skip or not command.words:
            for word in takewhile(_ASSIGNMENT.fullmatch, command.words):  # A=1 torchrun ...
                _assign(job, command, word, own, exported=True)
            continue
        words = command.words
        if (added := _ADDED.match(words[0])) and added[1] in job.used:
            continue  # the launch has its value
        exported = words[0] in ("export", "declare", "typeset") and len(words) > 1
        if exported or all(_ASSIGNMENT.fullmatch(word) for word in words):
            for word in words[exported:]:
                _assign(job, command, word, own, exported=exported)
        else:
            _command(job, command, own)


def _names(job: Imported, text: str) -> set[str]:
    """Return the variables that a text uses, and those in their values."""
    names: set[str] = set()
    values = {
        match[1]: match[2]
        for each in commands(job.script.text)
        for match in map(_ASSIGNMENT.fullmatch, each.words)
        if match
    }
    found = set(_NAME.findall(text))
    while found - names:
        names |= found
        found = {name for each in names for name in _NAME.findall(values.get(each, ""))}
    return names


def _command(job: Imported, command: Command, own: dict[str, tuple[str, int]]) -> None:
    words, text = command.words, " ".join(command.words)
    certain = not (command.branch or command.loops or command.function) and command.then not in ("|", "|&")
    if words[0] in _PRINTS or words[0] in ("trap", "function"):
        if words[0] == "trap":
            job.leave(command.line, text, "job.sh stops, saves and requeues the job itself")
        else:
            job.prints.append(command.line)
    elif words[0] == "cd" and certain and len(words) == 2:
        folder = job.path(expand(words[1], job.script.batch))
        if folder is None:
            job.leave(
                command.line, text, "known only when the job runs; paths start at the folder that you submit from"
            )
        else:
            job.folder = "" if folder == "." else job.inside(folder)
    elif words[:2] == ["conda", "init"]:
        job.leave(command.line, text, "changes your ~/.bashrc; no job needs it")
    elif (words[0] in _SETUP or (words[0] == "eval" and "hook" in text)) and certain and "\n" not in text:
        add_setup(job, text, own)
    else:
        job.leave(command.line, text.replace("\n", " "), _ONCE if certain else "in a branch, loop, function or pipe")


def add_setup(job: Imported, text: str, own: dict[str, tuple[str, int]]) -> None:
    """Add a setup line, behind those that set the variables in it. Relative files start where you submit."""
    for name in _NAME.findall(text):
        if name in own:
            value, _ = own.pop(name)
            add_setup(job, f"{name}={value}", own)
    match = re.fullmatch(r"(source|\.) ([\w.-].*)", text)
    if match and re.search(r"[/.]", match[2].split()[0]):
        path = job.inside(match[2].removeprefix("./"))
        start = "" if path.startswith(("/", "$", "~")) else "$SLURM_SUBMIT_DIR/"
        text = f"{match[1]} {start}{path}"
    job.add("setup", text)


def _assign(job: Imported, command: Command, word: str, own: dict[str, tuple[str, int]], *, exported: bool) -> None:
    match = _ASSIGNMENT.fullmatch(word)
    if match is None:  # export NAME
        if word in own:
            raw, line = own.pop(word)
            _export(job, line, word, raw, own)
        return
    name, raw = match.groups()
    if command.branch or command.loops or command.function:
        if exported and name not in _GIVEN:
            shown = "..." if is_secret_name(name) else raw
            job.leave(command.line, f"{name}={shown}", "set in a branch, loop or function")
    elif exported:
        _export(job, command.line, name, raw, own)
    else:
        own[name] = (raw, command.line)


def _export(job: Imported, line: int, name: str, raw: str, own: dict[str, tuple[str, int]]) -> None:
    value = expand(raw, job.script.batch)
    given = name in _GIVEN or name.startswith(("SLURM_", "SLURMDDP_", "PET_", "TORCHELASTIC_"))
    if given or _MEETING.fullmatch(name):
        job.leave(line, f"{name}={raw}", "slurmddp sets it")
    elif is_secret_name(name) and not value.startswith("\0"):
        job.add("environment_from", name)
        job.leave(line, f"{name}=...", f"a secret: revoke it, and export {name} in your shell before you submit")
    elif _NETWORK.match(name):
        _network(job, line, name, value)
    elif "\0" not in value and "$" not in raw:
        job.keys[("environment", name)] = value
    elif name in job.used:
        own[name] = (raw, line)  # the launch has its value
    elif "\n" in raw or symbols(value) & {"unexported", "nosuch"}:
        job.leave(line, f"{name}={raw}", "its value is known only in the script")
    else:
        add_setup(job, f"export {name}={raw}", own)


def _network(job: Imported, line: int, name: str, value: str) -> None:
    """The profile knows the network of its site; other values than its own need a reason."""
    network = job.site.get("network") or {}
    by_site = {**(job.site.get("environment") or {}), **(network.get("variables") or {})}
    if name in by_site:
        job.leave(line, f"{name}={value}", f"the site's profile sets {name}: {by_site[name]}")
    elif name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if network.get("interface"):
            job.leave(line, f"{name}={value}", f"the site's profile sets network.interface: {network['interface']}")
        elif "\0" not in value:
            job.set("network.interface", value)
    elif name == "NCCL_DEBUG":
        job.leave(line, f"{name}={value}", "--debug, or network.debug: true")
    elif "\0" in value:
        job.leave(line, f"{name}={value}", "its value is known only when the job runs")
    else:
        job.keys[("network", "variables", name)] = value
