"""What the words of a launch say: read in one way for the job file of an import and for its proof."""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from slurmddp.container import SIF_PROGRAMS
from slurmddp.job.job import RESERVED
from slurmddp.scripts.check.values import PER_TASK
from slurmddp.scripts.sandbox.evaluate import CONTAINER_VALUES, Started, number

#: How agents meet is slurmddp's own matter, by options and by variables; the names of the latter are the script's own.
_OPTIONS_OF_MEETING = re.compile(
    r"nnodes|nproc-per-node|rdzv-.*|master-.*|node-rank|standalone|num-(machines|processes|nodes|gpus)|machine-rank|"
    r"main-process-.*|multi-gpu|same-network|use-env|m|module|no-python|mixed-precision|local-addr|dynamo-backend=no"
)
MEETING = re.compile(
    r"(MASTER|HEAD|RDZV|RENDEZVOUS|MAIN_PROCESS)_(NODE_)?(ADDR|ADDRESS|HOST|IP|PORT|ID)|NODE_RANK|NNODES|NUM_PROCESSES|"
    r"NPROC_PER_NODE"
)
_GIVEN = re.compile(r"(SLURM|SLURMDDP_|SANDBOX|PET_|TORCHELASTIC_|SBATCH_|SRUN_)\w*|HOSTNAME|PWD")
#: Options of a launcher that decide only where the output of the ranks goes: the run folder has it.
LOGS = {"tee", "redirects", "log-dir", "role", "local-ranks-filter"}
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")  # which network.interface sets
_BINDS = ("-B", "--bind")
_OF_SITE = ("--nv", "--rocm", "--env")  # options that its profile chooses; the recorded launch has the variables
_LONG = {"-e": "--cleanenv", "-c": "--contain", "-C": "--containall"}
#: How many words of a command that prepares a shell may name files.
_WORDS_OF_FILES = {"source": 1, ".": 1, "mkdir": 10**6}


def meets(option: str, value: str = "") -> bool:
    """Return whether an option of a launcher is only about how its ranks find each other, or has a key."""
    return any(map(_OPTIONS_OF_MEETING.fullmatch, (option, f"{option}={value}")))


def given_by_others(name: str) -> bool:
    """Return whether Slurm, torchrun or slurmddp gives the ranks a variable, in its own way."""
    return name in RESERVED | PER_TASK or bool(_GIVEN.fullmatch(name) or MEETING.fullmatch(name))


class Program(NamedTuple):
    """What a launcher or python starts. word: a file, or the name of a module. options: words in front of it."""

    word: str
    module: bool
    arguments: list[str]
    options: list[str]


def program_of(options: Collection[str], words: Sequence[str]) -> Program:
    """Read the words behind a launcher and its options, or behind python."""
    module, at = bool({"m", "module"} & set(options)), 0
    while at < len(words) and (words[at].startswith("-") or words[at] == "python"):
        if words[at] == "-m":
            module, at = True, at + 1
            break
        at += 2 if words[at] in ("-W", "-X") else 1
    return Program(words[at] if at < len(words) else "", module, list(words[at + 1 :]), list(words[:at]))


class Container(NamedTuple):
    """What a launch runs in. command: of apptainer, such as exec. folder: where the program starts, if the words tell.
    more: options but those that the site chooses, or that have a key."""

    runtime: str = "none"
    command: str = ""
    image: str = ""
    binds: tuple[str, ...] = ()
    folder: str | None = None
    more: tuple[str, ...] = ()


def container_of(words: Sequence[str], step: Mapping[str, str]) -> Container:
    """Read the words around a program, and the options of its srun."""
    if "container-image" in step:
        own = {f"--{name}": value for name, value in step.items() if name.startswith("container-")}
        image, binds = own.pop("--container-image"), own.pop("--container-mounts", "")
        folder = own.pop("--container-workdir", None)
        return Container("pyxis", "", image, _parts(binds), folder, _joined(own.items()))
    at = next((at for at, word in enumerate(words) if word.rpartition("/")[2] in SIF_PROGRAMS), len(words))
    if tuple(words[at + 1 : at + 2]) not in (("exec",), ("run",), ("shell",)):
        return Container()
    runtime, command, at = words[at].rpartition("/")[2], words[at + 1], at + 2
    options = list[tuple[str, str]]()
    while at < len(words) and words[at].startswith("-"):
        name, equals, value = words[at].partition("=")
        at += 1
        if not equals and name in CONTAINER_VALUES and at < len(words):
            value, at = words[at], at + 1
        options.append((_LONG.get(name, name), value))
    binds = ",".join(value for name, value in options if name in _BINDS)
    folder = next((value for name, value in options if name == "--pwd"), None)
    more = _joined(each for each in options if each[0] not in (*_BINDS, "--pwd", *_OF_SITE))
    return Container(runtime, command, words[at] if at < len(words) else "", _parts(binds), folder, more)


def _parts(binds: str) -> tuple[str, ...]:
    return tuple(filter(None, (each.strip() for each in binds.split(","))))


def _joined(options: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    return tuple(option_text(name, value) for name, value in options)


def option_text(name: str, value: str) -> str:
    """Return an option as one word."""
    return f"{name}={value}" if value else name


def ranks_of(kind: str, option: Callable[[str], str | None]) -> str | None:
    """Return how many ranks a launcher starts on each node: a number, or gpu; None, if its options do not tell."""
    if kind == "torchrun":
        return option("nproc-per-node")
    total, machines = number(option("num-processes")), number(option("num-machines") or "1")
    return str(total // machines) if total and machines else None


def with_whole_paths(start: Started) -> list[str]:
    """Return the words of a command that prepares a shell, with its files as paths from the root."""
    files = _WORDS_OF_FILES.get(start.name, 0)
    pairs = enumerate(start.words)
    return [
        os.path.normpath(os.path.join(start.folder, word)) if 0 < at <= files and word[:1] != "-" else word
        for at, word in pairs
    ]
