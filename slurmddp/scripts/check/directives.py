"""The #SBATCH lines of a script, and what they ask for."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace
from typing import NamedTuple

from slurmddp.scripts.sandbox.evaluate import FLAGS_OF_BOTH, SRUN_ONLY_FLAGS

SHORT = {
    "A": "account", "a": "array", "C": "constraint", "c": "cpus-per-task", "D": "chdir", "d": "dependency",
    "e": "error", "F": "nodefile", "G": "gpus", "H": "hold", "i": "input", "J": "job-name", "k": "no-kill",
    "L": "licenses", "M": "clusters", "m": "distribution", "N": "nodes", "n": "ntasks", "O": "overcommit",
    "o": "output", "p": "partition", "q": "qos", "S": "core-spec", "s": "oversubscribe", "t": "time", "W": "wait",
    "w": "nodelist", "x": "exclude", "B": "extra-node-info", "b": "begin", "Q": "quiet", "v": "verbose",
}  # fmt: skip
#: Other names of options.
ALIASES = {
    "tasks-per-node": "ntasks-per-node", "cluster": "clusters", "ntasks-per-tres": "ntasks-per-gpu",
    "cpu_bind": "cpu-bind",
}  # fmt: skip
#: Options that Slurm no longer has, and what replaces them.
REMOVED = {"workdir": "chdir", "share": "oversubscribe", "shared": "oversubscribe"}
SRUN_ONLY = SRUN_ONLY_FLAGS | {
    "accel-bind", "bcast-exclude", "cpu-bind", "epilog", "het-group", "ignore-signals", "interactive", "jobid", "mpi",
    "msg-timeout", "prolog", "relative", "slurmd-debug", "task-epilog", "task-prolog", "threads", "treewidth",
}  # fmt: skip
#: Options that take no value, or one behind `=` only.
FLAGS = FLAGS_OF_BOTH | {"get-user-env", "ignore-pbs", "no-requeue", "requeue", "wait"}
OPTIONS = FLAGS | set(SHORT.values()) | {
    "acctg-freq", "batch", "bb", "bbf", "cluster-constraint", "comment", "container", "container-id",
    "cores-per-socket", "cpu-freq", "cpus-per-gpu", "deadline", "delay-boot", "export", "export-file", "extra", "gid",
    "gpu-bind", "gpu-freq", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres", "gres-flags", "hint",
    "mail-type", "mail-user", "mcs-label", "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus", "network",
    "nodes", "ntasks", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-node", "ntasks-per-socket",
    "kill-on-invalid-dep", "open-mode", "prefer", "priority", "profile", "power", "reservation", "segment", "signal",
    "sockets-per-node", "switches", "thread-spec", "threads-per-core", "time-min", "tmp", "tres-bind", "tres-per-task",
    "uid", "wait-all-nodes", "wckey", "wrap", "context", "container-type", "mem-update", "resources", *ALIASES,
    *REMOVED,
}  # fmt: skip


EXPORTED = re.compile(r",(?=\w+=|ALL\b|NONE\b)")
#: Options whose values are in variables of their names.
_SHOWN = (
    "ntasks-per-node", "cpus-per-task", "gpus-per-node", "gpus-per-task", "gpus", "mem-per-cpu", "mem-per-gpu",
)  # fmt: skip


class Directive(NamedTuple):
    """One option of a #SBATCH line. name: empty for a word that belongs to no option."""

    line: int
    name: str
    value: str


def parse_options(words: list[str], flags: set[str], short: dict[str, str]) -> tuple[list[tuple[str, str]], int]:
    """Read options up to the first other word: (name, value) pairs, and the index of that word."""
    found, at = [], 0
    while at < len(words) and words[at].startswith("-") and len(words[at]) > 1:
        word = words[at]
        at += 1
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
        else:
            name, equals, value = short.get(word[1], word[1]), word[2:], word[2:].lstrip("=")
        if not equals and name not in flags and at < len(words):
            value, at = words[at], at + 1
        found.append((name, value))
    return found, at


def read_directives(lines: list[str]) -> tuple[list[Directive], list[int]]:
    """Return the options that sbatch reads, and the numbers of the #SBATCH lines behind the first command."""
    written = [line for line, text in enumerate(lines, 1) if re.match(r"#SBATCH\s", text)]
    code = (line for line, text in enumerate(lines, 1) if text.strip() and not text.lstrip().startswith("#"))
    first = next(code, len(lines) + 1)
    found = [
        Directive(line, full(name, OPTIONS), value)
        for line in written
        if line < first
        for name, value in _options(lines[line - 1])
    ]
    return found, [line for line in written if line > first]


def components(directives: list[Directive]) -> list[list[Directive]]:
    """Return the options of each part of a heterogeneous job; of another one, all of them."""
    found: list[list[Directive]] = [[]]
    for each in directives:
        if not each.name and each.value in ("hetjob", "packjob"):
            found.append([])
        else:
            found[-1].append(each)
    return found


