"""What prepares the ranks: setup lines, and the variables that they find in their environment."""

from __future__ import annotations

import os.path
import re
import shlex
from collections.abc import Sequence

from slurmddp.job.job import RESERVED
from slurmddp.records.redact import is_secret_name
from slurmddp.scripts.check.launches import Launch
from slurmddp.scripts.check.shell import Command
from slurmddp.scripts.check.values import GIVEN, PER_TASK, names_in, symbols
from slurmddp.scripts.imports.imported import ABOVE, Imported
from slurmddp.scripts.imports.reader import INTERFACES, MEETING, given_by_others, with_whole_paths
from slurmddp.scripts.sandbox.evaluate import HOME, SUBMIT, USER, Evaluated, Started

VENV = "source $SLURM_SUBMIT_DIR/.venv/bin/activate"  # what `uv run` does
_SETUP = {"module", "ml", "source", ".", "conda", "mamba", "micromamba", "spack", "ulimit", "pyenv", "mkdir"}
_NO_SETUP = {"init", "info", "run", "create", "install"}  # of conda, uv and their like
_OF_SHELL = re.compile(r"(unset|umask) |set [-+]\w*a|set [-+]o allexport")
_PLACES = {SUBMIT: "$SLURM_SUBMIT_DIR", HOME: "$HOME"}
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
#: What is another value in each rank, or for a program that a container may lack.
COMPUTED = re.compile(r"\$\((?!\(|pwd\))|`|\$\{?S?RANDOM|\$\$")
_FOR_OTHERS = re.compile(r"(CUDA|ROCR|HIP)_VISIBLE_DEVICES|(APPTAINER|SINGULARITY)_\w+")
_NETWORK = re.compile(r"(NCCL|GLOO|TORCH_NCCL|RCCL|FI|UCX)_")
#: What node.sh sets behind the setup lines, so that a setup line would not do.
_SET_LATER = re.compile(
    r"OMP_NUM_THREADS|HF_HOME|(TRITON|TORCHINDUCTOR)_CACHE_DIR|MIOPEN_\w+|TORCH_\w+|PYTHON(UNBUFFERED|NOUSERSITE)"
)
#: What the script sets for Slurm, and makes no difference to the ranks.
_FOR_SLURM = re.compile(r"(SLURM|SRUN)_(CPU_BIND\w*|LABELIO|UNBUFFEREDIO)")


def carry_setup(job: Imported, launch: Launch, runs: Sequence[Evaluated]) -> list[tuple[int, str]]:
    """(line, setup line) of each command that prepares a shell, and that all jobs start before the launch."""
    lines = [
        (each.line, text)
        for each in job.script.commands
        if each.line < launch.line and _certain(each) and _OF_SHELL.match(text := " ".join(each.words))
    ]
    for each in runs[0].started:
        first = each.words[1:2]
        wanted = each.name in _SETUP and not _NO_SETUP & set(first)
        wanted &= each.name != "mkdir" or first == ("-p",)  # without it, only one node could make the folder
        same = _in_all(each, runs) if wanted and not each.step and each.line <= launch.line else None
        if same:
            text = " ".join(map(_shell_word, with_whole_paths(same)))
            hook = first and re.match(r"shell\.|hook", first[0])
            lines.append((each.line, f'eval "$({text})"' if hook else text))
    return [*lines, (launch.line, VENV)] if "uv" in launch.words else lines


def _in_all(start: Started, runs: Sequence[Evaluated]) -> Started | None:
    """Return a command as all jobs start it, with the names of the shell's own variables; None, if one does not."""
    found = start
    for run in runs:
        if not any(each.words == start.words for each in run.started):
            named = (each for each in run.started if run.job.role and each.line == start.line)
            same = (each for each in named if tuple(GIVEN.sub("", word) for word in each.words) == start.words)
            if (found := next(same, found)) is start:
                return None
    return found


def _certain(command: Command) -> bool:
    """Return whether the batch shell runs a command exactly once."""
    return not (command.branch or command.loops or command.function)


def _shell_word(word: str) -> str:
    """Return a recorded word for a setup line: the sandbox's folders as what they stand for."""
    plain = re.fullmatch(r"[\w@%+=:,./~^-]+", word)
    if ABOVE.match(word) and not re.match(rf"{SUBMIT}(/|$)", word):  # above the folder of submission
        word = f"{SUBMIT}/{os.path.relpath(word, SUBMIT)}"
    word = word.replace(USER, "$USER") if plain else shlex.quote(word).replace(USER, "'$USER'")
    word = GIVEN.sub(r'"$\1"' if plain else r"""'"$\1"'""", word)
    if word.strip("'").startswith("/.conda"):
        return f'"$(conda info --base){word.strip(chr(39))[7:]}"'
    return re.sub(rf"^({SUBMIT}|{HOME})(?=/|$)", lambda match: _PLACES[match[1]], word)


