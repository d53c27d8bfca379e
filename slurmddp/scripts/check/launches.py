"""What a batch script starts: it walks the commands, keeps the variables, and finds srun and the launchers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from slurmddp.scripts.check.directives import OPTIONS, SHORT, SRUN_ONLY, Resources, count, full, parse_options, unread
from slurmddp.scripts.check.shell import Command, commands
from slurmddp.scripts.check.values import UNKNOWN, Scope, array_items, expand, expand_words, likely, symbol, symbols
from slurmddp.scripts.sandbox.flags import SRUN_FLAGS

SRUN_SHORT = SHORT | {
    "E": "preserve-env", "I": "immediate", "K": "kill-on-bad-exit", "l": "label", "r": "relative", "T": "threads",
    "u": "unbuffered", "X": "disable-status", "Z": "no-allocate", "V": "version", "h": "help",
}  # fmt: skip
_LAUNCHER_FLAGS = {
    "standalone", "no-python", "m", "module", "run-path", "use-env", "multi-gpu", "cpu", "tpu", "q", "quiet", "debug",
    "use-deepspeed", "use-fsdp", "use-megatron-lm", "same-network", "use-xpu", "ipex", "no-ssh", "no-ssh-check",
    "no-local-rank", "force-multi", "enable-each-rank-log", "v", "use-mps-device", "tpu-use-cluster",
}  # fmt: skip
PYTHON = re.compile(r"(?:.*/)?(python[0-9.]*|\0[^\0]*PYTHON\w*\0)\Z")
_SHELLS = {"bash", "sh", "zsh", "dash", "ksh"}
_REMOTE = {
    "mpirun", "mpiexec", "mpiexec.hydra", "ssh", "pdsh", "clush", "orterun", "prun", "jsrun", "aprun", "parallel",
    "pssh",
}  # fmt: skip
#: Programs that start the words behind their options where they are started themselves.
_WRAPPERS = {
    "apptainer", "command", "conda", "docker", "enroot", "env", "exec", "mamba", "micromamba", "ncu", "nice", "nohup",
    "nsys", "numactl", "pixi", "podman", "poetry", "setsid", "shifter", "singularity", "stdbuf", "strace", "taskset",
    "time", "timeout", "uv",
}  # fmt: skip
_CONTAINERS = {"apptainer", "docker", "enroot", "podman", "shifter", "singularity"}
_QUIET = {"echo", "cd", "mkdir", "module", "ml", "trap", "test", "[", "[[", "which", "type"}
#: Characters that are read, with those of variables and of scripts in scripts. Scripts may call themselves.
_MOST = 5_000_000
_MOST_STARTS = 500  # of launchers and of srun
_DECLARE = {"export", "declare", "typeset", "local", "readonly"}


@dataclass(frozen=True)
class Step:
    """One srun: its line, options and how it spreads. fan_out: one of several, each for a node of its own. opaque: its
    options cannot be read, or not all of them. before: words in front of srun."""

    line: int
    options: dict[str, str]
    resources: Resources
    fan_out: bool
    background: bool
    opaque: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    command: Command = field(default_factory=Command)
    program: tuple[str, ...] = ()


@dataclass
class Launch:
    """One start of a launcher (torchrun, accelerate, deepspeed) or of python."""

    kind: str
    line: int
    options: dict[str, str]
    opaque: tuple[str, ...]  # words in front of the program that cannot be read
    program: list[str]
    scope: Scope
    step: Step | None = None
    remote: str = ""  # the program that starts it instead of srun, such as ssh
    branch: bool = False
    function: str = ""
    loops: tuple[str, ...] = ()
    background: bool = False
    command: Command = field(default_factory=Command)
    wrapper: tuple[str, ...] = ()  # words in front of the launcher: env A=B, apptainer exec ...
    unsure: bool = False  # srun or another program may start it: words in front of it cannot be read
    name: str = ""  # of the launcher, as it is started

    def option(self, *names: str) -> str | None:
        """Return the value of an option, or of torchrun's variable for it (PET_NNODES)."""
        for name in names:
            if name in self.options:
                return self.options[name]
            value = self.scope.inherited("PET_" + name.replace("-", "_").upper()) if self.kind == "torchrun" else None
            if isinstance(value, str):
                return value
        return None

    def env(self, name: str) -> str | None:
        """Return what the launched program finds under a variable that the script sets."""
        value = self.scope.inherited(name)
        return value if isinstance(value, str) else None


@dataclass
class Walk:
    """What the walk has found."""

    launches: list[Launch] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    idle: list[Launch] = field(default_factory=list)  # launchers without a program
    seen: list[tuple[Command, list[str], Scope]] = field(default_factory=list)  # (as written, expanded, shell)
    sourced: bool = False
    files: dict[str, tuple[str, int, bool]] = field(default_factory=dict)  # scripts that here-documents write