def _options(text: str) -> list[tuple[str, str]]:
    lexer = shlex.shlex(text[len("#SBATCH") :], posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError:  # a quote without its partner
        words = text.split()[1:]
    if end := next((at for at, word in enumerate(words, 1) if "#" in word), 0):
        words = [*words[: end - 1], *filter(None, [words[end - 1].partition("#")[0]])]
    found, at = parse_options(words, FLAGS, SHORT)
    return found + [("", word) for word in words[at : at + 1]]


def exported(value: str | None) -> dict[str, str]:
    """Return the variables to which --export gives values."""
    parts = (part.partition("=") for part in EXPORTED.split(value or ""))
    return {name: given for name, equals, given in parts if equals}


def full(name: str, options: set[str]) -> str:
    """Complete an abbreviated option, as getopt does, and replace another name of it."""
    matches = [option for option in options if option.startswith(name)] if len(name) > 1 else []
    name = matches[0] if name not in options and len(matches) == 1 else name
    return ALIASES.get(name, name)


def count(value: str | None) -> int | None:
    """Return the number of `4`, `2-4` (the least), `gpu:4`, `gpu:a100:4`, `a100:4`; None, if it is none."""
    match = re.fullmatch(r"(?:.*[:=])?(\d{1,6})(?:-\d+)?(?:\(.*\))?", value or "")
    return int(match[1]) if match else None


@dataclass(frozen=True)
class Resources:
    """What a job or step asks for; None where it is not given or cannot be read. unread: nodes or tasks are given, and
    cannot be read."""

    nodes: int | None = None
    ntasks: int | None = None
    ntasks_per_node: int | None = None
    gpus_per_node: int | None = None
    gpus_per_task: int | None = None
    cpus_per_task: int | None = None
    unread: bool = False

    @property
    def tasks_per_node(self) -> int | None:
        """Return how many tasks srun starts on each node."""
        if self.unread:
            return None
        if self.ntasks is not None and self.nodes:
            if self.ntasks <= self.nodes:
                return 1
            return self.ntasks // self.nodes if self.ntasks % self.nodes == 0 else None
        if self.ntasks is not None:
            return self.ntasks_per_node or (1 if self.ntasks == 1 else None)
        return self.ntasks_per_node or 1

    @property
    def tasks(self) -> int | None:
        """Return how many tasks srun starts in all."""
        if self.unread:
            return None
        if self.ntasks is not None:
            return self.ntasks
        return self.nodes * self.tasks_per_node if self.nodes and self.tasks_per_node else None


def unread(options: dict[str, str]) -> bool:
    """Tell whether options name nodes or tasks by a value that cannot be read."""
    return any(name in options and count(options[name]) is None for name in ("nodes", "ntasks", "ntasks-per-node"))


def asked(options: dict[str, str]) -> Resources:
    """Return what a job's options ask for."""
    nodes, ntasks, per_node = (count(options.get(name)) for name in ("nodes", "ntasks", "ntasks-per-node"))
    if nodes is None and "nodes" not in options:
        if ntasks and per_node and ntasks % per_node == 0:
            nodes = ntasks // per_node
        elif ntasks == 1:
            nodes = 1
    gpus_per_task = count(options.get("gpus-per-task"))
    gpus = count(options.get("gpus-per-node"))
    if gpus is None and len(asks := re.findall(r"gpu[^,]*", options.get("gres", ""))) == 1:  # more are of several types
        gpus = count(asks[0]) or (1 if re.fullmatch(r"gpu(:[a-z]\w*)?", asks[0]) else None)
    if gpus is None and nodes and (total := count(options.get("gpus"))):
        gpus = total // nodes if total % nodes == 0 else None
    cpus = count(options.get("cpus-per-task"))
    found = Resources(nodes, ntasks, per_node, gpus, gpus_per_task, cpus, unread(options))
    if gpus is None and gpus_per_task and found.tasks_per_node:
        return replace(found, gpus_per_node=gpus_per_task * found.tasks_per_node)
    return found


def slurm_variables(options: dict[str, str]) -> dict[str, str]:
    """Return what Slurm's variables hold in the batch shell. `unset:NAME`: the option that would set it is absent."""
    from slurmddp.scripts.check.values import UNKNOWN, symbol

    def text(value: int | None) -> str:
        return UNKNOWN if value is None else str(value)

    resources = asked(options)
    sure = len(options) >= 3  # otherwise the options are probably on sbatch's command line
    names = {f"SLURM_{option.upper().replace('-', '_')}": option for option in _SHOWN} | {"SLURM_MEM_PER_NODE": "mem"}
    found = {
        name: options.get(option) or (symbol(f"unset:{name}") if sure else UNKNOWN) for name, option in names.items()
    }
    nodes = text(None if "-" in options.get("nodes", "") else resources.nodes)
    has_tasks = "ntasks" in options or "ntasks-per-node" in options
    ntasks = text(resources.tasks) if has_tasks or not sure else symbol("unset:SLURM_NTASKS")
    several = resources.nodes is not None and resources.nodes > 1
    per_node = symbol("compressed:SLURM_TASKS_PER_NODE") if several else text(resources.tasks_per_node)
    return found | {
        "SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes, "SLURM_NTASKS": ntasks, "SLURM_NPROCS": ntasks,
        "SLURM_TASKS_PER_NODE": per_node, "SLURM_GPUS_ON_NODE": text(resources.gpus_per_node),
    }  # fmt: skip
