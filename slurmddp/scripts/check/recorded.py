"""What bash would start for a script, in imagined jobs that differ in what only a job knows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from slurmddp.scripts.check.directives import OPTIONS, SRUN_ONLY, full, slurm_variables
from slurmddp.scripts.check.launches import PYTHON, Launch, Walker, _kind, _srun_options, launcher_options
from slurmddp.scripts.check.script import Script
from slurmddp.scripts.check.values import SET_BY_SHELL, UNKNOWN, symbols
from slurmddp.scripts.sandbox.evaluate import Evaluated, Job, Started, Unavailable, available, evaluate, variables_of
from slurmddp.shared.files import read_plain

_BESIDE = re.compile(
    r"^[ \t]*(?:srun\s[^\n]*\s)?(?:source|\.|bash|sh)\s+[\"']?(?:\$\{?SLURM_SUBMIT_DIR\}?/|\./)?([\w.][\w./-]*)", re.M
)
_READ = re.compile(r"\$\{?#?([A-Za-z_]\w*)")
_ASSIGNED = re.compile(
    r"\b([A-Za-z_]\w*)(?:\[[^]\n]{0,200}\])?\+?=|\b(?:for|read|mapfile|readarray|local|declare|printf)\s+(?:-\w+\s+)*([A-Za-z_]\w*)"
)
_LARGEST = 64 * 1024  # bytes of a file that the script reads
_LAUNCHERS = {"torchrun", "accelerate", "accelerate-launch", "deepspeed", "tune"}
#: Options in which one launch may differ from the script's text without a fault of ours.
_INFORMS = {
    "head", "own", "early", "nodelist", "login", "unexported", "nosuch", "unset", "compressed", "random", "user",
    "hostname-ip",
}  # fmt: skip


def unset_names(text: str) -> set[str]:
    """Return the variables that a script reads and never sets: those of the shell that submits it."""
    code = re.sub(r"(?m)^[ \t]*#.*$", "", text)
    assigned = {one or other for one, other in _ASSIGNED.findall(code)}
    return {
        name
        for name in set(_READ.findall(code)) - assigned
        if not name.startswith(("SLURM_", "SANDBOX_", "BASH")) and not SET_BY_SHELL.fullmatch(name)
    }


def imagined(
    script: Script, variables: Mapping[str, str] | None = None, other: Mapping[str, str] | None = None
) -> list[Job]:
    """Return the jobs to evaluate a script in. variables: what the shell that submits it has; other: what it may have,
    so that what follows from it is unknown; variables=None: both an empty shell and one in which every variable is set.
    """
    options = {each.name: each.value for each in script.directives}
    slurm = {name: value for name, value in slurm_variables(options).items() if "\0" not in value}
    slurm = {name: value for name, value in slurm.items() if not name.endswith(("NNODES", "NUM_NODES"))}
    nodes, tasks, gpus = script.job.nodes or 1, script.job.tasks_per_node or 1, script.job.gpus_per_node or 4
    nodes = min(nodes, 64)

    def job(number: int, hosts: tuple[str, ...], nodelist: str, files: bool, set_there: Mapping[str, str]) -> Job:
        now, unknown = 1700000000 + number * 7, 20000 + number % 9973
        folder = script.option("chdir") or ""
        return Job(number, hosts, nodelist, tasks, gpus, files, now, unknown, folder, set_there, slurm)

    def first(count: int) -> tuple[tuple[str, ...], str]:
        return tuple(f"gpu-a{each}" for each in range(1, count + 1)), f"gpu-a[1-{count}]" if count > 1 else "gpu-a1"

    others = tuple(f"n{number:03d}" for number in range(107, 107 + nodes))
    given = dict(variables or {})
    jobs = [
        job(4242001, *first(nodes), True, given),
        job(5353007, others, f"n[107-{106 + nodes}]" if nodes > 1 else others[0], False, {**given, **(other or {})}),
    ]
    if other is not None:  # what a site sets on its nodes, and sbatch's command line
        names = {name for name in _READ.findall(script.text) if name.startswith("SLURM_")} - set(variables_of(jobs[1]))
        more = {**jobs[1].variables, **{name: f"@{name}@" for name in names}}
        jobs[1] = replace(jobs[1], variables=more, arguments=("@1@", "@2@"))
    if variables is None and (names := unset_names(script.text)):
        jobs.append(job(4242001, *first(nodes), True, {name: f"@{name}@" for name in names}))
    if script.option("nodes") is None or "-" in (script.option("nodes") or ""):
        jobs.append(job(4242001, *first(nodes + 1), True, given))
    return jobs


def beside(script: Script) -> dict[str, str]:
    """Return the text files of the script's folder that it sources or runs. A link that leads out of it is not read."""
    found: dict[str, str] = {}
    folder = script.path.parent.resolve()
    for name in dict.fromkeys(_BESIDE.findall(script.text)):
        if any(part.startswith(".") and part != ".env" for part in Path(name).parts):
            continue  # .git/config and the like hold credentials, which the script could show us as a word
        try:
            if len(data := read_plain(folder / name, _LARGEST + 1, below=folder)) <= _LARGEST:
                found[name] = data.decode("utf-8", errors="replace")
        except OSError:
            continue  # the script's own matter: bash goes on without it
    return found


