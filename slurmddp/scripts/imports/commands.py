"""Commands before the launch: modules and environments become setup lines, exports become variables."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from itertools import takewhile

from slurmddp.container import SIF_PROGRAMS
from slurmddp.job.job import RESERVED
from slurmddp.job.sensitive import is_secret_name
from slurmddp.scripts.check.launches import PYTHON, Launch, base
from slurmddp.scripts.check.shell import Command
from slurmddp.scripts.check.values import PER_TASK, UNKNOWN, symbols
from slurmddp.scripts.imports.imported import Imported

_SETUP = {"module", "ml", "source", ".", "conda", "mamba", "micromamba", "spack", "ulimit", "umask", "pyenv"}
_PRINTS = {
    "echo", "printf", "date", "hostname", "pwd", "nvidia-smi", "rocm-smi", "env", "printenv", "squeue", "sinfo",
    "which", "lscpu", "free", "df", "ls", "cat", "sleep", "true", ":", "exit", "uname", "whoami", "wait", "set",
    "test", "[", "scontrol", "nproc", "type", "nvcc", "shift", "clear", "break", "continue", "return", "false",
    "rocminfo", "nvidia-debugdump", "trap", "function", "let", "command", "read", "mapfile", "readarray",
}  # fmt: skip
#: Slurm, torchrun or slurmddp itself gives the ranks these.
_GIVEN = RESERVED | PER_TASK | {
    "SRUN_CPUS_PER_TASK",
}  # fmt: skip
#: How the ranks of the script meet; the names are the script's own.
_MEETING = re.compile(
    r"(MASTER|HEAD|RDZV|RENDEZVOUS|MAIN_PROCESS)_(NODE_)?(ADDR|ADDRESS|HOST|IP|PORT|ID)|NODE_RANK|NNODES|NUM_PROCESSES|"
    r"NPROC_PER_NODE"
)
_NETWORK = re.compile(r"(NCCL|GLOO|TORCH_NCCL|RCCL|FI|UCX)_")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ADDED = re.compile(r"([A-Za-z_]\w*)\+=")
_NAME = re.compile(r"\$\{?([A-Za-z_]\w*)")
#: What only the batch shell can compute, or what other programs than the ranks read.
_COMPUTED = re.compile(r"\$\((?!\()|`|\$\{?S?RANDOM")
_OTHERS = re.compile(r"(CUDA|ROCR|HIP)_VISIBLE_DEVICES|SLURM_\w+|(APPTAINER|SINGULARITY)(ENV)?_\w+")
#: What node.sh sets behind the setup lines, and Slurm's variables that differ in slurmddp's job.
_SET_LATER = re.compile(
    r"OMP_NUM_THREADS|HF_HOME|(TRITON|TORCHINDUCTOR)_CACHE_DIR|MIOPEN_\w+|TORCH_\w+|PYTHON(UNBUFFERED|NOUSERSITE)"
)
_STEP = re.compile(r"\$\{?SLURM_(?!JOB_?ID|SUBMIT_DIR|NNODES|JOB_NUM_NODES|JOB_NODELIST|JOB_PARTITION|JOB_ACCOUNT)")
_ONCE = "ran on the first node only; run it before you submit, or add it to setup, which each node runs"


def given_by_others(name: str) -> bool:
    """Return whether Slurm, torchrun or slurmddp gives the ranks a variable, in its own way."""
    ours = name in _GIVEN or name.startswith(("SLURM", "SLURMDDP_", "PET_", "TORCHELASTIC_", "SBATCH_"))
    return ours or bool(_MEETING.fullmatch(name) or _OTHERS.fullmatch(name)) or name in ("HOSTNAME", "PATH", "PWD")


def carry_commands(job: Imported, launched: Iterable[Command], launch: Launch | None) -> None:
    """Carry over all commands but those that launch. launch: the one that becomes the job file's."""
    launched = list(launched)
    skip = {(tuple(each.words), tuple(each.lines)) for each in launched}
    job.used = _names(job, " ".join(word for each in launched for word in each.words))
    own: dict[str, tuple[str, int]] = {}  # variables of the shell that no program sees, until a setup line needs them
    inside = [each for command in launched for each in job.script.inside(command)] if launch and launch.step else []
    inside = [each for each in inside if each.words and (tuple(each.words), tuple(each.lines)) not in skip]
    lines = [each.line for each in launched if each.line]
    first, last = min(lines, default=0), max(lines, default=math.inf)
    contained = any(base(word) in (*SIF_PROGRAMS, "shifter") for word in (launch.words if launch else ()))
    contained |= any("container-image" in each.options for each in job.script.found.steps)
    for command in [*job.script.commands, *inside]:
        if (tuple(command.words), tuple(command.lines)) in skip or not command.words:
            for word in takewhile(_ASSIGNMENT.fullmatch, command.words):  # A=1 torchrun ...
                name = word.partition("=")[0]
                job.script.found.assigned[command.line, name] = (launch and launch.env(name)) or UNKNOWN
                _assign(job, command, word, own, exported=True)
            continue
        words = command.words
        if (
            words[0] == "exit"
            and (command.line < first or launch is None)
            and command not in inside
            and _certain(command)
        ):
            job.leave(command.line, " ".join(words), "the script ends here, and starts nothing of what follows")
            continue
        if (added := _ADDED.match(words[0])) and added[1] in job.used:
            continue  # the launch has its value
        if contained and command in inside and words[0] in _SETUP:
            job.leave(command.line, " ".join(words), "runs in the container; setup lines run outside of it")
            continue
        if command in inside and all(_ASSIGNMENT.fullmatch(word) for word in words[words[0] == "export" :]):
            continue  # the recorded environment has them
        declared = words[0] in ("export", "declare", "typeset", "local", "readonly") and "-n" not in words
        exported = words[0] == "export" or (declared and any(re.match(r"-\w*x", word) for word in words[1:]))
        if declared or all(_ASSIGNMENT.fullmatch(word) for word in words):
            for word in words[declared:]:
                if not word.startswith("-"):
                    _assign(job, command, word, own, exported=exported or job.export_all)
        else:
            _command(job, command, own, launch=last)


