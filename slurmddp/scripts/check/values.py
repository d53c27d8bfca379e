"""What a variable of a batch script holds, as far as it can be read.

A value is text. What cannot be known before the job runs stands in it as a symbol between two NUL characters:
`head` (name of the first node), `own` (name of the node that evaluates it), `early:SLURM_PROCID` (a variable of the
task, expanded in the batch shell), `varies` (other in each job) and so on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile

from slurmddp.scripts.check.shell import closing, quoted

UNKNOWN = "\0?\0"
_LONGEST = 4000  # characters of a value, or items of an array; beyond it, the value is unknown
_DEEPEST = 20  # substitutions in substitutions
#: Variables that bash or the login sets.
SET_BY_SHELL = re.compile(
    r"E?UID|PWD|OLDPWD|HOME|USER|LOGNAME|SHELL|SHLVL|PATH|LANG|LC_\w+|TERM|TMPDIR|HOST(NAME|TYPE)?|MACHTYPE|OSTYPE|IFS|LINENO|"
    r"S?RANDOM|SECONDS|EPOCH\w+|PPID|REPLY|OPT(ARG|IND|ERR)|GROUPS|DIRSTACK|FUNCNAME|PIPESTATUS|SHELLOPTS|COLUMNS|LINES|"
    r"COPROC|MAPFILE|COMP_\w+|BASH\w*|PS[0-4]"
)
#: Beginnings of the names that Slurm sets: another SLURM_ name in a script is a mistake.
_SLURM_NAMES = re.compile(
    r"SLURM_(ARRAY_|CLUSTER|CONF|CONTAINER|CPU|DIST|EXPORT_ENV|GPU|GTIDS|HET_|HINT|JOB|LAUNCH_|LOCALID|MEM|MPI|NET|NNODES|NODEID|"
    r"NODELIST|NODE_ALIASES|NPROCS|NTASKS|OOM|OVERCOMMIT|PRIO|PROCID|PROFILE|PTY|RESTART|RESV|RLIMIT|SCRIPT|SHARDS|SRUN|"
    r"STEP|SUBMIT|TASK|THREAD|TMPDIR|TOPOLOGY|TRES|UMASK|UNBUFFERED|WORKING|DEBUG|PMI|LOCAL)"
)
PER_TASK = {"SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID", "SLURM_TASK_PID", "SLURM_GTIDS"}
#: What the environment of a batch job or of a task holds under a name that no script assigns.
_FIXED = {
    "SLURM_LAUNCH_NODE_IPADDR": "head",
    "SLURM_SRUN_COMM_HOST": "head",
    "SLURM_JOB_NODELIST": "nodelist",
    "SLURM_NODELIST": "nodelist",
    "SLURM_STEP_NODELIST": "nodelist",
    "SLURM_SUBMIT_HOST": "login",
    **dict.fromkeys(
        ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT", "RANDOM",
         "SRANDOM", "EPOCHSECONDS", "EPOCHREALTIME", "SECONDS", "PPID", "BASHPID", "$", "SLURM_STEP_ID",
         "SLURM_STEPID"),
        "varies",
    ),
}  # fmt: skip
_PLAIN = re.compile(r"[^\\'\"`$]+")
#: Variables with another value in each shell. In a task, `random` stands for them, and for a port found at random.
_RANDOM = {"RANDOM", "SRANDOM", "PPID"}
_SYMBOL = re.compile("\0([^\0]*)\0")
_PARAMETER = re.compile(r"\$(?:([A-Za-z_]\w*)|([0-9#?$!@*-]))")
_BRACED = re.compile(r"([#!]?)([A-Za-z_]\w*|[0-9@*#?$!]+)(\[[^]]*\])?(.*)", re.DOTALL)
_PORT_SEARCH = re.compile(r"\b(shuf|comm|ss|lsof|netstat|socket|freeport|free_port|date|uuidgen|openssl|mktemp)\b")
_NODE_NAME = re.compile(r"(^|[|;&(\s])(/bin/)?hostname\b|\buname -n|\bip\s+(-\S+\s+)*(addr|a|route)\b|\bifconfig\b")
_OWN_FOLDER = re.compile(r"(dirname|realpath|readlink)\s[^|]*(\$\{?0\b|\$\{?BASH_SOURCE)")
_REWRITES = re.compile(r"sed|awk|\[|tr -d|python|perl|nodeset|hostlist|grep")
_FIRST_LINE = re.compile(r"head\s+(-n\s*1|-1|--lines[= ]1)\b|sed\s+(-n\s+)?['\"]?(1p|1q|1!d)|NR\s*==\s*1|\bread\b")

Value = str | list[str]


def symbol(name: str) -> str:
    """Return what stands in a value for something that is known only when the job runs."""
    return f"\0{name}\0"


def symbols(value: str) -> set[str]:
    """Return the symbols of a value: `early` for `early:NAME`."""
    return {name.partition(":")[0] for name in _SYMBOL.findall(value)}


def symbol_name(value: str, kind: str) -> str:
    """Return NAME of the first symbol `kind:NAME`; empty, if there is none."""
    return next((name.partition(":")[2] for name in _SYMBOL.findall(value) if name.partition(":")[0] == kind), "")


def number(value: str | None) -> int | None:
    """Return the whole number that a value surely is."""
    return int(value) if value and re.fullmatch(r"[0-9]{1,9}", value) else None


def likely(value: str | None) -> str | None:
    """Return the value with its defaults (`${PORT:-29500}`) taken as set."""
    return value.replace(symbol("maybe"), "") if value is not None else None


@dataclass
class Scope:
    """The variables of one shell. task: it runs in a Slurm step, once per task; parent: the shell it inherits from."""

    slurm: Mapping[str, str]
    task: bool = False
    parent: Scope | None = None
    values: dict[str, Value] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    export_all: bool = False
    #: Name -> (blocks around its assignment, value before it): behind the innermost of them, both are possible.
    branches: dict[str, list[tuple[tuple[int, ...], Value | None]]] = field(default_factory=dict)

    def assign(self, name: str, value: Value, *, append: bool = False, blocks: tuple[int, ...] = ()) -> None:
        """Set a variable. blocks: the branches, loops and functions that the assignment is in."""
        before = self.values.get(name)
        if append and before is not None:
            value = [*_items(before), *_items(value)] if isinstance(before, list) else before + _text(value)
        passed = self.branches.setdefault(name, [])
        if blocks and (not passed or passed[-1][0] != blocks):
            passed.append((blocks, before))
        elif not blocks:
            self.branches.pop(name, None)
        self.values[name] = _bounded(value)  # it may double itself in each line

    def enter(self, blocks: tuple[int, ...]) -> None:
        """Leave the blocks of earlier commands that are not around the next one."""
        for name, passed in list(self.branches.items()):
            while passed and blocks[: len(passed[-1][0])] != passed[-1][0]:
                _, before = passed.pop()
                self.values[name] = _either(before, self.values[name])
            if not passed:
                del self.branches[name]

    def inherited(self, name: str) -> Value | None:
        """Return what a program started by this shell finds under `name`; None, if the script never sets it."""
        if name in self.values:
            return self.values[name] if name in self.exported or self.export_all else None
        return self.parent.inherited(name) if self.parent else None

    def lookup(self, name: str) -> Value:
        """Return the value of a variable in this shell."""
        if name in self.values:
            return self.values[name]
        if self.parent is not None:
            value = self.parent.inherited(name)
            if value is not None:
                return value
            if self.parent.holds(name):
                return symbol(f"unexported:{name}")
        if name in PER_TASK:
            return symbol(f"{'task' if self.task else 'early'}:{name}")
        if name in ("HOSTNAME", "HOST", "SLURMD_NODENAME", "SLURM_TOPOLOGY_ADDR"):
            return symbol("own" if self.task else "head")
        if name in self.slurm:
            return self.slurm[name]
        if name in ("UID", "EUID"):
            return symbol(f"user:{name}")
        if self.task and name in _RANDOM:
            return symbol("random")
        if name in _FIXED:
            return symbol(_FIXED[name])
        wrong = name.startswith("SLURM_") and not _SLURM_NAMES.match(name)
        return symbol(f"{'nosuch' if wrong else '?'}:{name}")

    def holds(self, name: str) -> bool:
        """Tell whether this shell, or one above it, assigns the variable."""
        return name in self.values or (self.parent is not None and self.parent.holds(name))


def _either(before: Value | None, value: Value) -> Value:
    """Return what is known of a variable that holds one of two values: the words with which both begin."""
    if before == value:
        return value
    if isinstance(before, list) or isinstance(value, list):
        return [*_common(_items(before or []), _items(value)), UNKNOWN]
    if before is None:
        return value if symbol("maybe") in value else value + symbol("maybe")
    words, others = re.split(r"(\s+)", likely(before) or ""), re.split(r"(\s+)", likely(value) or "")
    if words == others:
        return value
    same = _common(words, others)
    start = same[: len(same) - len(same) % 2] if len(same) < min(len(words), len(others)) else [*same, " "]
    return "".join(start) + _unknown(_kept(before) & _kept(value))


def _common(words: list[str], others: list[str]) -> list[str]:
    return [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(words, others, strict=False))]


def _items(value: Value) -> list[str]:
    return value if isinstance(value, list) else [value]


def _bounded(value: Value) -> Value:
    return UNKNOWN if len(value) > _LONGEST or sum(map(len, _items(value))) > _LONGEST else value


def _text(value: Value) -> str:
    """A variable used without an index: the first item of an array."""
    if isinstance(value, list):
        return (value[0] if value else "").replace(symbol("hosts"), symbol("head"))
    return value


def expand(raw: str, scope: Scope, depth: int = 0) -> str:
    """Return one value: quotes removed, variables replaced, not split into words."""
    return "".join(piece for piece, _ in _pieces(raw, scope, depth))


def expand_words(raw: str, scope: Scope) -> list[str]:
    """Return the words that bash makes of a written word: unquoted variables and arrays may give several or none."""
    words: list[str] = []
    current: str | None = None
    for piece, splits in _pieces(raw, scope, 0):
        if not splits:
            current = (current or "") + piece
            continue
        parts = re.split(r"[ \t\n]+", piece)
        for index, part in enumerate(parts):
            if index and current is not None:
                words.append(current)
                current = None
            if part:
                current = (current or "") + part
    return words if current is None else [*words, current]


def array_items(raw: str, scope: Scope) -> list[str]:
    """Return the items of `( ... )`."""
    from slurmddp.scripts.check.shell import commands

    items: list[str] = []
    for word in (word for each in commands(raw[1:-1]) for word in each.words):
        items += expand_words(word, scope)
        if _bounded(items) != items:
            break
    return items


def _pieces(raw: str, scope: Scope, depth: int, *, inside: bool = False) -> list[tuple[str, bool]]:
    """(text, whether bash splits it at blanks) of a word; inside: it stands in double quotes."""
    if depth > _DEEPEST:
        return [(UNKNOWN, False)]
    found: list[tuple[str, bool]] = []
    at = size = 0
    while at < len(raw):
        mark = raw[at]
        if plain := _PLAIN.match(raw, at):
            found.append((plain.group(), False))
            at = plain.end()
        elif mark == "\\" and at + 1 < len(raw):
            following = raw[at + 1]
            keep = inside and following not in '$`"\\\n'
            found.append(("" if following == "\n" else mark + following if keep else following, False))
            at += 2
        elif mark == "'" and not inside:
            end = quoted(raw, at)
            found.append((raw[at + 1 : end - 1], False))
            at = end
        elif mark == '"' and not inside:
            end = quoted(raw, at)
            found += _pieces(raw[at + 1 : end - 1], scope, depth + 1, inside=True) or [("", False)]
            at = end
        elif mark == "`" or (mark == "$" and at + 1 < len(raw)):
            value, at = _substitution(raw, at, scope, depth + 1)
            items = _items(value)
            size += sum(map(len, items)) + len(items)
            if size > 2 * _LONGEST:
                return [(UNKNOWN, False)]
            for index, item in enumerate(items):
                if index:
                    found.append((" ", True))
                found.append((item, not inside))
        else:
            found.append((mark, False))
            at += 1
    return found


def _substitution(raw: str, at: int, scope: Scope, depth: int) -> tuple[Value, int]:
    """Return what starts with `$` or a backtick, and the index behind it."""
    if raw[at] == "`":
        end = quoted(raw, at)
        return _command_output(raw[at + 1 : end - 1], scope, depth), end
    if raw.startswith("$((", at):
        end = closing(raw, at + 2, ")")
        return _arithmetic(raw[at + 3 : end - 2], scope), end
    if raw.startswith("$(", at):
        end = closing(raw, at + 2, ")")
        return _command_output(raw[at + 2 : end - 1], scope, depth), end
    if raw.startswith("${", at):
        end = closing(raw, at + 2, "}")
        return _braced(raw[at + 2 : end - 1], scope, depth), end
    match = _PARAMETER.match(raw, at)
    if match is None:
        return "$", at + 1
    return (
        _text(scope.lookup(match[1]))
        if match[1]
        else symbol(("random" if scope.task else "varies") if match[2] == "$" else "?")
    ), match.end()


def _braced(inner: str, scope: Scope, depth: int) -> Value:
    """`${...}`."""
    match = _BRACED.match(inner)
    if match is None:
        return UNKNOWN
    sign, name, index, rest = match.groups()
    positional = not name[0].isalpha() and name[0] != "_"
    value: Value = UNKNOWN if positional else scope.lookup(name)
    if sign == "#":
        return scope.slurm.get("SLURM_NNODES", UNKNOWN) if symbol("hosts") in _items(value) else UNKNOWN
    if sign == "!":
        return UNKNOWN
    if index in ("[@]", "[*]"):
        return value
    if index is not None and index != "[0]":
        return symbol("host") if isinstance(value, list) and symbol("hosts") in value else UNKNOWN
    text = _text(value)
    if rest[:2] in (":-", ":=") or rest[:1] in ("-", "="):
        if symbols(text) & {"?", "unset", "unexported", "nosuch"}:
            return expand(rest.lstrip(":")[1:], scope, depth) + symbol("maybe")
        return text
    if not rest or rest[:1] == "?" or rest[:2] == ":?":
        return text
    if not scope.task and name in ("0", "BASH_SOURCE") and rest.startswith("%/"):
        return symbol("spool")
    return _unknown(_kept(text) - ({"nodelist"} if rest not in ("%%,*", "%,*") else set()))


def _arithmetic(inner: str, scope: Scope) -> str:
    """`$((...))` of numbers with one kind of operator; otherwise unknown."""
    seen: set[str] = set()

    def value(match: re.Match[str]) -> str:
        text = _text(scope.lookup(match[1]))
        seen.update(name for name in _SYMBOL.findall(text))
        return text

    text = re.sub(r"([A-Za-z_]\w*)", value, re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", inner)).replace(" ", "")
    if not seen and (match := re.fullmatch(r"\(?(\d{1,9})\)?([*/+-])\(?(\d{1,9})\)?", text)):
        first, second = int(match[1]), int(match[3])
        results = {"*": first * second, "+": first + second, "-": first - second, "/": first // (second or 1)}
        return str(results[match[2]])
    if not seen and text.isdigit():
        return text
    return _unknown(_kept("".join(map(symbol, seen))) | ({"varies"} if "$(" in inner else set()))


def _command_output(inner: str, scope: Scope, depth: int) -> str:
    """`$(...)`: what matters is whether it names a node, and which."""
    if "scontrol" in inner and re.search(r"show\s+hostnames?\b", inner):
        if re.search(r"\bwc\b", inner):
            return scope.slurm.get("SLURM_NNODES", UNKNOWN)
        return symbol("head" if _FIRST_LINE.search(inner) else "hosts")
    if not scope.task and _OWN_FOLDER.search(inner):
        return symbol("spool")
    seen = _kept(expand(re.sub(r"['\"]", "", inner), scope, depth))
    if _REWRITES.search(inner):
        seen.discard("nodelist")
    if _PORT_SEARCH.search(inner):
        seen.add("random" if scope.task and "SLURM_" not in inner else "varies")
    if _NODE_NAME.search(inner) and not seen & {"head", "host"}:
        seen.add("own" if scope.task and "srun" not in inner else "head")
    if re.search(r"hostname\s+(-i\b|-I\b|--ip-address|--all-ip)", inner):
        seen.add("hostname-ip")
    return _unknown(seen)


def _kept(text: str) -> set[str]:
    """Return the symbols that say something about a value made from this one."""
    return {name for name in _SYMBOL.findall(text) if name[:1] != "?" and name != "maybe"}


def _unknown(seen: set[str]) -> str:
    return UNKNOWN + "".join(symbol(name) for name in sorted(seen))