#: What was evaluated already, by all that it depends on: a correction and its check look at the same script.
_recorded: dict[tuple[str, ...], tuple[Evaluated, ...] | None] = {}
_MOST_RECORDED = 8


def record(
    script: Script, variables: Mapping[str, str] | None = None, other: Mapping[str, str] | None = None
) -> tuple[Evaluated, ...] | None:
    """Return what each imagined job starts; None, if this machine has no sandbox, or the script no end."""
    if not script.is_shell or "\r" in script.text or not available():
        return None
    jobs, files = imagined(script, variables, other), beside(script)
    key = (script.text, script.path.name, repr(jobs), repr(files))
    if key not in _recorded:
        if len(_recorded) >= _MOST_RECORDED:
            _recorded.clear()
        try:
            _recorded[key] = tuple(evaluate(script.text, jobs, script.path.name, files))
        except Unavailable:
            _recorded[key] = None
    runs = _recorded[key]
    return runs if runs and all(each.ended for each in runs) else None


def programs(run: Evaluated) -> Iterator[tuple[Started, str, list[str]]]:
    """Yield (start, kind, arguments) of the launchers and Pythons that a job starts."""
    for each in run.started:
        if each.words and (each.name in _LAUNCHERS or PYTHON.match(each.name)):
            rest = list(each.words[1:])
            if each.name == "accelerate" and rest[:1] != ["launch"]:
                continue
            kind, arguments = _kind(each.name, rest)
            if arguments[:1] not in ([], ["-c"], ["-V"], ["--version"]):
                yield each, kind, arguments


def _starts(launch: Launch, run: Evaluated) -> list[list[str]]:
    """Return the arguments of each start of a launch in a job."""
    lines = {*launch.command.lines, *(launch.step.command.lines if launch.step else ()), launch.line}
    first, last = min(lines), max(lines)
    return [arguments for each, kind, arguments in programs(run) if kind == launch.kind and first <= each.line <= last]


def refine(script: Script, runs: Sequence[Evaluated]) -> None:
    """Let the launches say what bash makes of the script, where its text says something else or nothing.

    A launch that bash does not start in each of the jobs is no reason for an error any more."""
    for launch in script.found.launches:
        starts = [_starts(launch, run) for run in runs]
        if not all(starts):
            launch.unsure = True
        else:
            _step(script, launch, runs)
            _options(launch, [arguments for each in starts for arguments in each])


def _step(script: Script, launch: Launch, runs: Sequence[Evaluated]) -> None:
    """Let bash say the options of srun that the text does not."""
    if launch.step is None or not launch.step.opaque:
        return
    step, lines = launch.step, {*launch.step.command.lines, launch.step.line}
    words = {
        each.words[1:]
        for run in runs
        for each in run.started
        if each.name == "srun" and min(lines) <= each.line <= max(lines)
    }
    if len(options := {tuple(_srun_options(list(each))[0]) for each in words}) == 1:
        named = {full(name, OPTIONS | SRUN_ONLY): value for name, value in options.pop()}
        walker = Walker(script.job)
        launch.step = walker._step(named, step.command, step.line, (), (step.before, step.program))
        launch.unsure = False