def _names(job: Imported, text: str) -> set[str]:
    """Return the variables that a text uses, and those in their values."""
    names: set[str] = set()
    values = {
        match[1]: match[2] for each in job.script.commands for match in map(_ASSIGNMENT.fullmatch, each.words) if match
    }
    found = set(_NAME.findall(text))
    while found - names:
        names |= found
        found = {name for each in names for name in _NAME.findall(values.get(each, ""))}
    return names


def _command(job: Imported, command: Command, own: dict[str, tuple[str, int]], launch: float) -> None:
    words, text = command.words, " ".join(command.words)
    certain = _certain(command)
    if words[0] == "set" and re.search(r"[-+]\w*a|allexport", text):
        job.export_all = "-" in words[1]
        add_setup(job, text, own)
    elif only_prints(job, command):
        if words[0] == "trap":
            job.leave(command.line, text, "job.sh stops, saves and requeues the job itself", lost=False)
        else:
            job.prints.append(command.line)
    elif words[0] == "cd" and certain and len(words) == 2 and command.line > launch:
        job.prints.append(command.line)  # the ranks have started
    elif words[0] == "cd" and certain and len(words) == 2:
        job.enter(command.line, text, job.script.found.assigned.get((command.line, "cd"), UNKNOWN))
    elif words[:2] == ["conda", "init"]:
        job.leave(command.line, text, "changes your ~/.bashrc; no job needs it", lost=False)
    elif words[:2] == ["mkdir", "-p"] and certain and not _COMPUTED.search(text):
        for word in words[2:]:
            path = word if re.match(r"['\"]?[/$~]", word) else job.inside(word)
            start = "" if re.match(r"['\"]?[/$~]", path) else "$SLURM_SUBMIT_DIR/"
            add_setup(job, f"mkdir -p {start}{path}", own)
    elif words[0] == "unset" and certain:
        for name in words[1:]:
            job.keys.pop(("environment", name), None)
        add_setup(job, text, own)
    elif (words[0] in _SETUP or (words[0] == "eval" and "hook" in text)) and certain and "\n" not in text:
        add_setup(job, text, own)
    else:
        job.leave(command.line, text.replace("\n", " "), _ONCE if certain else "in a branch, loop, function or pipe")