class Walker:
    """Walks the commands of a batch script in order."""

    def __init__(self, job: Resources) -> None:
        self.job = job
        self.found = Walk()
        self.left = _MOST
        self.loops: dict[int, list[Command]] = {}  # commands of loops that are not entered yet

    def run(
        self, text: str, line: int, scope: Scope, step: Step | None = None, remote: str = "", depth: int = 0
    ) -> None:
        """Walk a script. step: it runs as the task of that srun."""
        self.left -= len(text)
        if depth > 6 or self.left < 0:
            return
        found = commands(text, line)
        for number in {number: None for each in found for number in sorted(each.looped)}:
            self.loops[number] = [each for each in found if number in each.looped]
        for command in found:
            if self.left > 0 and len(self.found.launches) + len(self.found.steps) < _MOST_STARTS:
                self._command(command, scope, step, remote, depth)

    def _command(self, command: Command, scope: Scope, step: Step | None, remote: str, depth: int) -> None:
        if command.here and command.output:
            here = command.here
            self.found.files[expand(command.output, scope)] = (here.text, here.line, here.literal)
        scope.enter(command.blocks)
        for number in command.looped & self.loops.keys():
            for each in self.loops.pop(number):
                _repeat(each, scope)
        scope.values.update({name: symbol("loop") for name in command.loops if name and name not in scope.branches})
        raw = list(command.words)
        prefix = Scope(scope.slurm, scope.task, scope)
        while raw and (match := re.match(r"([A-Za-z_]\w*)(\+?)=", raw[0])):
            target = scope if len(raw) == 1 or all(_assigns(word) for word in raw) else prefix
            _assign(target, raw.pop(0), command)
            if target is prefix:
                prefix.exported.add(match[1])
        if raw:
            words = self._words(raw, scope)
            shell = prefix if prefix.values else scope
            if words:
                self.found.seen.append((command, words, scope))
            if words and not self._builtin(words, raw, command, scope):
                self._program(words, command, shell, step, remote, depth)

    def _words(self, raw: list[str], scope: Scope) -> list[str]:
        words: list[str] = []
        for each in raw:
            expanded = expand_words(each, scope) if self.left > 0 else []
            self.left -= sum(map(len, expanded)) + 1
            words += expanded
        return words

    def _builtin(self, words: list[str], raw: list[str], command: Command, scope: Scope) -> bool:
        """Take in what changes the shell itself."""
        first = words[0]
        if first in _DECLARE:
            exports = first == "export" or any(re.match(r"-\w*x", word) for word in raw)
            for word in raw[1:]:
                name = re.match(r"[A-Za-z_]\w*", word)
                if name and _assigns(word):
                    _assign(scope, word, command)
                if name and exports:
                    scope.exported.add(name.group())
        elif first in ("source", "."):
            self.found.sourced |= re.search(r"activate|conda\.sh", " ".join(words)) is None
        elif first == "set" and ("-a" in words or "allexport" in words):
            scope.export_all = True
        elif first in ("mapfile", "readarray", "read"):
            hosts = "scontrol" in command.input or symbol("hosts") in expand(command.input, scope)
            for word in filter(str.isidentifier, words[1:]):
                scope.assign(word, [symbol("hosts") if hosts else UNKNOWN])
        elif first in ("printf", "getopts", "let", "unset") or first.startswith("(("):
            for changed in _changed(raw) if first != "unset" else words[1:]:
                scope.assign(changed, UNKNOWN, blocks=command.blocks)
        else:
            return first in _QUIET
        return True

    def _program(
        self, words: list[str], command: Command, scope: Scope, step: Step | None, remote: str, depth: int
    ) -> None:
        """Look through wrappers until a launcher, a shell or nothing known is found."""
        at = next((at for at, word in enumerate(words) if _interesting(words, at)), None)
        if at is None:
            return
        for word in words[:at]:  # env A=B torchrun, apptainer exec --env A=B
            if match := re.match(r"(?:--env=)?([A-Za-z_]\w*)=(.*)", word, re.DOTALL):
                scope = Scope(scope.slurm, scope.task, scope, {match[1]: match[2]}, {match[1]})
        name, rest = base(words[at]), words[at + 1 :]
        line = _line(command, words[at], command.line)
        if name == "srun":
            found, end, opaque = _srun_options(rest)
            options = {full(name, OPTIONS | SRUN_ONLY): value for name, value in found}
            started = self._step(options, command, line, opaque, (tuple(words[:at]), tuple(rest[end:])))
            self.found.steps.append(started)
            inner = Scope(scope.slurm, True, scope)
            for each in re.split(r",(?=\w+=)", options.get("export", "")):
                if "=" in each:
                    key, _, value = each.removeprefix("ALL,").partition("=")
                    inner.values[key] = value
                    inner.exported.add(key)
            if command.here and not rest[end:]:
                self.run(command.here.text, command.here.line, inner, started, remote, depth + 1)
            elif rest[end:]:
                self._program(rest[end:], command, inner, started, remote, depth)
        elif name in _REMOTE:
            self._program(rest, command, scope, step, name, depth)
        elif name == "eval":
            self.run(" ".join(rest), line, scope, step, remote, depth + 1)
        elif name in _SHELLS:
            self._shell(rest, command, scope, (step, remote, line, depth))
        else:
            self._launch(words[at], rest, command, scope, (step, remote, line), tuple(words[:at]))

    def _shell(self, rest: list[str], command: Command, scope: Scope, at: tuple[Step | None, str, int, int]) -> None:
        """bash -c TEXT, bash FILE, bash <<EOF."""
        step, remote, line, depth = at
        inner = Scope(scope.slurm, scope.task, scope)
        for index, word in enumerate(rest):
            if re.fullmatch(r"-[a-z]*c", word) and index + 1 < len(rest):
                start = next(
                    (number for raw, number in zip(command.words, command.lines, strict=True) if "\n" in raw), line
                )
                self.run(rest[index + 1], start, inner, step, remote, depth + 1)
                return
            if not word.startswith("-"):
                text, start, literal = self.found.files.get(word, ("", 0, True))
                if text:
                    self.run(
                        text if literal else expand(_double_quoted(text), scope), start, inner, step, remote, depth + 1
                    )
                return
        if command.here:
            self.run(command.here.text, command.here.line, inner, step, remote, depth + 1)

    def _step(
        self, options: dict[str, str], command: Command, line: int, opaque: tuple[str, ...],
        around: tuple[tuple[str, ...], tuple[str, ...]],
    ) -> Step:  # fmt: skip
        job, before = self.job, around[0]
        nodes, ntasks, per_node = (count(options.get(key)) for key in ("nodes", "ntasks", "ntasks-per-node"))
        background = command.then == "&"
        alone = nodes == 1 or ntasks == 1
        fan_out = alone and ("nodelist" in options or bool(command.loops) or background)
        if not options.keys() & {"ntasks", "ntasks-per-node"}:
            per_node, ntasks = job.ntasks_per_node, job.ntasks if nodes in (None, job.nodes) else None
        if "nodes" not in options and "nodelist" not in options:
            nodes = job.nodes if ntasks is None or not job.nodes else min(job.nodes, ntasks)
        gpus = next((count(options[key]) for key in ("gpus-per-node", "gres") if key in options), job.gpus_per_node)
        gpus_per_task = count(options.get("gpus-per-task")) or job.gpus_per_task
        unsure = bool(opaque) or unread(options) or (job.unread and not options.keys() >= {"nodes", "ntasks"})
        unsure |= nodes is None and "nodelist" in options
        resources = Resources(None if unsure else nodes, ntasks, per_node, gpus, gpus_per_task, unread=unsure)
        return Step(line, options, resources, fan_out, background, opaque, before, command, around[1])

    def _launch(
        self, name: str, rest: list[str], command: Command, scope: Scope, at: tuple[Step | None, str, int],
        wrapper: tuple[str, ...],
    ) -> None:  # fmt: skip
        kind, arguments = _kind(base(name), rest)
        options, end, opaque = launcher_options(arguments) if kind != "python" else ({}, 0, ())
        step, remote, line = at
        if arguments[:1] in (["-c"], ["-V"], ["--version"]):
            return  # it trains nothing
        found = self.found.launches if arguments[end:] or opaque else self.found.idle
        found.append(
            Launch(
                kind, line, options, opaque, arguments[end:], scope, step, remote,
                command.branch, command.function, command.loops, command.then == "&", command, wrapper,
                _unsure(wrapper, in_task=step is not None) or bool(step and _unsure(step.before, in_task=False)), name,
            )
        )  # fmt: skip


