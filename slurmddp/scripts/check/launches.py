"""What a batch script starts, as it was recorded: launchers and the steps around them, each with its text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from slurmddp.container import SIF_PROGRAMS
from slurmddp.scripts.check.directives import SHORT, Resources, parse_options
from slurmddp.scripts.check.shell import Command
from slurmddp.scripts.check.values import likely, symbols
from slurmddp.scripts.sandbox.evaluate import SRUN_FLAGS, Evaluated, Started, number

SRUN_SHORT = SHORT | {
    "E": "preserve-env", "I": "immediate", "K": "kill-on-bad-exit", "l": "label", "r": "relative", "T": "threads",
    "u": "unbuffered", "X": "disable-status", "Z": "no-allocate", "V": "version", "h": "help",
}  # fmt: skip
_LAUNCHER_FLAGS = {
    "standalone", "no-python", "m", "module", "run-path", "use-env", "multi-gpu", "cpu", "tpu", "q", "quiet", "debug",
    "use-deepspeed", "use-fsdp", "use-megatron-lm", "same-network", "use-xpu", "ipex", "no-ssh", "no-ssh-check",
    "no-local-rank", "force-multi", "enable-each-rank-log", "v", "use-mps-device", "tpu-use-cluster",
}  # fmt: skip
PYTHON = re.compile(r"(?:.*/)?(python[0-9.]*|@\w*PYTHON\w*@|\0[^\0]*PYTHON\w*\0)\Z")
#: By program: kind of launch, and the words behind it.
_LAUNCHERS: dict[str, tuple[str, list[str]]] = {
    "torchrun": ("torchrun", []), "tune": ("torchrun", ["run"]), "deepspeed": ("deepspeed", []),
    "accelerate": ("accelerate", ["launch"]), "accelerate-launch": ("accelerate", []),
}  # fmt: skip
_MODULES = {
    "torch.distributed.run": "torchrun", "torch.distributed.launch": "torchrun",
    "torch.distributed.elastic.run": "torchrun", "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}  # fmt: skip
AGENTS = ("torchrun", "accelerate")


class Names(NamedTuple):
    """What a launcher, and its options, are called: numbers of nodes and ranks, a node's rank, the place to meet."""

    shown: str
    nodes: str = ""
    ranks: str = ""
    rank: str = ""
    address: str = ""
    port: str = ""


_NAMES = {
    "torchrun": Names("torchrun", "nnodes", "nproc-per-node", "node-rank", "master-addr", "master-port"),
    "accelerate": Names(
        "accelerate launch", "num-machines", "num-processes", "machine-rank", "main-process-ip", "main-process-port"
    ),
    "deepspeed": Names("deepspeed", "num-nodes", "num-gpus", "node-rank", "master-addr", "master-port"),
    "python": Names("python"),
}  # fmt: skip
_ADDRESS_ARGUMENT = re.compile(
    r"--?(?:dist|init|master)[-_]?(?:url|method|addr|address)[= ]['\"]?(?:tcp://)?([^ '\"]+)"
)


@dataclass(frozen=True)
class Step:
    """One srun: its line, options and how it spreads. fan_out: one of several, each for a node of its own. opaque: its
    options cannot be known, or not all of them."""

    line: int
    options: dict[str, str]
    resources: Resources
    fan_out: bool
    opaque: tuple[str, ...] = ()
    command: Command = field(default_factory=Command)


@dataclass
class Launch:
    """One start of a launcher (torchrun, accelerate, deepspeed) or of python. unsure: not in all imagined jobs."""

    kind: str
    line: int
    options: dict[str, str]
    opaque: tuple[str, ...]  # words in front of the program that cannot be known
    program: list[str]
    environment: dict[str, str]  # what the script sets in it
    hidden: set[str]  # variables that the batch shell has, and does not export
    step: Step | None
    command: Command
    words: tuple[str, ...]  # of the outermost program around it, but srun
    unsure: bool
    name: str  # of the launcher, as it is started
    folder: str  # in which it starts
    nodes: int | None  # on how many it starts
    per_node: int | None  # how often srun starts it on each node

    @property
    def fan_out(self) -> bool:
        """Tell whether its step is one of several, each for a node of its own."""
        return self.step is not None and self.step.fan_out

    @property
    def branch(self) -> bool:
        """Tell whether it stands in a branch of the script's text, or does not always start."""
        return self.unsure or self.command.branch or (self.step is not None and self.step.command.branch)

    def option(self, *names: str) -> str | None:
        """Return the value of an option, or of torchrun's variable for it (PET_NNODES)."""
        for name in names:
            variable = self.env("PET_" + name.replace("-", "_").upper()) if self.kind == "torchrun" else None
            if (value := self.options.get(name, variable)) is not None:
                return value
        return None

    @property
    def names(self) -> Names:
        return _NAMES[self.kind]

    @property
    def expected_nodes(self) -> str | None:
        """Return how many nodes the launcher expects, by its options."""
        return self.option(self.names.nodes)

    @property
    def ranks(self) -> int | None:
        """Return how many ranks one launcher starts."""
        count = number(self.option(self.names.ranks))
        if self.kind == "accelerate" and count is not None:  # of all nodes
            return count // (number(self.expected_nodes) or 1) or None
        return count

    @property
    def tasks(self) -> int:
        """Return how many tasks of srun start it; 1 where that is not known."""
        return (self.step.resources.tasks if self.step and not self.step.fan_out else 1) or 1

    @property
    def several_nodes(self) -> bool:
        """Tell whether it surely starts on more than one node."""
        return (self.fan_out and (number(self.expected_nodes) or 1) > 1) or (self.nodes or 1) > 1

    @property
    def has_config(self) -> bool:
        """Tell whether options may also come from a place that cannot be read."""
        return bool(self.opaque) or "config-file" in self.options

    @property
    def static(self) -> bool:
        """Tell whether nodes are surely ordered by --node-rank: the default of torchrun and accelerate."""
        backend = self.option("rdzv-backend") or ("" if self.opaque else "static")
        return backend == "static" and "standalone" not in self.options

    @property
    def farmed(self) -> bool:
        """Tell whether the launcher is one of several that train apart, each with a srun of its own."""
        return self.fan_out and ("standalone" in self.options or self.expected_nodes in (None, "1", "1:1"))

    @property
    def meets(self) -> bool:
        """Tell whether launchers, or programs, of several nodes meet, as far as it can be read."""
        alone = self.kind != "python" and self.expected_nodes in (None, "1")
        return self.several_nodes and not self.farmed and not alone

    @property
    def address(self) -> str | None:
        """Return the address at which the ranks meet; None, if the launch gives none."""
        if self.kind == "python":
            given = _ADDRESS_ARGUMENT.search(" ".join(self.program))
            return given[1] if given else self.env("MASTER_ADDR")
        if self.kind == "accelerate":
            return self.option(self.names.address, "rdzv-endpoint")
        return self.option("rdzv-endpoint") or (self.option(self.names.address) if self.static else None)

    def env(self, name: str) -> str | None:
        """Return what the launched program finds under a variable that the script sets."""
        return self.environment.get(name)


