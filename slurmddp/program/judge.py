"""Facts about ranks, data, stops and the surroundings: each from the calls that the program can reach."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence

from slurmddp.program.facts import Answer, Fact
from slurmddp.program.libraries import CALL, DOES, DYNAMIC, FRAMEWORK, KNOWN, OF_SCRIPT
from slurmddp.program.names import last
from slurmddp.program.source import Sources
from slurmddp.program.trace import Trace, strings
from slurmddp.program.walk import Event, Program, Unit

_SHOWN = 3
_LOCAL_RANK = re.compile(
    r"LOCAL_?RANK|device_count|get_local_rank|SLURM_LOCALID|local_process_index|horovod.*local_rank"
)
#: A parameter or argument of this name: torchrun passes none, so it depends on who sets it.
_RANK_WORD = re.compile(r"(?:^|_)(?:rank|RANK|get_rank|process_index|global_rank|local_rank|LOCAL_RANK)(?:$|_)")
#: What a library does to more than its arguments, what it may train, and bases that are no program of their own.
_ACTIVE = re.compile(
    r"train|fit|launch|init|setup|run|main|start|spawn|distrib|parallel|engine|accel|strateg|sampler|seed|wrap|prepare|remote|"
    r"submit|checkpoint|save|resume", re.IGNORECASE
)  # fmt: skip
_TRAINED = re.compile(r"model|net$|network|optim|loader|train|^args$|^opts?$|config|cfg|sched|module|engine|param")
_PASSIVE = re.compile(r"Data[Ss]et|Module|Layer|Model|Net|Config|Block|Exception|Error|Transform")
_PROCESS = re.compile(r"(?:torch\.)?multiprocessing(?:\.\w+|\(\))*\.(?:Process|Pool(?:\(\)\.\w+)?)")
_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2")


class Judge:
    """The program with what several facts need. hidden: why a fact that was not found may still be there."""

    def __init__(self, sources: Sources) -> None:
        self.program = Program(sources.read)
        self.trace = Trace(self.program)
        self.events = self.program.events
        self.frameworks: dict[str, list[Event]] = {}
        for event in self.events:
            for name, pattern in FRAMEWORK.items():
                if any(pattern.fullmatch(each) for each in event.names):
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
            config = "builtins.exec" in event.names and re.search(
                r"open\(.*\)\.read\(", text
            )  # of a file that the user names
            if any(DYNAMIC.fullmatch(each) for each in event.names) and not config:
                file = event.unit.source.path.rpartition("/")[2]
                return f"line {event.node.lineno} of {file} runs code found at runtime"
        return ""

    def calls(self, pattern: re.Pattern[str]) -> list[Event]:
        """Return the calls of which a name matches."""
        return [event for event in self.events if any(pattern.fullmatch(name) for name in event.names)]

    def methods(self, *names: str) -> list[Event]:
        """Return the calls of a method or function by its last name."""
        return [event for event in self.events if last(event.node.func) in names]

    def fact(self, name: str, answer: Answer, events: Iterable[Event] = (), detail: str = "") -> Fact:
        """Return a fact with the lines of its events."""
        places = dict.fromkeys(self.program.place(event.unit, event.node) for event in events)
        return Fact(name, answer, tuple(places)[:_SHOWN], detail)

    def yes(self, name: str, events: Sequence[Event], detail: str = "") -> Fact:
        """Return yes with its evidence."""
        return self.fact(name, Answer.YES, events, detail)

    def no(self, name: str, detail: str = "") -> Fact:
        """Return no, or cannot tell where something may hide it. Of OF_SCRIPT, no library counts."""
        if hidden := self.unseen if name in OF_SCRIPT else self.hidden:
            return Fact(name, Answer.UNKNOWN, (), hidden)
        return Fact(name, Answer.NO, (), detail)

    def by_call(self, name: str) -> Fact:
        """Answer a fact by a framework, or by the calls of libraries.CALLS."""
        for framework, events in self.frameworks.items():
            if framework in DOES.get(name, ()):
                return self.yes(name, events, framework)
        events = self.calls(CALL[name])
        for framework in self.configured:
            if framework in DOES.get(name, ()) and not events:
                return Fact(name, Answer.UNKNOWN, (), f"{framework}, as it is configured")
        if name == "seeds" and not events:  # LightningCLI seeds unless it is told not to
            clis = [e for e in self.frameworks.get("Lightning", ()) if any(n.endswith("LightningCLI") for n in e.names)]
            events = [each for each in clis if not _is(each.argument("seed_everything_default"), False)]
        maybe = self.methods("seed", "set_seed", "fix_seed") if name == "seeds" and not events else []
        if maybe:  # of numpy or random alone, or of an object that is not known
            return self.fact(name, Answer.UNKNOWN, maybe)
        return self.on_demand(name, events) if events else self.no(name)

    def on_demand(self, name: str, events: list[Event]) -> Fact:
        """Return yes, or cannot tell where each of the calls needs an argument that is off by default."""
        flags = [self.trace.switches(event.unit, event.guards) for event in events]
        if name != "process_group" and all(flags):
            return self.fact(name, Answer.UNKNOWN, events, f"only with {flags[0][0]}")
        if name == "seeds" and all(map(self.is_conditional, events)):
            return self.fact(name, Answer.UNKNOWN, events, "it depends on a condition")
        return self.yes(name, events)

    def is_conditional(self, event: Event) -> bool:
        """Return whether a call stands under a condition that does not ask for ranks or GPUs."""
        tests = [test for test in self.program.conditions(event.unit, event.guards) if not self.program.of_rank(test)]
        passed = self.program.passed
        tests = [test for test in tests if test not in passed or (test in event.guards and not passed[test])]
        return any("is_available" not in set(strings([test])) for test in tests)

    # Ranks

    def process_group(self) -> Fact:
        """Answer process_group. Lightning on one device makes none."""
        found = self.by_call("process_group")
        for event in self.frameworks.get("Lightning", ()):
            devices = event.argument("devices") or event.argument("gpus")
            if isinstance(devices, ast.Constant) and devices.value in (1, "1"):
                return self.fact("process_group", Answer.UNKNOWN, [event], "Lightning with devices=1: not on one rank")
        return found

    def wraps_model(self) -> Fact:
        """Answer wraps_model; a collective on gradients counts as cannot tell."""
        found = self.by_call("wraps_model")
        reduces = self.methods("all_reduce", "reduce_scatter_tensor", "reduce_scatter")
        if found.answer is Answer.NO and reduces:
            return self.fact("wraps_model", Answer.UNKNOWN, reduces, "it reduces something itself")
        return found

    def device(self) -> tuple[Fact, Fact]:
        """Answer local_rank_device and fixed_device."""
        for framework, events in self.frameworks.items():
            if framework in DOES["local_rank_device"]:
                fixed = self.fact("fixed_device", Answer.NO if not self.unseen else Answer.UNKNOWN)
                return self.yes("local_rank_device", events, framework), fixed
        named: list[tuple[Event, ast.expr]] = []
        for event in self.events:
            name = last(event.node.func)
            if name == "to" and event.node.args:
                named.append((event, event.node.args[0]))
            elif name == "set_device" or "torch.device" in event.names:
                value = event.argument("device", 0)
                named += [(event, value)] if value is not None else []
            elif name == "cuda" and isinstance(event.node.func, ast.Attribute):
                named.append((event, event.node.args[0] if event.node.args else ast.Constant("cuda")))
            if (ids := event.argument("device_ids")) is not None:
                named.append((event, ids))
        by_rank: list[Event] = []
        unclear: list[Event] = []
        fixed_at: list[Event] = []
        for event, value in named:
            origin = self.trace.origin(event.unit, value)
            text = " ".join(origin.words | origin.calls)
            if _LOCAL_RANK.search(text):
                by_rank.append(event)
            elif "torch.accelerator" in text or any(
                _RANK_WORD.search(word) or "local_rank" in word.lower() for word in origin.words
            ):
                unclear.append(event)
            elif "cuda" in text or {str(each) for each in self.trace.texts(event.unit, value)} <= set("0123"):
                (unclear if origin.unknown or origin.options or origin.chosen else fixed_at).append(event)
            elif origin.unknown or origin.options or origin.chosen:
                unclear.append(event)
        if by_rank:
            return self.yes("local_rank_device", by_rank), Fact("fixed_device", Answer.NO)
        visible = self.sets("sets_visible_devices", "CUDA_VISIBLE_DEVICES").answer is not Answer.NO
        if unclear or self.unseen or visible or self.program_starts():
            local = Answer.UNKNOWN if self.hidden or visible or self._mentions_rank() else Answer.NO
            return self.fact("local_rank_device", local, unclear), self.fact("fixed_device", Answer.UNKNOWN)
        fixed = self.yes("fixed_device", fixed_at) if fixed_at else Fact("fixed_device", Answer.NO)
        return Fact("local_rank_device", Answer.NO), fixed

    def _mentions_rank(self) -> bool:
        """Return whether the text has a rank in it at all."""
        words = {word for unit in self.program.reached for word in strings([unit.node or unit.source.tree])}
        return any(_RANK_WORD.search(word) or _LOCAL_RANK.search(word) for word in words)

    def program_starts(self) -> bool:
        """Return whether the program may start ranks itself."""
        return bool(self.calls(CALL["starts_ranks"]))

    def starts_ranks(self) -> Fact:
        """Answer starts_ranks: calls of launchers, and torchrun as a subprocess."""
        found = self.by_call("starts_ranks")
        shells = self.calls(re.compile(r"subprocess\.\w+|os\.(?:system|exec\w+|spawn\w+)"))
        own = [
            event
            for event in shells
            if re.search(r"torchrun|torch\.distributed|accelerate|srun|mpirun", " ".join(self._words(event)))
        ]
        own += [event for event in self.calls(_PROCESS) if self._starts_group(event)]
        if own and found.answer is not Answer.YES:
            found = self.yes("starts_ranks", own)
        events = [*own, *self.calls(CALL["starts_ranks"])]
        if found.answer is Answer.YES and events and all(map(self._has_condition, events)):  # perhaps: without torchrun
            return self.fact("starts_ranks", Answer.UNKNOWN, events, "it depends on a condition")
        return found

    def _starts_group(self, event: Event) -> bool:
        """Return whether a process that a call starts makes a process group."""
        target = event.argument("target", 1) or event.argument("func", 0)
        names = self.program.names.dotted(event.unit.source.module, target) if target is not None else set()
        above = {id(each.unit): each.unit for each in self.calls(CALL["process_group"])}
        waiting = list(above.values())
        while waiting:
            unit = waiting.pop()
            if f"@{unit.source.module}:{unit.name}" in names:
                return True
            new = {
                id(caller): caller for caller, _ in self.program.callers.get(id(unit), ()) if id(caller) not in above
            }
            above |= new
            waiting += new.values()
        return False

    def _has_condition(self, event: Event) -> bool:
        """Return whether a call stands under any condition but that of a main program."""
        tests = self.program.conditions(event.unit, event.guards)
        return any(
            "__name__" not in {each.id for each in ast.walk(test) if isinstance(each, ast.Name)} for test in tests
        )

    def _words(self, event: Event) -> set[str]:
        return self.trace.origin(event.unit, event.node).words

    # Data

    def data(self) -> tuple[Fact, Fact]:
        """Answer shards_data and set_epoch."""
        shards, epochs = self.by_call("shards_data"), self.methods("set_epoch")
        for framework in DOES["set_epoch"] & set(self.frameworks) - {"Lightning"}:
            return shards, self.yes("set_epoch", self.frameworks[framework], framework)
        prepared = [
            event for event in self.calls(re.compile(r"accelerate(?:\.\w+)*\.Accelerator\(\)\.prepare"))
            if re.search(r"load|data|dl", " ".join(word.lower() for arg in event.node.args for word in [last(arg)]))
            or any(isinstance(arg, ast.Starred) for arg in event.node.args)
        ]  # fmt: skip
        if prepared:
            return self.yes("shards_data", prepared, "Accelerate"), self.yes("set_epoch", prepared, "Accelerate")
        if any(word in self.frameworks for word in ("Fabric",)) and shards.answer is Answer.YES:
            return shards, self.yes("set_epoch", self.frameworks["Fabric"][:1], "Fabric")
        for event in self.frameworks.get("Lightning", ()):
            off = event.argument("use_distributed_sampler") or event.argument("replace_sampler_ddp")
            if off is not None and not (isinstance(off, ast.Constant) and off.value is True):
                return self.fact("shards_data", Answer.UNKNOWN, [event]), self.fact(
                    "set_epoch", Answer.UNKNOWN, [event]
                )
            return shards, self.yes("set_epoch", [event], "Lightning")
        engines = [e for e in self.frameworks.get("DeepSpeed", ()) if e.argument("training_data") is not None]
        if engines:
            shards = self.yes("shards_data", engines, "DeepSpeed")
        if shards.answer is Answer.NO:
            ranks = [
                e
                for e in self.events
                if re.search("Loader|Sampler|Dataset|seed", last(e.node.func)) and self.by_rank(e)
            ]
            other = ranks or [
                e for e in self.events if "timm" in {n.split(".")[0] for n in e.names} and "load" in last(e.node.func)
            ]
            if other or self._splits_by_rank():
                shards = self.fact("shards_data", Answer.UNKNOWN, other, "the rank goes into how it reads")
        if epochs:
            return shards, self.yes("set_epoch", epochs)
        return shards, (
            self.fact("set_epoch", Answer.UNKNOWN)
            if shards.answer is Answer.UNKNOWN or engines
            else self.no("set_epoch")
        )

    def _splits_by_rank(self) -> bool:
        """Return whether a sampler or dataset of its own may look at the rank, or a library's splits by node."""
        for unit in self.program.reached:
            own = re.search("Sampler|Data|Load|Batch", unit.of or unit.name, re.IGNORECASE)
            for node, _ in unit.refs:
                name = last(node)
                if re.search(r"Distributed\w*Sampler|split_by_|nodesplitter", name) or (
                    own and _RANK_WORD.search(name)
                ):
                    return True
        return False

    def by_rank(self, event: Event) -> bool:
        """Return whether an argument of a call comes from the rank."""
        values = [*event.node.args, *(each.value for each in event.node.keywords)]
        return any(_RANK_WORD.search(word) for each in values for word in self.trace.origin(event.unit, each).words)

    def internet(self) -> Fact:
        """Answer data_from_internet. A download that stands under a condition is cannot tell."""
        name = "data_from_internet"
        known = self.calls(CALL[name])
        events = known + [event for event in self.events if _downloads(event) is not None and event not in known]
        events += [event for event in self.methods("from_pretrained") if event not in events]
        unsure = []
        for event in events:
            download = None if event in known else _downloads(event)
            if download is not None and isinstance(download, ast.Constant):
                if not download.value:
                    continue
            elif download is not None:
                unsure.append(event)
                continue
            first = event.argument("path", 0) or event.argument("url", 0)
            given = first is None or self.trace.origin(event.unit, first).options
            texts: set[str | None] = {None}
            if first is not None and not given:
                texts = self.trace.texts(event.unit, first)
            sure = download is not None or None not in texts
            if self.is_conditional(event) or _is_local(event, texts) or not sure:
                unsure.append(event)
            else:
                return self.yes(name, [event])
        return self.fact(name, Answer.UNKNOWN, unsure, "it depends on arguments") if unsure else self.no(name)

    def text_of(self, name: str, *words: str, calls: str = "") -> Fact:
        """Answer a fact by names or texts that stand in reached code."""
        for unit in self.program.reached:
            for node, _ in unit.refs:
                if last(node) in words:
                    return Fact(name, Answer.YES, (self.program.place(unit, node),))
        events = self.calls(re.compile(calls)) if calls else []
        for event in self.events:
            for arg in event.node.args:
                if isinstance(arg, ast.Constant) and arg.value in words:
                    events.append(event)
        return self.yes(name, events) if events else self.no(name)

    def workers(self) -> Fact:
        """Answer workers; detail has the number, or the argument that sets it."""
        unsure: list[tuple[Event, str]] = []
        loaders = [e for e in self.events if re.search(r"Loader$|^create_loader$", last(e.node.func))]
        for event in loaders:
            values = self.trace.keyword(event, "num_workers", 5 if last(event.node.func) == "DataLoader" else None)
            if not values and any(each.arg is None for each in event.node.keywords):
                unsure.append((event, ""))
            for unit, value in values:
                numbers, flag = self._numbers(unit, value)
                if all(numbers):
                    what = "/".join(sorted(map(str, numbers)))
                    return self.yes("workers", [event], f"{flag}, default {what}" if flag else what)
                if flag or numbers != {0}:
                    unsure.append((event, flag))
        if any(event.argument("training_data") is not None for event in self.frameworks.get("DeepSpeed", ())):
            return Fact("workers", Answer.UNKNOWN, (), "DeepSpeed's num_local_io_workers")
        trainer = "transformers Trainer" in self.frameworks or "Composer" in self.frameworks
        if unsure:
            return self.fact("workers", Answer.UNKNOWN, [event for event, _ in unsure], unsure[0][1])
        return Fact("workers", Answer.UNKNOWN, (), "dataloader_num_workers") if trainer else self.no("workers")

    def _numbers(self, unit: Unit, value: ast.expr) -> tuple[set[int | None], str]:
        """Return which numbers an expression may be (None: unknown), and the argument that sets it."""
        origin = self.trace.origin(unit, value)
        options = [self.trace.options[each] for each in origin.options]
        if options:
            default = options[0].default
            plain = len(options) == 1 and options[0].known and isinstance(default, int) and not origin.unknown
            return {default if plain and isinstance(default, int) else None}, options[0].flag
        texts = self.trace.texts(unit, value)
        return {int(text) if text and text.isdigit() else None for text in texts}, ""

    def sets(self, name: str, variable: str) -> Fact:
        """Answer whether an environment variable is set: os.environ[...] =, setdefault, putenv."""
        for unit in self.program.reached:
            for target, _, _ in unit.assigns:
                if (
                    isinstance(target, ast.Subscript)
                    and last(target.value) == "environ"
                    and _is(target.slice, variable)
                ):
                    return Fact(name, Answer.YES, (self.program.place(unit, target),), _before_torch(unit, target))
        events = [e for e in self.methods("setdefault", "putenv") if e.node.args and _is(e.node.args[0], variable)]
        return self.yes(name, events) if events else self.no(name)

    def stops(self) -> Fact:
        """Answer stops: should_stop; of a signal handler, nobody knows whether it leads to a save."""
        for unit in self.program.reached:
            for node in ast.walk(unit.node or unit.source.tree):
                if _is(node, "SLURMDDP_STOP_FILE"):
                    return Fact("stops", Answer.YES, (self.program.place(unit, node),))
        handlers = []
        for event in self.calls(CALL["stops"]):
            if not any(name.startswith("signal.") for name in event.names):
                return self.yes("stops", [event])
            words = {last(arg) for arg in event.node.args}
            named = {word for word in words if word.startswith("SIG")}
            if (words & set(_SIGNALS) or not named) and not words & {"SIG_DFL", "SIG_IGN"}:
                handlers.append(event)
        if handlers:
            return self.fact("stops", Answer.UNKNOWN, handlers, "it has a signal handler")
        if "Lightning" in self.frameworks:
            return self.fact("stops", Answer.UNKNOWN, self.frameworks["Lightning"], "it depends on Lightning's plugins")
        return self.no("stops")

    def requeues(self) -> Fact:
        """Answer requeues: submitit, scontrol requeue, Lightning's SLURMEnvironment."""
        events = self.calls(CALL["requeues"])
        for event in self.methods("SLURMEnvironment"):
            auto = event.argument("auto_requeue", 0)
            if not (isinstance(auto, ast.Constant) and auto.value is False):
                events.append(event)
        jobs = []
        for event in self.calls(re.compile(r"subprocess\.\w+|os\.system")):
            words = " ".join(self._words(event))
            if "scontrol" in words and "requeue" in words:
                events.append(event)
            elif "sbatch" in words:  # the same job again, or one that follows
                jobs.append(event)
        if jobs and not events:
            return self.fact("requeues", Answer.UNKNOWN, jobs, "it submits jobs")
        return self.yes("requeues", events) if events else self.no("requeues")


