"""What all facts are judged by: the calls that a program can reach, its frameworks, and what may hide more."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence

from slurmddp.program.facts import NO, UNKNOWN, YES, Answer, Fact
from slurmddp.program.libraries import CALL, DOES, DYNAMIC, FRAMEWORK, KNOWN, OF_SCRIPT
from slurmddp.program.names import is_value, last
from slurmddp.program.source import Sources
from slurmddp.program.trace import Trace, strings
from slurmddp.program.walk import Event, Program

_SHOWN = 3
#: A parameter or argument of this name: torchrun passes none, so it depends on who sets it.
RANK_WORD = re.compile(r"(?:^|_)(?:rank|RANK|get_rank|process_index|global_rank|local_rank|LOCAL_RANK)(?:$|_)")
#: What a library does to more than its arguments, what it may train, and bases that are no program of their own.
_ACTIVE = re.compile(
    r"train|fit|launch|init|setup|run|main|start|spawn|distrib|parallel|engine|accel|strateg|sampler|seed|wrap|prepare|remote|"
    r"submit|checkpoint|save|resume", re.IGNORECASE
)  # fmt: skip
_TRAINED = re.compile(r"model|net$|network|optim|loader|train|^args$|^opts?$|config|cfg|sched|module|engine|param")
_PASSIVE = re.compile(r"Data[Ss]et|Module|Layer|Model|Net|Config|Block|Exception|Error|Transform")


class Judge:
    """The program with what several facts need. hidden: why a fact that was not found may still be there."""

    def __init__(self, sources: Sources) -> None:
        self.program = Program(sources.read)
        self.trace = Trace(self.program)
        self.events = self.program.events
        self.frameworks: dict[str, list[Event]] = {}
        for event in self.events:
            for name, pattern in FRAMEWORK.items():
                if event.matches(pattern):
                    self.frameworks.setdefault(name, []).append(event)
        #: An object that a configuration makes (Hydra), or a caller that is not seen.
        self.configured = {name for name, events in self.frameworks.items() if not any(map(self._constructs, events))}
        for name in self.configured:
            del self.frameworks[name]
        self.unseen = self._unseen(sources)
        self.hidden = self.unseen or self._library(sources)

    @staticmethod
    def _constructs(event: Event) -> bool:
        return any(
            pattern.fullmatch(name) and "()" not in name for pattern in FRAMEWORK.values() for name in event.names
        )

    def _library(self, sources: Sources) -> str:
        """Return why a library may do what the script does not: it is not known, and more than reads something."""
        used = {name.split(".")[0] for event in self.events if _acts(event) for name in event.names}
        for source, node in (each for same in self.program.classes.values() for each in same):
            bases = [base for base in node.bases if not _PASSIVE.search(last(base))]
            used |= {name.split(".")[0] for base in bases for name in self.program.names.dotted(source.module, base)}
        for name, (_, line) in sources.foreign.items():
            if name not in KNOWN and name in used:
                return f"{name} (imported in line {line}) is not known"
        return ""

    def _unseen(self, sources: Sources) -> str:
        if sources.unread:
            return f"{sources.unread[0].name} was not read"
        for event in self.events:
            text = self.program.place(event.unit, event.node).text
            config = "builtins.exec" in event.names and re.search(r"open\(.*\)\.read\(", text)  # the user names it
            if event.matches(DYNAMIC) and not config:
                file = event.unit.source.path.rpartition("/")[2]
                return f"line {event.node.lineno} of {file} runs code found at runtime"
        return ""

    def calls(self, pattern: re.Pattern[str]) -> list[Event]:
        """Return the calls of which a name matches."""
        return [event for event in self.events if event.matches(pattern)]

    def methods(self, *names: str) -> list[Event]:
        """Return the calls of a method or function by its last name."""
        return [event for event in self.events if last(event.node.func) in names]

    def fact(self, name: str, answer: Answer, events: Iterable[Event] = (), detail: str = "") -> Fact:
        """Return a fact with the lines of its events."""
        places = dict.fromkeys(self.program.place(event.unit, event.node) for event in events)
        return Fact(name, answer, tuple(places)[:_SHOWN], detail)

    def yes(self, name: str, events: Sequence[Event], detail: str = "") -> Fact:
        """Return yes with its evidence."""
        return self.fact(name, YES, events, detail)

    def unknown(self, name: str, events: Iterable[Event] = (), detail: str = "") -> Fact:
        """Return cannot tell, with the lines on which it depends."""
        return self.fact(name, UNKNOWN, events, detail)

    def no(self, name: str) -> Fact:
        """Return no, or cannot tell where something may hide it. Of OF_SCRIPT, no library counts."""
        if hidden := self.unseen if name in OF_SCRIPT else self.hidden:
            return self.unknown(name, (), hidden)
        return Fact(name, NO)

    def by_call(self, name: str) -> Fact:
        """Answer a fact by a framework, or by the calls of libraries.CALLS."""
        for framework, events in self.frameworks.items():
            if framework in DOES.get(name, ()):
                return self.yes(name, events, framework)
        events = self.calls(CALL[name])
        for framework in self.configured:
            if framework in DOES.get(name, ()) and not events:
                return self.unknown(name, (), f"{framework}, as it is configured")
        if name == "seeds" and not events:  # LightningCLI seeds unless it is told not to
            clis = [e for e in self.frameworks.get("Lightning", ()) if any(n.endswith("LightningCLI") for n in e.names)]
            events = [each for each in clis if not is_value(each.argument("seed_everything_default"), False)]
        maybe = self.methods("seed", "set_seed", "fix_seed") if name == "seeds" and not events else []
        if maybe:  # of numpy or random alone, or of an object that is not known
            return self.unknown(name, maybe)
        return self.on_demand(name, events) if events else self.no(name)

    def on_demand(self, name: str, events: list[Event]) -> Fact:
        """Return yes, or cannot tell where each of the calls needs an argument that is off by default."""
        flags = [self.trace.switches(event.unit, event.guards) for event in events]
        if name != "process_group" and all(flags):
            return self.unknown(name, events, f"only with {flags[0][0]}")
        if name == "seeds" and all(map(self.is_conditional, events)):
            return self.unknown(name, events, "it depends on a condition")
        return self.yes(name, events)

    def is_conditional(self, event: Event) -> bool:
        """Return whether a call stands under a condition that does not ask for ranks or GPUs."""
        tests = [test for test in self.program.conditions(event.unit, event.guards) if not self.program.of_rank(test)]
        passed = self.program.passed
        tests = [test for test in tests if test not in passed or (test in event.guards and not passed[test])]
        return any("is_available" not in set(strings([test])) for test in tests)

    def words(self, event: Event) -> set[str]:
        """Return the identifiers and texts from which a call and its arguments come."""
        return self.trace.origin(event.unit, event.node).words

    def sets(self, name: str, variable: str) -> Fact:
        """Answer whether an environment variable is set: os.environ[...] =, setdefault, putenv."""
        for unit in self.program.reached:
            for target, _, _ in unit.assigns:
                environ = isinstance(target, ast.Subscript) and last(target.value) == "environ"
                if environ and is_value(target.slice, variable):  # type: ignore[attr-defined]
                    return Fact(name, YES, (self.program.place(unit, target),))
        events = [e for e in self.methods("setdefault", "putenv") if e.node.args and is_value(e.node.args[0], variable)]
        return self.yes(name, events) if events else self.no(name)


def _outermost(node: ast.AST) -> Iterator[str]:
    """Yield the names in an expression: of `args.path`, path."""
    if name := last(node):
        yield name
    else:
        for each in ast.iter_child_nodes(node):
            yield from _outermost(each)


def _acts(event: Event) -> bool:
    """Return whether a call may do more than read something: by its name, or as it is given what is trained."""
    name = last(event.node.func)
    given = {word.lower() for value in event.values for word in _outermost(value)}
    alone = not event.values and not name[:1].isupper()
    return alone or bool(_ACTIVE.search(name)) or any(_TRAINED.search(word) for word in given)