def own_assignments(job: Imported, text: str, before: int) -> list[str] | None:
    """Return the script's own assignments of the variables in a text; None, if they are more than assignments."""
    needed, found = names_in(text), list[str]()
    for command in reversed([each for each in job.script.commands if 0 < each.line < before]):
        for word in reversed(_assignments(command)):
            name, value = _ASSIGNMENT.fullmatch(word).groups()  # type: ignore[union-attr]
            if name in needed:
                if not _certain(command) or "\n" in value or COMPUTED.search(value):
                    return None
                found.insert(0, word)
                needed |= names_in(value)
    named = job.script.option("job-name") == job.keys.get(("name",))
    return found if named or "SLURM_JOB_NAME" not in needed else None  # slurmddp's job has another name


def _assignments(command: Command) -> list[str]:
    """Return the assignments of a command that is nothing else."""
    declares = command.words[:1] and command.words[0] in ("export", "declare", "typeset", "readonly")
    words = [word for word in command.words[bool(declares) :] if not word.startswith("-")]
    found = [word for word in words if _ASSIGNMENT.fullmatch(word)]
    return found if len(found) == len(words) or declares else []


def carry_environment(job: Imported, launch: Launch) -> list[tuple[int, str]]:
    """Carry over what the tasks find in their environment; return (line, setup line) of what only the job knows."""
    lines, used = list[tuple[int, str]](), _used(job, launch)
    for (line, name), value in job.script.found.assigned.items():
        same = f"{name}={value}" == f"SRUN_CPUS_PER_TASK={job.script.job.cpus_per_task}" or name in used
        if re.match("(SLURM|SRUN)_", name) and line < launch.line and not same and not _FOR_SLURM.fullmatch(name):
            job.leave(line, f"{name}=...", "a variable that srun reads", about=name)
    for name, value in launch.environment.items():
        line = job.line_of(launch.line, name)
        written = re.search(rf"(\b|ENV_){re.escape(name)}\+?=", job.script.text) is not None
        if not written or (given_by_others(name) and not MEETING.fullmatch(name)):
            continue  # a file that setup sources sets it
        text = job.text(value)
        adds = re.search(rf"\b{name}=\S*\$\{{?{name}\b", job.script.text)  # to what a module may set
        later = _SET_LATER.fullmatch(name)
        if MEETING.fullmatch(name):
            own = name in RESERVED | PER_TASK | used  # another one may be read by the program
            job.leave(line, name, "slurmddp has its own way for ranks to meet", lost=not own, about=name)
        elif _FOR_OTHERS.fullmatch(name):
            job.leave(line, name, "not a variable of the ranks alone: see container and resources", about=name)
        elif is_secret_name(name) and not value.startswith("\0"):
            job.add("environment_from", name)
            why = f"a secret: revoke it, and export {name} in your shell before you submit"
            job.leave(line, f"{name}=...", why, lost=False)
        elif _NETWORK.match(name) and text is not None:
            _network(job, line, name, text)
        elif text is not None and (("\0" not in value and not adds) or later):
            job.keys[("environment", name)] = text
        elif not later and (kept := own_assignments(job, f"${name}", launch.line + 1)):
            lines += [(line, f"export {each}" if each.startswith(f"{name}=") else each) for each in kept]
        else:
            hosts = symbols(value) & {"head", "own", "host", "nodelist"}  # by which the ranks meet
            part = name in used and bool(hosts or re.search("torchrun|launch|python|srun| --", value))
            why = "a part of the launch" if part else "known only when the job runs: set it in environment"
            job.leave(line, f"{name}=...", why, lost=not part, about=name)
    return lines


def _used(job: Imported, launch: Launch) -> set[str]:
    """Return the variables that the launch's text consists of: what it starts has their values."""
    found, texts = set[str](), [*launch.command.words, *(launch.step.command.words if launch.step else ())]
    while texts:
        new = set().union(*map(names_in, texts)) - found
        found |= new
        pairs = [match for each in job.script.commands for match in map(_ASSIGNMENT.fullmatch, each.words) if match]
        texts = [pair[2] for pair in pairs if pair[1] in new]
    return found


def _network(job: Imported, line: int, name: str, value: str) -> None:
    """The profile knows the network of its site; other values than its own need a reason."""
    interface = name in INTERFACES
    by_site = job.site_variables().get(name, (job.site.get("network") or {}).get("interface") if interface else None)
    if by_site is not None:
        why = f"the site's profile sets {name}: {by_site}"
        job.leave(line, f"{name}={value}", why, lost=str(by_site) != value, about=name)
    elif interface:
        job.set("network.interface", value)
    else:
        job.keys[("network", "variables", name)] = value