@dataclass
class Found:
    """What was recorded. assigned: (line, name) -> value of an assignment; `cd` is the name of a change of folder."""

    launches: list[Launch] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    idle: list[Launch] = field(default_factory=list)  # launchers without a program
    assigned: dict[tuple[int, str], str] = field(default_factory=dict)
    started: list[tuple[int, list[str]]] = field(default_factory=list)  # by the batch shell itself: line, words

    def value(self, name: str) -> str | None:
        """Return what a variable of the batch shell holds in the end."""
        return next((value for (_, each), value in reversed(self.assigned.items()) if each == name), None)


def programs(run: Evaluated, *, idle: bool = False) -> Iterator[tuple[Started, str, list[str]]]:
    """Yield (start, kind, arguments) of the launchers and Pythons that a job starts. idle: those without arguments."""
    for each in run.started:
        rest = list(each.words[1:])
        _, behind = _LAUNCHERS.get(each.name, ("", []))
        if (each.name in _LAUNCHERS or PYTHON.match(each.name)) and rest[: len(behind)] == behind:
            kind, arguments = kind_of(each.name, rest)
            if arguments[:1] not in (["-c"], ["-V"], ["--version"]) and (arguments or idle):
                yield each, kind, arguments


def around(run: Evaluated, start: Started) -> tuple[str, ...]:
    """Return the words of the outermost program of the same task that starts this one; of its container, if a shell
    stands between."""
    same = [
        each for each in run.started
        if (each.step, each.procid, each.line) == (start.step, start.procid, start.line) and each.order < start.order
    ]  # fmt: skip
    ends = [each.words for each in same if each.name != "srun" and each.words[-len(start.words) :] == start.words]
    inside = [each.words for each in same if start.contained and each.name in SIF_PROGRAMS]
    return max([*(ends or inside), start.words], key=len)


def base(word: str) -> str:
    """Return the name of a program."""
    return (likely(word) or "").rpartition("/")[2]


def srun_options(words: list[str]) -> tuple[list[tuple[str, str]], int, tuple[str, ...]]:
    """(options of srun, index of its program, words among them that cannot be read)."""
    found, end = parse_options(words, SRUN_FLAGS, SRUN_SHORT)
    opaque: list[str] = []
    while end < len(words) and re.fullmatch("(\0[?m][^\0]*\0)+", words[end]) and not PYTHON.match(words[end]):
        opaque.append(words[end])
        more, count = parse_options(words[end + 1 :], SRUN_FLAGS, SRUN_SHORT)
        found, end = found + more, end + 1 + count
    return found, end, tuple(opaque)


def kind_of(name: str, rest: list[str]) -> tuple[str, list[str]]:
    """(kind, arguments) of a launcher. -um of python becomes -u -m."""
    if name in _LAUNCHERS:
        kind, behind = _LAUNCHERS[name]
        return kind, rest[len(behind) :]
    if match := re.fullmatch(r"-([A-Za-z]+)m", rest[0] if rest else ""):
        rest = [*(f"-{each}" for each in match[1]), "-m", *rest[1:]]
    for at, word in enumerate(rest):
        if word == "-m" and (module := rest[at + 1 : at + 2]) and module[0] in _MODULES:
            return _MODULES[module[0]], rest[at + 2 :]
        if base(word) == "torchrun":
            return "torchrun", rest[at + 1 :]
        if not word.startswith("-"):
            break
    return "python", rest


def launcher_options(kind: str, words: list[str]) -> tuple[dict[str, str], int, tuple[str, ...]]:
    """(options up to the program, index of the program, words before it that cannot be read). Python has none."""
    found: dict[str, str] = {}
    opaque: list[str] = []
    at = 0
    while kind != "python" and at < len(words):
        word, at = words[at], at + 1
        if word.startswith("-"):
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("_", "-")
            if name in _LAUNCHER_FLAGS:
                value = value or "true"
            elif not equals and at < len(words):
                value, at = words[at], at + 1
            found[name] = value
        elif "?" in symbols(word) and not word.endswith((".py", ".sh")):
            opaque.append(word)
        else:
            return found, at - 1, tuple(opaque)
    return found, at, tuple(opaque)