def _end_of_options(kind: str, arguments: list[str]) -> int:
    return 0 if kind == "python" else launcher_options(arguments)[1]


def known_program(launch: Launch, runs: Sequence[Evaluated]) -> None:
    """Let bash say the words of the program that the text does not, where all jobs have the same."""
    starts = [arguments for run in runs for arguments in _starts(launch, run)]
    found = [arguments[_end_of_options(launch.kind, arguments) :] for arguments in starts]
    if not found or not any("\0" in word for word in launch.program) or len({len(each) for each in found}) != 1:
        return
    same = [
        words[0] if len(set(words)) == 1 and "/." not in words[0] else UNKNOWN for words in zip(*found, strict=True)
    ]
    if len(same) == len(launch.program):
        pairs = zip(launch.program, same, strict=True)
        launch.program = [text if "\0" not in text or "\0" in word else word for text, word in pairs]
    elif "\0" not in "".join(same):
        launch.program = same


def _options(launch: Launch, arguments: list[list[str]]) -> None:
    if launch.kind == "python":
        return
    seen = [launcher_options(each)[0] for each in arguments]
    if launch.opaque and len({tuple(each[launcher_options(each)[1] :]) for each in arguments}) > 1:
        return  # a variable of the user's shell may be options, or the program
    names = set.union(*map(set, seen))
    for name in {*names, *launch.options}:
        values = {each.get(name) for each in seen}
        told = launch.options.get(name)
        if told is not None and symbols(told) & _INFORMS:
            continue
        if len(values) > 1:
            if told is None or not symbols(told):
                launch.options[name] = UNKNOWN
        elif (value := next(iter(values))) is None:
            launch.options.pop(name, None)
        elif told != value:
            launch.options[name] = value
    if launch.opaque and all(each.keys() == seen[0].keys() for each in seen):
        launch.opaque = ()


_RANK = re.compile(r"\d+")


def _signatures(runs: Sequence[Evaluated]) -> list[set[tuple[object, ...]]]:
    """Return which programs each job starts: kind, words (ranks and hosts aside), folder, files and container."""
    found = []
    for run in runs:
        signs = set()
        hosts = re.compile("|".join(map(re.escape, ("localhost", "127.0.0.1", *run.job.hosts))))
        for each, kind, arguments in programs(run):
            program = arguments[_end_of_options(kind, arguments) :]
            words = sorted(_RANK.sub("#", hosts.sub("@", word)) for word in program)
            signs.add((kind, each.words[0], *words, each.folder, each.streams[:2], each.contained))
        found.append(signs)
    return found


def _agree(runs: Sequence[Evaluated]) -> bool:
    """Tell whether all launchers of a step meet at one place."""
    names = ("rdzv-endpoint", "rdzv-id", "rdzv-backend", "master-addr", "master-port", "main-process-ip", "nnodes")
    for run in runs:
        steps: dict[tuple[int, str], set[tuple[str | None, ...]]] = {}
        for each, kind, arguments in programs(run):
            if kind != "python" and each.step:
                options = launcher_options(arguments)[0]
                steps.setdefault((each.step, kind), set()).add(tuple(options.get(name) for name in names))
        if any(len(places) > 1 for places in steps.values()):
            return False
    return True


def same_programs(before: Script, after: Script) -> bool | None:
    """Tell whether a corrected script starts the programs that it started, with the same words, folder and files, and
    whether their ranks meet; None, if bash cannot evaluate them here."""
    old, new = record(before), record(after)
    if old is None or new is None or len(old) != len(new) or not any(_signatures(old)):
        return None
    return _signatures(old) == _signatures(new) and (_agree(new) or not _agree(old))