def _certain(command: Command) -> bool:
    """Return whether the batch shell itself runs this command, once."""
    return not (command.branch or command.loops or command.function) and command.then not in ("|", "|&")


def only_prints(job: Imported, command: Command) -> bool:
    """Return whether a command only prints, checks or waits: nothing that the ranks see depends on it."""
    words = command.words
    if any(each.function == words[0] for each in job.script.commands):
        return True  # what the function does is judged where it is written
    step = next((each for each in job.script.found.steps if each.command.lines == command.lines), None)
    if step is not None and words[0] == "srun":
        words = list(step.program) or words
    if command.output not in ("", "/dev/null", "/dev/stderr", "/dev/stdout"):
        return False
    if PYTHON.match(words[0]) and words[1:2] in (["-V"], ["--version"], ["-c"]):
        return words[1] != "-c" or ("print(" in " ".join(words) and "open(" not in " ".join(words))
    return words[0].rpartition("/")[2] in _PRINTS or words[0].startswith(("[[", "(("))


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
    value = job.script.found.assigned.get((line, name), UNKNOWN)
    if name in _GIVEN or name.startswith(("SLURMDDP_", "PET_", "TORCHELASTIC_")):
        job.leave(line, f"{name}={raw}", "slurmddp sets it", lost=False)
    elif _MEETING.fullmatch(name):
        used = name in job.used  # by the launch; a program may read it, too
        job.leave(line, f"{name}={raw}", "slurmddp has its own way for ranks to meet", lost=not used)
    elif _OTHERS.fullmatch(name):
        job.leave(line, f"{name}={raw}", "not a variable of the ranks alone: see container and resources")
    elif is_secret_name(name) and not value.startswith("\0"):
        job.add("environment_from", name)
        why = f"a secret: revoke it, and export {name} in your shell before you submit"
        job.leave(line, f"{name}=...", why, lost=False)
    elif _NETWORK.match(name):
        _network(job, line, name, value)
    elif "\0" not in value or _SET_LATER.fullmatch(name):
        if (text := job.text(value)) is None:
            job.leave(line, f"{name}={raw}", "known only when the job runs: set it in environment")
        else:
            job.keys[("environment", name)] = text
    elif "\n" in raw or symbols(value) & {"unexported", "nosuch"} or _COMPUTED.search(raw) or _STEP.search(raw):
        own[name] = (raw, line)
        used = name in job.used  # by the launch, which has its value
        job.leave(line, f"{name}={raw}", "its value is known only in the script", lost=not used)
    else:
        add_setup(job, f"export {name}={raw}", own)


def _network(job: Imported, line: int, name: str, value: str) -> None:
    """The profile knows the network of its site; other values than its own need a reason."""
    network = job.site.get("network") or {}
    by_site = {**(job.site.get("environment") or {}), **(network.get("variables") or {})}
    if name in by_site:
        same = str(by_site[name]) == value
        job.leave(line, f"{name}={value}", f"the site's profile sets {name}: {by_site[name]}", lost=not same)
    elif name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if network.get("interface"):
            why = f"the site's profile sets network.interface: {network['interface']}"
            job.leave(line, f"{name}={value}", why, lost=network["interface"] != value)
        elif "\0" not in value:
            job.set("network.interface", value)
    elif "\0" in value:
        job.leave(line, f"{name}={value}", "its value is known only when the job runs")
    else:
        job.keys[("network", "variables", name)] = value
