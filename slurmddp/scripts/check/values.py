"""What a recorded word is, in several imagined jobs: known, or what it depends on.

A value is text. What cannot be known before the job runs stands in it as a symbol between two NUL characters:
`head` (name of the first node), `own` (name of the node that evaluates it), `early:SLURM_PROCID` (a variable of the
task, expanded in the batch shell), `?:NAME` (a variable of the shell that submits), `tilde` (in quotes, so no home),
`varies` (other in each job)."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from slurmddp.scripts.sandbox.evaluate import HOME, SUBMIT, TMPDIR, USER_ID, Job, Started

UNKNOWN = "\0?\0"
#: Variables that bash or the login sets.
SET_BY_SHELL = re.compile(
    r"E?UID|PWD|OLDPWD|HOME|USER|LOGNAME|SHELL|SHLVL|PATH|LANG|LC_\w+|TERM|TMPDIR|HOST(NAME|TYPE)?|MACHTYPE|OSTYPE|IFS|LINENO|"
    r"S?RANDOM|SECONDS|EPOCH\w+|PPID|REPLY|OPT(ARG|IND|ERR)|GROUPS|DIRSTACK|FUNCNAME|PIPESTATUS|SHELLOPTS|COLUMNS|LINES|"
    r"COPROC|MAPFILE|COMP_\w+|BASH\w*|PS[0-4]"
)
#: Beginnings of the names that Slurm sets: another SLURM_ name in a script is a mistake.
SLURM_NAMES = re.compile(
    r"SLURM_(ARRAY_|CLUSTER|CONF|CONTAINER|CPU|DIST|EXPORT_ENV|GPU|GTIDS|HET_|HINT|JOB|LAUNCH_|LOCALID|MEM|MPI|NET|NNODES|NODEID|"
    r"NODELIST|NODE_ALIASES|NPROCS|NTASKS|OOM|OVERCOMMIT|PRIO|PROCID|PROFILE|PTY|RESTART|RESV|RLIMIT|SCRIPT|SHARDS|SRUN|"
    r"STEP|SUBMIT|TASK|THREAD|TMPDIR|TOPOLOGY|TRES|UMASK|UNBUFFERED|WORKING|DEBUG|PMI|LOCAL)"
)
PER_TASK = {"SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID", "SLURM_TASK_PID", "SLURM_GTIDS"}
#: What these variables hold in the batch shell of one imagined job, so that it is recognised in the words of tasks.
EARLY = {"SLURM_PROCID": "7410031", "SLURM_NODEID": "7420033", "SLURM_LOCALID": "7430037"}
SYMBOL = re.compile("\0([^\0]*)\0")
_READ = re.compile(r"\$\{?#?([A-Za-z_]\w*)")
_UNEXPORTED = re.compile("\0unexported:[^\0]*\0")
_TOKEN = re.compile("\0[^\0]*\0|[A-Za-z0-9_]+|.", re.DOTALL)
#: What a variable, or an argument, of the submitting shell is in the imagined job that shows its name.
GIVEN = re.compile(r"(?:/\.)?@([A-Za-z_]\w*|[0-9])@")


def symbol(name: str) -> str:
    """Return what stands in a value for something that is known only when the job runs."""
    return f"\0{name}\0"


def symbols(value: str) -> set[str]:
    """Return the symbols of a value: `early` for `early:NAME`."""
    return {name.partition(":")[0] for name in SYMBOL.findall(value)}


def symbol_name(value: str, kind: str) -> str:
    """Return NAME of the first symbol `kind:NAME`; empty, if there is none."""
    return next((name.partition(":")[2] for name in SYMBOL.findall(value) if name.partition(":")[0] == kind), "")


def names_in(text: str) -> set[str]:
    """Return the variables that a text of bash reads."""
    return set(_READ.findall(text))


def likely(value: str | None) -> str | None:
    """Return the value with its defaults (`${PORT:-29500}`) taken as set."""
    return value.replace(symbol("maybe"), "") if value is not None else None


class Seen(NamedTuple):
    """One word in one imagined job, by the tasks that had it; tasks: none, if the batch shell had it."""

    job: Job
    words: Sequence[str]
    tasks: Sequence[Started] = ()

    def value(self) -> str:
        """Return the word with the names of this job replaced by what they are."""
        hosts = [each.task.get("SLURMD_NODENAME", "") for each in self.tasks] or [""]
        first, *others = (_masked(self.job, word, host) for word, host in zip(self.words, hosts, strict=True))
        for at, other in enumerate(others, 1):
            if other.replace(symbol("own"), symbol("head")) == first:
                return other
            if other != first:
                return differ(first, other, self._per_task(at))
        return first

    def _per_task(self, at: int) -> str:
        for name in ("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID"):
            one, two = (task.task.get(name, "") for task in (self.tasks[0], self.tasks[at]))
            pairs = ((one, self.words[0]), (two, self.words[at]))
            if one != two and all(re.search(rf"(?<!\d){rank}(?!\d)", word) for rank, word in pairs):
                return symbol(f"task:{name}")
        return symbol("random")


def _masked(job: Job, word: str, host: str) -> str:
    if word.startswith(f"{HOME}/") or word == HOME:
        word = "~" + word[len(HOME) :]
    elif word.startswith("~"):  # in quotes, where bash leaves it
        word = symbol("tilde") + word[1:]
    pattern, names = _names(job.id, job.unknown, job.hosts, job.nodelist, host)
    word = pattern.sub(lambda match: names[match[0]], word)
    return re.sub(r"(?<!\w)\d+\(x\d+\)", symbol("compressed:SLURM_TASKS_PER_NODE"), word)


def _unexported(job: Job, value: str, hidden: Mapping[str, str]) -> str:
    """Return a value with the names of the variables that are not exported in the place of what they hold."""
    texts = {_masked(job, text, ""): name for name, text in sorted(hidden.items()) if text}
    pattern = "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    return re.sub(pattern, lambda match: symbol(f"unexported:{texts[match[0]]}"), value) if texts else ""


@lru_cache(maxsize=512)
def _names(
    id: int, unknown: int, hosts: tuple[str, ...], nodelist: str, host: str
) -> tuple[re.Pattern[str], dict[str, str]]:
    """Return what names in an imagined job stand for, and a pattern of them. host: where the word was evaluated."""
    places = {
        SUBMIT: "?:SLURM_SUBMIT_DIR", HOME: "?:HOME", TMPDIR: "?:TMPDIR", f"/var/spool/slurmd/job{id}": "spool",
    }  # fmt: skip
    names = {
        nodelist: "nodelist", str(id): "varies", str(unknown): "varies", "login1": "login", "sandboxuser": "?:USER",
        str(USER_ID): "user:UID",
    }  # fmt: skip
    for at, name in enumerate(hosts, 1):
        kind = "head" if at == 1 else "own" if name == host else "host"
        names |= {
            name: kind,
            f"10.0.0.{at}": kind if kind != "own" else "host",
            f"10.9.0.{at}": f"{kind}\0\0hostname-ip",
        }
    longest = sorted(map(re.escape, names), key=len, reverse=True)
    alone = rf"(?<![\w.-])(?:{'|'.join(longest)})(?![\w-]|\.\d)"
    pattern = re.compile("|".join([*map(re.escape, places), alone]))
    return pattern, {name: symbol(kind) for name, kind in (places | names).items()}


def unify(
    runs: Sequence[Seen], given: Seen | None = None, shown: Seen | None = None, unset: Collection[str] = (),
    hidden: Mapping[str, str] | None = None,
) -> str:  # fmt: skip
    """Return what a word is in all imagined jobs. given: in one whose submitting shell sets every variable; shown: in
    one in which the batch shell exports everything, hidden besides, and has ranks of its own. unset: options that
    Slurm's variables would need."""
    value = first = runs[0].value()
    for each in runs[1:]:
        value = differ(value, each.value(), symbol("varies"))
    if shown and (other := shown.value()) != first:
        for name, rank in EARLY.items():
            other = other.replace(rank, symbol(f"early:{name}"))
        if "early" in symbols(other):
            return other
        if (named_so := _unexported(shown.job, other, hidden or {})) and _UNEXPORTED.sub("", named_so) == first:
            return named_so
        value = differ(value, other, UNKNOWN)
    if given and (other := given.value()) != first:
        there = named(other, unset)
        if there == other:
            return differ(value, other, UNKNOWN)  # it depends on whether a variable is set
        if re.sub("\0(\\?|unset|nosuch):[^\0]*\0", "", there) == re.sub("\0\\?:[^\0]*\0", "", first):
            return there if value == first else there + symbol("varies")
        return value + symbol("maybe")
    return named(value, unset)


