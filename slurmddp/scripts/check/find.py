"""From what the imagined jobs started to the launches of the script: which words all of them agree on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce

from slurmddp.scripts.check.directives import OPTIONS, SRUN_ONLY, Resources, count, full, unread
from slurmddp.scripts.check.launches import (
    Found,
    Launch,
    Step,
    around,
    base,
    kind_of,
    launcher_options,
    programs,
    srun_options,
)
from slurmddp.scripts.check.script import Script
from slurmddp.scripts.check.shell import Command
from slurmddp.scripts.check.values import EARLY, UNKNOWN, Seen, merge, named, only_named, symbol, symbols, unify
from slurmddp.scripts.sandbox.evaluate import Evaluated, Job, Started

_MOST = 8  # passes of a loop that are compared
_MOST_ASSIGNED, _MOST_STARTS = 5000, 1000  # of one job

#: Where something starts: line, kind, which one of that line. Then, by job: the starts, each in its tasks.
_Key = tuple[int, str, int]
_Place = Mapping[int, list[list[Started]]]


class Finder:
    """Finds what a script starts, in recordings of all imagined jobs."""

    def __init__(self, script: Script, runs: Sequence[Evaluated]) -> None:
        self.script = script
        self.runs = runs
        roles = {each.job.role: at for at, each in enumerate(runs)}
        self.given, self.shown = roles.get("given", -1), roles.get("shown", -1)
        self.plain = [at for at, each in enumerate(runs) if not each.job.role]
        self.told = [at for at in range(len(runs)) if at != self.shown]  # where a launch has to start
        self.lines: dict[int, list[Command]] = {}
        for each in script.commands:
            for line in range(each.line, each.last + 1):
                self.lines.setdefault(line, []).append(each)
        self.own = set(self.runs[self.shown].job.variables) - EARLY.keys() if self.shown >= 0 else set()
        self.unset = {name for name, value in script.slurm.items() if "unset" in symbols(value)}

    def find(self) -> Found:
        """Return what starts in them."""
        found, first = Found(), self.runs[0]
        values = [_by_place(run) for run in self.runs]
        for where in values[0]:
            found.assigned[where] = self._assigned({at: each[where] for at, each in enumerate(values) if where in each})
        found.started = [(line, ["cd", value]) for (line, name), value in found.assigned.items() if name == "cd"]
        found.started += [
            (each.line, [Seen(first.job, [word]).value() for word in each.words])
            for each in first.started if not each.step
        ]  # fmt: skip
        sruns = self._places(lambda run: ((each, "srun") for each in run.started if each.name == "srun"))
        steps = {key: self._step(key, place) for key, place in sruns}
        found.steps = list(steps.values())
        for key, place in self._places(lambda run: ((each, kind) for each, kind, _ in programs(run, idle=True))):
            launch = self._launch(key, place, [step for (line, _, _), step in steps.items() if line == key[0]])
            (found.launches if launch.program or launch.opaque else found.idle).append(launch)
        return found

    def _places(self, starts: Callable[[Evaluated], Iterable[tuple[Started, str]]]) -> list[tuple[_Key, _Place]]:
        """Return where something starts in one of the jobs. The passes of a loop, and the calls of a function, are one
        place."""
        places: dict[_Key, dict[int, list[list[Started]]]] = {}
        for at, run in enumerate(self.runs):
            tasks: dict[tuple[int, str], list[Started]] = {}
            numbers: Counter[tuple[int, str]] = Counter()
            inside = sorted(starts(run), key=lambda pair: (pair[0].step or pair[0].order, pair[0].order))
            for each, kind in inside[:_MOST_STARTS]:
                if each.step and (each.step, kind) in tasks:
                    tasks[each.step, kind].append(each)
                    continue
                tasks[each.step, kind] = [each]
                text, which = self._command(each.line, each.name), numbers[each.line, kind]
                numbers[each.line, kind] += 1
                key = (each.line, kind, 0 if text.loops or text.function else which)
                places.setdefault(key, {}).setdefault(at, []).append(tasks[each.step, kind])
        return sorted((key, place) for key, place in places.items() if place.keys() & set(self.told))

    def _assigned(self, texts: Mapping[int, set[str]]) -> str:
        """Return the value of an assignment. texts: by job."""
        seen = {at: Seen(self.runs[at].job, list(each) if len(each) == 1 else [UNKNOWN]) for at, each in texts.items()}
        if not seen.keys() >= set(self.plain):
            return UNKNOWN
        return unify([seen[at] for at in self.plain], seen.get(self.given), seen.get(self.shown), self.unset)

    # One list of words out of those of all jobs.
    def _words(self, place: _Place, words: Callable[[Evaluated, Started], Sequence[str]]) -> list[str]:
        rows = [
            self._row({
                run: _seen(self.runs[run].job, starts[at], [words(self.runs[run], each) for each in starts[at]])
                for run, starts in place.items() if at < len(starts)
            })
            for at in range(min(_MOST, max(map(len, place.values()))))
        ]  # fmt: skip
        return reduce(lambda one, other: merge(one, other, symbol("loop")), rows)

    def _row(self, seen: Mapping[int, list[list[Seen]]]) -> list[str]:
        """Return the words of one start. Where jobs have another number of them, those that differ are unknown; only
        variables that are not set may be missing."""
        plain = [row for run in self.plain for row in seen.get(run, [])]
        given, shown = (rows[0] if len(rows := seen.get(run, [])) == 1 else [] for run in (self.given, self.shown))
        if not plain:
            return [unify([each], unset=self.unset) for each in given]
        size = len(plain[0])
        if any(len(row) != size for row in plain):
            return reduce(
                lambda one, other: merge(one, other, UNKNOWN), [[one.value() for one in row] for row in plain]
            )
        columns = list(zip(*plain, strict=True))
        added = [len(given) != size and only_named(each.words[0]) for each in given]
        if given and added.count(False) != size:  # a set variable leads to other words
            known = [unify(each, unset=self.unset) for each in columns]
            return merge(known, [named(each.value()) for each in given], UNKNOWN)
        hidden: dict[str, str] = {}
        if columns and shown and shown[0].tasks:
            mine, usual = shown[0].tasks[0].environment, columns[0][0].tasks[0].environment
            hidden = {name: mine[name] for name in self.own if mine.get(name) and not usual.get(name)}
        there: list[Seen | None] = [each for each, more in zip(given, added, strict=True) if not more] or [None] * size
        exported: Sequence[Seen | None] = shown if len(shown) == size else [None] * size
        found = [
            unify(each, one, other, self.unset, hidden)
            for each, one, other in zip(columns, there, exported, strict=True)
        ]
        for at in (at for at, more in enumerate(added) if more):
            found.insert(at, unify([given[at]], unset=self.unset))
        return found

    def _step(self, key: _Key, place: _Place) -> Step:
        words = self._words(place, lambda _, each: each.words[1:])
        found, _, opaque = srun_options(words)
        options = {full(name, OPTIONS | SRUN_ONLY): value for name, value in found}
        command, job = self._command(key[0], "srun", key[2]), self.script.job
        nodes, ntasks, per_node = (count(options.get(each)) for each in ("nodes", "ntasks", "ntasks-per-node"))
        fan_out = (nodes == 1 or ntasks == 1) and ("nodelist" in options or bool(command.loops) or command.background)
        if not options.keys() & {"ntasks", "ntasks-per-node"}:
            per_node, ntasks = job.ntasks_per_node, job.ntasks if nodes in (None, job.nodes) else None
        if "nodes" not in options and "nodelist" not in options:
            nodes = job.nodes if ntasks is None or not job.nodes else min(job.nodes, ntasks)
        gpus = next((count(options[each]) for each in ("gpus-per-node", "gres") if each in options), job.gpus_per_node)
        gpus_per_task = count(options.get("gpus-per-task")) or job.gpus_per_task
        unsure = bool(opaque) or unread(options) or (job.unread and not options.keys() >= {"nodes", "ntasks"})
        unsure |= nodes is None and "nodelist" in options
        resources = Resources(None if unsure else nodes, ntasks, per_node, gpus, gpus_per_task, unread=unsure)
        line = _line(command, "srun") or key[0]
        return Step(line, options, resources, fan_out, opaque, command)

    def _launch(self, key: _Key, place: _Place, steps: Sequence[Step]) -> Launch:
        task = next(place[run] for run in self.told if run in place)[0][0]
        words, whole = self._words(place, lambda _, each: each.words), self._words(place, around)
        kind, arguments = kind_of(base(words[0]) if "\0" not in words[0] else task.name, words[1:])
        options, end, opaque = launcher_options(kind, arguments)
        step = steps[min(key[2], len(steps) - 1)] if task.step and steps else None
        outer = self._command(key[0], task.name, key[2])
        command = self._inner(outer, task.name) or outer
        environment = self._environment(place)
        shown = place[self.shown][0][0].added if self.shown in place else {}
        nodes, per_node = self._spread(step)
        everywhere = all(run in place and bool(place[run][0][0].step) == bool(task.step) for run in self.told)
        return Launch(
            kind, _line(command, task.name) or command.line, options, opaque, arguments[end:], environment,
            {name for name in self.own - environment.keys() if shown.get(name)}, step, command,
            tuple(whole), not everywhere, words[0],
            self._words(place, lambda _, each: [each.folder])[0], nodes, per_node,
        )  # fmt: skip

    def _spread(self, step: Step | None) -> tuple[int | None, int | None]:
        """(on how many nodes a step starts what it has, how often on each); None for what is not known."""
        if step is None:
            return 1, 1
        nodes = self.script.job.nodes if step.fan_out and step.command.loops else step.resources.nodes
        return nodes, 1 if step.fan_out else step.resources.tasks_per_node

    def _environment(self, place: _Place) -> dict[str, str]:
        found = {}
        starts = [each for run in self.told for tasks in place.get(run, [])[:_MOST] for each in tasks]
        for name in sorted({name for each in starts for name in each.added}):
            if not name.startswith("SLURM") and name not in ("HOSTNAME", "SANDBOX_DROPPED"):
                words = self._words(place, lambda _, each, name=name: [each.environment.get(name, UNKNOWN)])  # type: ignore[misc]
                found[name] = words[0]
        return found

    # Where the script's text has it.
    def _command(self, line: int, name: str, which: int = 0) -> Command:
        """Return the command of a line that starts a program."""
        here = self.lines.get(line, [])
        named_so = [each for each in here if _line(each, name)] or [each for each in here if _line(each, "srun")]
        if some := named_so or here:
            return some[min(which, len(some) - 1)]
        return Command(["?"], [line])

    def _inner(self, outer: Command, name: str) -> Command | None:
        """Return the command in a text for bash that starts a launcher: bash -c, or a here-document."""
        if _line(outer, name):
            return None
        written = [each for each in self.script.commands if each.here and each.output]
        inside = (each for one in [outer, *written] for each in self.script.inside(one))
        return next((each for each in inside if _line(each, name)), None)


def _by_place(run: Evaluated) -> dict[tuple[int, str], set[str]]:
    places: dict[tuple[int, str], set[str]] = {}
    for line, name, value in run.assigned[:_MOST_ASSIGNED]:
        places.setdefault((line, name), set()).add(value)
    return places


def _seen(job: Job, tasks: Sequence[Started], rows: Sequence[Sequence[str]]) -> list[list[Seen]]:
    """Return the words of the tasks of one start: a row for each task, if they have another number of words."""
    if len(set(map(len, rows))) > 1:
        return [[Seen(job, [word], [task]) for word in row] for task, row in zip(tasks, rows, strict=True)]
    return [[Seen(job, words, tasks) for words in zip(*rows, strict=True)]]


def _line(command: Command, name: str) -> int:
    """Return the line on which the name of a program is written; 0, if it is not in the command."""
    pairs = zip(command.words, command.lines, strict=True)
    return next((line for raw, line in pairs if base(raw.strip("'\"")) == name), 0)