def _assigns(word: str) -> bool:
    return re.match(r"[A-Za-z_]\w*\+?=", word) is not None


def _assign(scope: Scope, word: str, command: Command) -> None:
    name, _, raw = word.partition("=")
    value = array_items(raw, scope) if raw.startswith("(") else expand(raw, scope)
    scope.assign(name.rstrip("+"), value, append=name.endswith("+"), blocks=command.blocks)


def _changed(words: Sequence[str]) -> set[str]:
    """Return the variables that arithmetic, printf -v or getopts may change."""
    names = re.compile(r"([A-Za-z_]\w*)\s*(?:\+\+|--|(?:<<|>>|[-+*/%&|^])?=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)")
    found = {one or other for one, other in names.findall(" ".join(words))}
    return found | set(words[2:3] if words[:2] == ["printf", "-v"] or words[:1] == ["getopts"] else ())


def _repeat(command: Command, scope: Scope) -> None:
    """Take in what an earlier pass of a loop may have left in the variables that one of its commands sets."""
    for word in command.words:
        match = re.match(r"([A-Za-z_]\w*)(\+?)=\"?(\$\{?\1\b)?", word)
        for name in [match[1]] if match else _changed([word]) if word.startswith("((") else []:
            before = scope.values.get(name)
            grows = match is not None and (match[2] or match[3])
            if isinstance(before, list):
                scope.values[name] = [*before, UNKNOWN]
            elif before is not None:
                scope.values[name] = f"{before} {UNKNOWN}" if grows else symbol("loop")