def _outermost(node: ast.AST) -> Iterator[str]:
    """Yield the names in an expression: of `args.path`, path."""
    if name := last(node):
        yield name
    else:
        for each in ast.iter_child_nodes(node):
            yield from _outermost(each)


def _acts(event: Event) -> bool:
    """Return whether a call may do more than read something: by its name, or as it is given what is trained."""
    name, node = last(event.node.func), event.node
    given = {word.lower() for arg in (*node.args, *(each.value for each in node.keywords)) for word in _outermost(arg)}
    alone = not (node.args or node.keywords) and not name[:1].isupper()
    return alone or bool(_ACTIVE.search(name)) or any(_TRAINED.search(word) for word in given)


def _is_local(event: Event, texts: set[str | None]) -> bool:
    """Return whether a call may read files that are here: a path, or a builder that is given files."""
    path = any(text and text.startswith(("/", ".", "~")) for text in texts)
    names = ("data_files", "data_dir", "local_files_only", "source", "local_dir")
    return path or any(event.argument(name) is not None for name in names)


def _downloads(event: Event) -> ast.expr | None:
    return event.argument("download") or event.argument("pretrained")


def _is(node: ast.AST | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value == value


def _before_torch(unit: Unit, target: ast.expr) -> str:
    """Return whether a variable is set before the module's first import of torch; empty within a function."""
    if unit.name:
        return ""
    lines = []
    for node in ast.walk(unit.source.tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
            lines += [node.lineno for name in names if name.split(".")[0] == "torch"]
    return "before torch is imported" if not lines or target.lineno < min(lines) else "after torch is imported"


def beside_script(judge: Judge) -> Fact:
    """Answer data_beside_script: __file__ in code other than changes of sys.path."""
    unsure = None
    for unit in judge.program.reached:
        for node, _ in unit.refs:
            if isinstance(node, ast.Name) and node.id == "__file__":
                text = judge.program.place(unit, node)
                if re.search(r"sys\.path|setup_root|print\(|log|split\(__file__|basename", text.text):
                    continue
                unsure = unsure or text
    for event in judge.events:
        reads = re.search(r"^open$|(?:^|_)(?:load|read|Dataset|ImageFolder)", last(event.node.func))
        words = judge.trace.origin(event.unit, event.node.args[0]).words if reads and event.node.args else set()
        if "__file__" in words and words & {"dirname", "parent", "parents"}:
            return judge.yes("data_beside_script", [event])
    if unsure:
        return Fact("data_beside_script", Answer.UNKNOWN, (unsure,))
    return judge.no("data_beside_script")