def differ(one: str, other: str, what: str) -> str:
    """Return what two values share at their ends, and a symbol between."""
    if one == other:
        return one
    words, others = _TOKEN.findall(one), _TOKEN.findall(other)
    start, end = _same(words, others)
    between = "".join([*words[start : len(words) - end], *others[start : len(others) - end]])
    kept = {name for name in SYMBOL.findall(between) if name in ("own", "hostname-ip")}
    return "".join([*words[:start], what, *map(symbol, sorted(kept)), *words[len(words) - end :]])


def merge(one: Sequence[str], other: Sequence[str], what: str) -> list[str]:
    """Return the words in which two lists agree; what: what stands for the others."""
    if len(one) == len(other):
        return [differ(first, second, what) for first, second in zip(one, other, strict=True)]
    start, end = _same(one, other)
    return [*one[:start], what, *one[len(one) - end :]]


def _same(one: Sequence[str], other: Sequence[str]) -> tuple[int, int]:
    """(how many words two lists begin with alike, how many of the others they end with)."""
    most = min(len(one), len(other))
    start = next((at for at in range(most) if one[at] != other[at]), most)
    return start, next((at for at in range(most - start) if one[-1 - at] != other[-1 - at]), most - start)


def only_named(word: str) -> bool:
    """Tell whether a word is nothing but variables of the submitting shell: without them, there is no such word."""
    return "\0" in named(word) and not SYMBOL.sub("", named(word))


def named(word: str, unset: Collection[str] = ()) -> str:
    """Return a word with the variables of the submitting shell, which one imagined job shows by their names."""

    def kind(name: str) -> str:
        slurm = name.startswith("SLURM_")
        return "nosuch" if slurm and not SLURM_NAMES.match(name) else "unset" if slurm and name in unset else "?"

    return GIVEN.sub(lambda match: symbol(f"{kind(match[1])}:{match[1]}"), word)
