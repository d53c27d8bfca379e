"""Facts about loads: whether a start continues from a save, how it finds it, and the settings that follow."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from slurmddp.program.facts import NO, UNKNOWN, YES, Fact, Proposal
from slurmddp.program.libraries import CHECKPOINTER_LOADS
from slurmddp.program.names import chain, last
from slurmddp.program.saves import WORDS, Saves, foreign
from slurmddp.program.trace import Option, strings
from slurmddp.program.walk import Event, Unit

_PLAIN = re.compile(r"torch\.(?:load|hub\.load_state_dict_from_url)|pickle\.load")
_FRAMEWORK_LOADS = re.compile(
    r"(?:accelerate(?:\.\w+)*\.Accelerator\(\)\.load_state|deepspeed\.initialize\(\)\.load_checkpoint|"
    r"torch\.distributed\.checkpoint(?:\.\w+)*\.(?:load|load_state_dict)|lightning(?:\.\w+)*\.Fabric\(\)\.load|"
    rf"{CHECKPOINTER_LOADS.pattern}|timm\.models(?:\.\w+)*\.resume_checkpoint)"
)
_RESUMES = re.compile(
    r"resume|ckpt|checkpoint|restore|continue|snapshot|init_from|load|start_from|pretrained|weights", re.IGNORECASE
)
#: How often or where it saves is not from where it loads.
_OTHER = re.compile(
    r"(?:dir|folder|freq|every|interval|limit|total|steps|epochs|strategy|save\w*|num|workers)$", re.IGNORECASE
)
_SURELY = re.compile(r"resume|continue|restore", re.IGNORECASE)
_SAVED = re.compile(r"ckpt|checkpoint(?!ing)|resume", re.IGNORECASE)
_STEERS = re.compile(r"epoch|step|iter|optim|sched", re.IGNORECASE)
#: Functions that look into a folder, by their last name; and libraries' that look for a save.
_LOOKS = {"exists", "isfile", "is_file", "isdir", "is_dir", "glob", "iglob", "rglob", "listdir", "scandir", "iterdir"}
_SEARCHES = re.compile(r"[^@].*(?:last_checkpoint|latest_|_latest|auto_resume|auto_load|find_check|newest).*")


class Loads:
    """The loads of a program. options: arguments of the command line on which they depend."""

    def __init__(self, saves: Saves) -> None:
        self.saves, self.judge = saves, saves.judge
        self.options: list[Option] = []

    def facts(self) -> tuple[Fact, Fact]:
        """Answer loads and loads_alone."""
        judge, saves = self.judge, self.saves
        named = [event for event in judge.methods("train", "fit", "run") if _resumes(event)]
        framework, plain = judge.calls(_FRAMEWORK_LOADS) + named, judge.calls(_PLAIN)
        states = judge.methods("load_state_dict")
        steering = [e for e in states if isinstance(e.node.func, ast.Attribute) and _steers(chain(e.node.func.value))]
        loaders = {f"@{event.unit.source.module}:{event.unit.name}" for event in plain if event.unit.name}
        given = [event for event in judge.events if event.names & loaders and _gives_optimizer(event)]
        steers = {*(event.unit for event in (*steering, *given)), *self._read_steps()}
        if framework or (plain and steers):
            events = framework or [event for event in plain if event.unit in steers] or plain  # not loads of data
            self.options = self._options(events)
            return judge.yes("loads", events, ", ".join(each.flag for each in self.options)), self._alone(events)
        trains = [e for e in judge.frameworks.get("transformers Trainer", ()) if last(e.node.func) == "train"]
        saved = [e for e in judge.methods("from_pretrained") if any(map(_SAVED.search, judge.words(e)))]
        if trains and not (plain or saved) and not any(e.values for e in trains):
            return judge.no("loads"), judge.no("loads_alone")
        names = ("load", "load_checkpoint", "load_state", "load_snapshot", "restore", "resume", "load_weights")
        maybe = [event for event in judge.methods(*names) if not event.names]
        maybe += [e for e in judge.events if e not in plain and foreign(e, r"(?:^|_)load(?:_|$)|restore|checkpoint")]
        if maybe or saved or saves.own_loop or (plain and states) or saves.trainer or saves.configured:
            why = "it loads something; whether it continues from it is open" if plain else saves.trainer
            return judge.unknown("loads", plain, why), judge.unknown("loads_alone", plain)
        return judge.no("loads"), judge.no("loads_alone")

    def _read_steps(self) -> Iterator[Unit]:
        """Yield where values such as checkpoint["epoch"] are assigned."""
        for unit in self.judge.program.reached:
            for target, value, _ in unit.assigns:
                if (
                    WORDS["step"].search(last(target))
                    and any(isinstance(each, ast.Subscript) for each in ast.walk(value))
                    and any(re.search("ckpt|checkpoint|snapshot|state|resume|saved", word) for word in strings([value]))
                ):
                    yield unit

    def _decides(self, event: Event) -> list[tuple[Unit, ast.expr]]:
        """Return the conditions and arguments of a load."""
        program = self.judge.program
        tests = [(program.where.get(test, event.unit), test) for test in program.conditions(event.unit, event.guards)]
        if event.matches(CHECKPOINTER_LOADS):  # it finds the newest save itself
            return tests
        return [*tests, *((event.unit, value) for value in event.values)]

    def _options(self, events: Iterable[Event]) -> list[Option]:
        trace = self.judge.trace
        nodes = (each for event in events for each in self._decides(event) if not isinstance(each[1], ast.UnaryOp))
        names = [name for each in nodes for name in trace.origin(*each).options]  # not of an `else`
        return [
            trace.options[name] for name in dict.fromkeys(names) if _RESUMES.search(name) and not _OTHER.search(name)
        ]

    def _alone(self, events: list[Event]) -> Fact:
        """Answer loads_alone: no if a load needs an argument, yes if one looks into a folder; else open."""
        judge, looking, needing, unclear = self.judge, [], [], []
        for event in events:
            if any(not self._is_found(option) for option in self._options([event])):
                needing.append(event)
            elif any(self._is_chosen(*each) for each in self._decides(event)):
                unclear.append(event)
            elif event.matches(CHECKPOINTER_LOADS) or self._looks(self._decides(event)):
                looking.append(event)
        if needing and not looking and not unclear:
            return judge.no("loads_alone")
        return judge.fact("loads_alone", YES if looking and not needing and not unclear else UNKNOWN, looking)

    def _looks(self, nodes: Iterable[tuple[Unit, ast.expr]]) -> bool:
        origins = [self.judge.trace.origin(*each) for each in nodes]
        return any(each.words & _LOOKS or any(map(_SEARCHES.fullmatch, each.calls)) for each in origins)

    def _is_chosen(self, unit: Unit, node: ast.expr) -> bool:
        """Return whether a user may decide in a way that is not seen: by a configuration, or a parameter."""
        trace = self.judge.trace
        if any(_RESUMES.search(name) for name in trace.origin(unit, node).chosen):
            return True
        values = [trace.sources(unit, each) for each in ast.walk(node) if isinstance(each, ast.Name)]
        return any(each and all(isinstance(v, ast.Constant) and not v.value for _, v in each) for each in values)

    def _is_found(self, option: Option) -> bool:
        """Return whether a start may do without an argument: it has a default, or the script sets it from a search."""
        if not option.known or option.default:
            return True
        for unit in self.judge.program.reached:
            for target, value, guards in unit.assigns:
                if (
                    not isinstance(target, ast.Attribute)
                    or target.attr != option.dest
                    or isinstance(value, ast.Constant)
                ):
                    continue
                named = any(isinstance(each, ast.Compare) and _is_text(each.comparators[0]) for each in guards)
                if not (named or self.judge.trace.switches(unit, guards)):
                    if self._looks((unit, each) for each in (value, *guards)):
                        return True
        return False

    def proposals(self, found: dict[str, Fact]) -> Iterator[Proposal]:
        """Yield the settings of which the script leaves no doubt."""
        alone = found["loads_alone"].answer
        if found["loads"].answer is YES and alone is NO and len(self.options) == 1:
            option = self.options[0]
            if _SURELY.search(option.dest) and option.known and not option.default and option.flag.startswith("--"):
                value = [option.flag, "{checkpoint}"] if option.takes else [option.flag]
                what = "loads the path behind" if option.takes else "continues with"
                at = f" (line {option.line})" if option.line else ""
                yield Proposal("train.resume_args", value, f"the script {what} {option.flag}{at}")
        if found["saves"].answer is not YES or found["save_name_changes"].answer is not NO or self.saves.trainer:
            return
        if self.saves.in_run:  # what it saves elsewhere is not what it loads
            return
        trace, texts, flags = self.judge.trace, set[str | None](), set[str]()
        for event, path in self.saves.paths(self.saves.events):
            texts |= trace.texts(event.unit, path)
            flags |= {trace.options[each].flag for each in trace.origin(event.unit, path).options}
        known = {text for text in texts if text}
        if texts != known or not known:
            return
        watch = sorted(map(_watched, known))
        if len(set(watch)) <= 3 and not any(each.startswith(("*", "/tmp", "~", "$")) for each in watch):
            depends = f"; with another value of {' or '.join(sorted(flags))}, change it" if flags else ""
            yield Proposal("checkpoint.watch", sorted(set(watch)), f"the script saves there{depends}")
        if alone is YES and not any(text.startswith(("/", "~", "$")) for text in known):
            why = "the script continues from any save in its working directory, also from one of another run"
            yield Proposal("train.workdir", "run", f"{why}; give relative paths of data as absolute ones")


def _is_text(node: ast.expr) -> bool:
    """Return whether an argument is compared with a word, such as "latest"."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(node.value)


def _resumes(event: Event) -> bool:
    value = event.argument("resume_from_checkpoint") or event.argument("ckpt_path")
    return value is not None and not (isinstance(value, ast.Constant) and not value.value)


def _steers(name: str) -> bool:
    return bool(_STEERS.search(name) or WORDS["optimizer"].search(name.rpartition(".")[2]))


def _gives_optimizer(event: Event) -> bool:
    return any(WORDS["optimizer"].search(last(value)) for value in event.values)


def _watched(text: str) -> str:
    """Return the folder of a save below a folder of its own, else the file as a pattern."""
    text = re.sub("//+", "/", text)
    folder = text.rpartition("/")[0]
    return folder if folder.strip("./") and "*" not in folder else text