def base(word: str) -> str:
    """Return the name of a program."""
    return (likely(word) or "").rpartition("/")[2]


def _unsure(before: Sequence[str], *, in_task: bool) -> bool:
    """Return whether words in front of a launcher may hold srun, or name a function or program that may start it."""
    words = [word for word in before if not _assigns(word)]
    outside = takewhile(lambda word: base(word) not in _CONTAINERS, words)
    known = in_task or not words or base(words[0]) in _WRAPPERS
    return not known or any(symbols(word) & {"?", "maybe"} for word in outside)


def _srun_options(words: list[str]) -> tuple[list[tuple[str, str]], int, tuple[str, ...]]:
    """(options of srun, index of its program, words among them that cannot be read)."""
    found, end = parse_options(words, SRUN_FLAGS, SRUN_SHORT)
    opaque: list[str] = []
    while end < len(words) and re.fullmatch("(\0[?m][^\0]*\0)+", words[end]) and not PYTHON.match(words[end]):
        opaque.append(words[end])
        more, count = parse_options(words[end + 1 :], SRUN_FLAGS, SRUN_SHORT)
        found, end = found + more, end + 1 + count
    return found, end, tuple(opaque)


def _double_quoted(text: str) -> str:
    return '"' + text.replace('"', '\\"') + '"'


def _interesting(words: Sequence[str], at: int) -> bool:
    name = base(words[at])
    following = words[at + 1] if at + 1 < len(words) else ""
    if name in ("accelerate", "tune"):
        return following == ("launch" if name == "accelerate" else "run")
    return (
        name in {"srun", "eval", "torchrun", "deepspeed", "accelerate-launch"} | _REMOTE
        or (name in _SHELLS and "." not in words[at])
        or PYTHON.match(words[at]) is not None
    )


def _kind(name: str, rest: list[str]) -> tuple[str, list[str]]:
    """(kind, arguments) of a launcher."""
    if name == "accelerate":
        return "accelerate", rest[1:]
    if name == "tune":
        return "torchrun", rest[1:]
    if name == "accelerate-launch":
        return "accelerate", rest
    if name in ("torchrun", "deepspeed"):
        return name, rest
    modules = {
        "torch.distributed.run": "torchrun",
        "torch.distributed.launch": "torchrun",
        "torch.distributed.elastic.run": "torchrun",
        "accelerate.commands.launch": "accelerate",
        "deepspeed.launcher.runner": "deepspeed",
    }
    for at, word in enumerate(rest):
        if word == "-m" and at + 1 < len(rest) and rest[at + 1] in modules:
            return modules[rest[at + 1]], rest[at + 2 :]
        if not word.startswith("-"):
            if base(word) == "torchrun":
                return "torchrun", rest[at + 1 :]
            break
    return "python", rest


def launcher_options(words: list[str]) -> tuple[dict[str, str], int, tuple[str, ...]]:
    """(options up to the program, index of the program, words before it that cannot be read)."""
    found: dict[str, str] = {}
    at = 0
    opaque: list[str] = []
    while at < len(words):
        word = words[at]
        if not word.startswith("-"):
            if "?" in symbols(word) and not word.endswith((".py", ".sh")):
                opaque.append(word)
                at += 1
                continue
            break
        name, equals, value = word.lstrip("-").partition("=")
        name, at = name.replace("_", "-"), at + 1
        if name in _LAUNCHER_FLAGS:
            value = value or "true"
        elif not equals and at < len(words):
            value, at = words[at], at + 1
        found[name] = value
    return found, at, tuple(opaque)


def _line(command: Command, word: str, default: int) -> int:
    """The line on which a word was written; the command's own, if an expansion made it."""
    return next((line for raw, line in zip(command.words, command.lines, strict=True) if raw == word), default)
