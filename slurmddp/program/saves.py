"""Facts about saves and loads: what, where, on which ranks, and how a start finds them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from slurmddp.program.facts import QUESTIONS, Answer, Fact, Proposal
from slurmddp.program.judge import Judge
from slurmddp.program.names import chain, last
from slurmddp.program.trace import Option, strings
from slurmddp.program.walk import Event, Unit

YES, NO, UNKNOWN = Answer.YES, Answer.NO, Answer.UNKNOWN
_TORCH_SAVE = re.compile(
    r"torch\.save|pickle\.dump|(?:accelerate(?:\.\w+)*\.Accelerator\(\)|lightning(?:\.\w+)*\.Fabric\(\))\.save|"
    r"torch_xla(?:\.\w+)*\.save|safetensors(?:\.\w+)*\.save_(?:file|model)"
)
#: Methods with which frameworks save everything from all ranks, and what is in them.
_FRAMEWORK_SAVES = {
    r"accelerate(?:\.\w+)*\.Accelerator\(\)\.save_state": {
        "optimizer": YES,
        "scheduler": UNKNOWN,
        "step": UNKNOWN,
        "random": YES,
    },
    r"deepspeed\.initialize\(\)\.save_checkpoint": {"optimizer": YES, "scheduler": UNKNOWN, "step": YES, "random": NO},
    r"torch\.distributed\.checkpoint(?:\.\w+)*\.(?:save|save_state_dict|async_save)": dict.fromkeys(
        ("optimizer", "scheduler", "step", "random"), UNKNOWN
    ),
    r"slurmddp\.runtime(?:\.\w+)*\.Checkpointer\(\)\.save": dict.fromkeys(
        ("optimizer", "scheduler", "step", "random"), UNKNOWN
    ),
    r"timm\.utils(?:\.\w+)*\.CheckpointSaver\(\)\.save_checkpoint": {
        "optimizer": YES,
        "scheduler": NO,
        "step": YES,
        "random": NO,
    },
}
_FRAMEWORK_LOADS = re.compile(
    r"(?:accelerate(?:\.\w+)*\.Accelerator\(\)\.load_state|deepspeed\.initialize\(\)\.load_checkpoint|"
    r"torch\.distributed\.checkpoint(?:\.\w+)*\.(?:load|load_state_dict)|lightning(?:\.\w+)*\.Fabric\(\)\.load|"
    r"slurmddp\.runtime(?:\.\w+)*\.Checkpointer(?:\(\)\.load)?|timm\.models(?:\.\w+)*\.resume_checkpoint)"
)
_WORDS = {
    "optimizer": re.compile(r"opt(?:im|imizer|imizers)?(?:$|[^a-z])|optim", re.IGNORECASE),
    "scheduler": re.compile(r"sched|^lr_s", re.IGNORECASE),
    "step": re.compile(r"epoch|step|iter(?:ation|_num|s)?(?:$|_)|(?:^|_)it$", re.IGNORECASE),
    "random": re.compile(r"rng|random_state|get_state", re.IGNORECASE),
}
_CHANGES = re.compile(
    r"time\.(?:time|strftime|ctime|asctime|localtime|time_ns)|(?:datetime\.)*(?:datetime\.)?(?:now|utcnow|today)|"
    r"datetime(?:\.datetime|\.date)?\.(?:now|today|utcnow)|os\.getpid|uuid\.\w+|tempfile\.\w+|secrets\.\w+|random\.(?:randint|random|choice)"
)
_RESUMES = re.compile(
    r"resume|ckpt|checkpoint|restore|continue|snapshot|init_from|load|start_from|pretrained|weights", re.IGNORECASE
)
_SURELY = re.compile(r"resume|continue|restore", re.IGNORECASE)
_STEERS = re.compile(r"epoch|step|iter|optim|sched", re.IGNORECASE)
_KINDS = ("optimizer", "scheduler", "step", "random")
_PLAIN_TEST = re.compile(
    r"epoch|step|iter|best|acc|loss|save|every|interval|freq|ckpt|checkpoint|output|out_dir|dir|path|args|cfg|config|opt|len|"
    r"num|total|max|min|val|eval|exists|os|print|log|last|model|metric|score|True|False|None|n_|self|isfile|flags|state|only",
    re.IGNORECASE,
)


class Saves:
    """The saves of a program. trainers: frameworks that save by themselves."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        found = [each for event in judge.calls(_TORCH_SAVE) for each in self._passed_on(event)]
        self.plain = [event for event in found if not self._is_data(event)]
        self.by_framework = [
            (event, kinds) for pattern, kinds in _FRAMEWORK_SAVES.items() for event in judge.calls(re.compile(pattern))
        ]
        self.exports = [event for event in judge.methods("save_pretrained", "save_model") if not self._is_local(event)]
        self.configured = bool(judge.configured & {"transformers Trainer", "Lightning"})
        self.trainer = next((name for name in ("transformers Trainer", "Lightning") if name in judge.frameworks), "")
        #: Frameworks that may save and load by options that are not read here.
        self.own_loop = next((name for name in ("Composer", "Ray Train") if name in judge.frameworks), "")
        self.contents = [self._content(event) for event in self.plain]

    def _passed_on(self, event: Event) -> list[Event]:
        """Return, for the call in a wrapper such as save_on_master(*args), the calls of the wrapper."""
        if not any(isinstance(arg, ast.Starred) for arg in event.node.args):
            return [event]
        wrapper = f"@{event.unit.source.module}:{event.unit.name}"
        calls = [each for each in self.judge.events if wrapper in each.names]
        return [each._replace(guards=(*each.guards, *event.guards), names=event.names) for each in calls] or [event]

    @staticmethod
    def _is_local(event: Event) -> bool:
        return any(name.startswith("@") for name in event.names)

    def _is_data(self, event: Event) -> bool:
        """Return whether a save is of a dataset or of results: its words have no model in them."""
        if (saved := _saved(event)) is None:
            return False
        words = " ".join(self.judge.trace.origin(event.unit, saved).words).lower()
        return not re.search(r"state_dict|model|net|optim|ckpt|checkpoint|state|weight", words)

    # Contents

    def _content(self, event: Event) -> dict[str, Answer]:
        found: set[str] = set()
        saved = _saved(event)
        sure = saved is not None and self._keys(event.unit, saved, found, 0)
        answers = {}
        for kind in _KINDS:
            hit = any(_WORDS[kind].search(each) for each in found)
            answers[kind] = YES if hit else NO if sure else UNKNOWN
        return answers

    def _keys(self, unit: Unit, node: ast.expr, found: set[str], depth: int) -> bool:
        """Collect the keys of what is saved. Return whether these are all."""
        if depth > 8:
            return False
        if isinstance(node, ast.Dict):
            sure = True
            for key, value in zip(node.keys, node.values, strict=True):
                if key is None:
                    sure &= self._keys(unit, value, found, depth + 1)
                elif isinstance(key, ast.Constant):
                    found.add(str(key.value))
                    found.update(
                        strings([value]) if isinstance(value, ast.Call) and last(value.func) == "state_dict" else ()
                    )
                else:
                    sure = False
            return sure
        if isinstance(node, ast.Call):
            if last(node.func) == "state_dict" and isinstance(node.func, ast.Attribute):
                found.update(part for part in chain(node.func.value).split(".") if part != "self")
                return not self._is_own_state(node, unit)
            if isinstance(node.func, ast.Name) and node.func.id == "dict":
                found.update(each.arg for each in node.keywords if each.arg)
                return all(each.arg for each in node.keywords) and not node.args
            return self._of_function(unit, node, found, depth)
        if isinstance(node, (ast.Name, ast.Attribute)):
            if _WORDS["step"].search(last(node)) is None and re.fullmatch(
                r"(?:self\.)?(?:model|net|network)", chain(node)
            ):
                return True
            values = self.judge.trace.sources(unit, node)
            if any(isinstance(value, ast.Dict) for _, value in values):  # not what was loaded under the same name
                values = [(of, value) for of, value in values if chain(getattr(value, "func", value)) != "torch.load"]
            keys, grown = self._added(node)
            found |= keys
            return bool(values) and grown and all(self._each([*values], found, depth))
        if isinstance(node, ast.DictComp):
            return self._keys(unit, node.generators[0].iter, found, depth + 1)
        return False

    def _each(self, values: list[tuple[Unit, ast.expr]], found: set[str], depth: int) -> list[bool]:
        """Collect the keys of each of several values: all of them, also behind one that is not known."""
        return [self._keys(unit, value, found, depth + 1) for unit, value in values]

    def _is_own_state(self, node: ast.Call, unit: Unit) -> bool:
        names = self.judge.program.names.dotted(unit.source.module, node.func)
        return any("@" in name and name.endswith("state_dict") and "_state" in name for name in names)

    def _added(self, node: ast.expr) -> tuple[set[str], bool]:
        """Return the keys that are put into a dict later, and whether all are known."""
        keys, sure = set(), True
        for unit in self.judge.program.reached:
            for target, _, _ in unit.assigns:
                if isinstance(target, ast.Subscript) and last(target.value) == last(node):
                    if isinstance(target.slice, ast.Constant):
                        keys.add(str(target.slice.value))
                    else:
                        sure = False
        for event in self.judge.methods("update"):
            if isinstance(event.node.func, ast.Attribute) and chain(event.node.func.value) == chain(node):
                sure = False
        return keys, sure

    def _of_function(self, unit: Unit, node: ast.Call, found: set[str], depth: int) -> bool:
        names = self.judge.program.names.dotted(unit.source.module, node.func)
        for name in names:
            of, _, plain = name.removeprefix("@").partition(":")
            for each in self.judge.program.reached:
                if name.startswith("@") and each.source.module == of and each.name == plain and each.node is not None:
                    returned = [
                        r.value for r in ast.walk(each.node) if isinstance(r, ast.Return) and r.value is not None
                    ]
                    return bool(returned) and all(self._each([(each, value) for value in returned], found, depth))
        return False

    # Facts

    def facts(self) -> Iterator[Fact]:
        """Yield the facts about saves."""
        judge, all_events = self.judge, [*self.plain, *(event for event, _ in self.by_framework)]
        if self.configured and not all_events:
            yield from (
                Fact(name, UNKNOWN, (), "a Trainer, as it is configured")
                for name in QUESTIONS
                if name.startswith("save")
            )
            yield judge.no("saves_in_run")
            yield judge.no("rank_in_name")
            return
        if self.trainer and not all_events:
            yield from self._of_trainer()
            return
        if not all_events:
            known = judge.yes("saves", self.exports) if self.exports else self._no_save()
            yield known
            none = NO if known.answer is not UNKNOWN else UNKNOWN
            yield Fact("saves_every_rank", none if not self.exports else UNKNOWN)
            yield from (Fact(f"saves_{kind}", none) for kind in _KINDS)
            yield from self._places(self.exports)
            return
        yield judge.on_demand("saves", all_events)
        yield self._every_rank()
        for kind in _KINDS:
            answers = [each[kind] for each in self.contents] + [kinds[kind] for _, kinds in self.by_framework]
            events = [*self.plain, *(event for event, _ in self.by_framework)]
            hits = [event for event, answer in zip(events, answers, strict=True) if answer is YES]
            unclear = UNKNOWN if UNKNOWN in answers or judge.hidden or self.trainer else NO
            yield judge.fact(f"saves_{kind}", YES if hits else unclear, hits)
        yield from self._places(all_events)

    def _no_save(self) -> Fact:
        """Return no, or cannot tell if an object that is not known saves something."""
        names = ("save", "save_checkpoint", "save_weights", "save_state", "save_snapshot", "save_state_dict", "report")
        maybe = [e for e in self.judge.methods(*names) if not e.names or any(n.startswith("torch.") for n in e.names)]
        maybe += [e for e in self.judge.events if e not in maybe and _foreign(e, r"save(?!fig)|dump|checkpoint")]
        if maybe or self.own_loop:
            return self.judge.fact("saves", UNKNOWN, maybe, self.own_loop)
        return self.judge.no("saves")

    def _of_trainer(self) -> Iterator[Fact]:
        events = self.judge.frameworks[self.trainer]
        off = any(isinstance(value := event.argument("enable_checkpointing"), ast.Constant) and value.value is False
                  for event in events)  # fmt: skip
        random = YES if self.trainer == "transformers Trainer" else NO
        answer = {True: NO, False: YES}[off]
        yield self.judge.fact("saves", answer, events, self.trainer)
        yield Fact("saves_every_rank", NO, (), self.trainer)
        for kind in _KINDS:
            yield Fact(f"saves_{kind}", NO if off else random if kind == "random" else YES, (), self.trainer)
        where = self.judge.methods("TrainingArguments", "ModelCheckpoint", "Trainer")
        yield from self._places(where, surely=False)

    def _every_rank(self) -> Fact:
        program, unsure = self.judge.program, []
        judge_no_group = self.judge.process_group().answer is NO
        for event in self.plain:
            if self._coordinates(event) or program.always_under(event.unit, event.guards):
                continue
            words = set(strings(program.conditions(event.unit, event.guards)))
            path = event.argument("path", 0) if _path_first(event) else event.argument("f", 1)
            by_rank = path is not None and _ranked(self.judge.trace.origin(event.unit, path).words)
            alone = judge_no_group and not any(map(program.of_rank, program.conditions(event.unit, event.guards)))
            if by_rank or not (alone or all(_PLAIN_TEST.search(word) for word in words)):
                unsure.append(event)
            else:
                return self.judge.yes("saves_every_rank", [event])
        return self.judge.fact("saves_every_rank", UNKNOWN if unsure else NO, unsure)

    @staticmethod
    def _coordinates(event: Event) -> bool:
        return any(re.search(r"Accelerator\(\)\.save|Fabric\(\)\.save|torch_xla", name) for name in event.names)

    def _paths(self, events: list[Event]) -> Iterator[tuple[Event, ast.expr]]:
        for event in events:
            name = last(event.node.func)
            position = 1 if event in self.plain and not _path_first(event) else 0
            for keyword in (
                "f",
                "output_dir",
                "dirpath",
                "save_dir",
                "checkpoint_id",
                "default_root_dir",
                "path",
                "filename",
            ):
                if (value := event.argument(keyword)) is not None:
                    yield event, value
                    break
            else:
                if position < len(event.node.args) and name not in ("Trainer", "ModelCheckpoint"):
                    yield event, event.node.args[position]

    def _places(self, events: list[Event], *, surely: bool = True) -> Iterator[Fact]:
        """Yield the facts about names and folders."""
        judge, changing, ranked, in_run, unclear = self.judge, [], [], [], []
        paths = list(self._paths(events))
        for event, path in paths:
            origin = judge.trace.origin(event.unit, path)
            if any(_CHANGES.fullmatch(call) for call in origin.calls):
                changing.append(event)
            if _ranked(origin.words):
                ranked.append(event)
            if origin.words & {"SLURMDDP_RUN", "SLURMDDP_CHECKPOINTS"}:
                in_run.append(event)
            if origin.unknown:
                unclear.append(event)
        open_ = unclear or judge.hidden or not surely or len({id(e.node) for e, _ in paths}) < len(events)
        rest = UNKNOWN if open_ and (events or judge.hidden or not surely) else NO
        yield judge.fact("save_name_changes", YES if changing and surely else UNKNOWN if changing else rest, changing)
        yield judge.fact("rank_in_name", UNKNOWN if ranked else rest, ranked)
        yield judge.fact("saves_in_run", YES if in_run else rest, in_run)

    # Loads

    def loads(self) -> tuple[Fact, Fact, list[Option]]:
        """Answer loads and loads_alone. Return also the arguments on which a load depends."""
        judge = self.judge
        named = [event for event in judge.methods("train", "fit", "run") if _resumes(event)]
        framework = judge.calls(_FRAMEWORK_LOADS) + named
        plain = judge.calls(re.compile(r"torch\.(?:load|hub\.load_state_dict_from_url)|pickle\.load"))
        states = judge.methods("load_state_dict")
        steering = [e for e in states if isinstance(e.node.func, ast.Attribute) and _steers(chain(e.node.func.value))]
        loaders = {f"@{event.unit.source.module}:{event.unit.name}" for event in plain if event.unit.name}
        given = [event for event in judge.events if event.names & loaders and _gives_optimizer(event)]
        steps = list(self._read_steps())
        continues = bool(plain and (steering or steps or given))
        if framework or continues:
            events = framework or plain
            options = self._options(events)
            fact = judge.yes("loads", events, ", ".join(each.flag for each in options))
            return fact, self._alone(events, options), options
        trains = judge.calls(re.compile(r"(?:transformers|trl)(?:\.\w+)*\.\w*Trainer\(\)\.train"))
        if trains and not plain and not any(e.node.args or e.node.keywords for e in trains):
            return judge.no("loads"), judge.no("loads_alone"), []
        names = ("load", "load_checkpoint", "load_state", "load_snapshot", "restore", "resume", "load_weights")
        maybe = [event for event in judge.methods(*names) if not event.names]
        maybe += [e for e in judge.events if e not in plain and _foreign(e, r"(?:^|_)load(?:_|$)|restore|checkpoint")]
        if maybe or self.own_loop or (plain and states) or self.trainer or self.configured:
            why = "it loads something; whether it continues from it is open" if plain else self.trainer
            return judge.fact("loads", UNKNOWN, plain, why), judge.fact("loads_alone", UNKNOWN, plain), []
        return judge.no("loads"), judge.no("loads_alone"), []

    def _read_steps(self) -> Iterator[ast.expr]:
        """Yield values such as checkpoint["epoch"] that are assigned."""
        for unit in self.judge.program.reached:
            for target, value, _ in unit.assigns:
                words = set(strings([value]))
                subscript = any(isinstance(each, ast.Subscript) for each in ast.walk(value))
                if (
                    subscript
                    and _WORDS["step"].search(last(target))
                    and any(re.search("ckpt|checkpoint|snapshot|state|resume|saved", w) for w in words)
                ):
                    yield value

    def _options(self, events: list[Event]) -> list[Option]:
        found: dict[str, Option] = {}
        for event in events:
            tests = self.judge.program.conditions(event.unit, event.guards)
            nodes = [*tests, *event.node.args, *(each.value for each in event.node.keywords)]
            for node in nodes:
                for name in self.judge.trace.origin(event.unit, node).options:
                    if _RESUMES.search(name):
                        found[name] = self.judge.trace.options[name]
        return list(found.values())

    def _alone(self, events: list[Event], options: list[Option]) -> Fact:
        looks = []
        for event in events:
            tests = self.judge.program.conditions(event.unit, event.guards)
            words = set(strings([*tests, *event.node.args]))
            searched = {"exists", "isfile", "is_file", "glob", "listdir"} & words
            mine = [option for option in options if option in self._options([event])]
            if searched and not mine and not self.judge.trace.origin(event.unit, event.node).unknown:
                looks.append(event)
        if looks and not options:
            return self.judge.yes("loads_alone", looks)
        sure = len(options) == 1 and _SURELY.search(options[0].dest) and not options[0].default
        searches = [
            e
            for e in self.judge.events
            if re.search("last_checkpoint|latest|auto_resume|auto_load|find_check|newest", last(e.node.func))
        ]
        return (
            self.judge.no("loads_alone") if sure and not searches and options[0].known else Fact("loads_alone", UNKNOWN)
        )


def _foreign(event: Event, pattern: str) -> bool:
    """Return whether a library's call may save or load a model, by its last name."""
    ours = ("@", "builtins", "json", "yaml", "toml", "csv", "logging", "matplotlib", "datasets", "torch.")
    foreign = bool(event.names) and not any(name.startswith(ours) for name in event.names)
    return foreign and re.search(pattern, last(event.node.func), re.IGNORECASE) is not None


def _resumes(event: Event) -> bool:
    value = event.argument("resume_from_checkpoint") or event.argument("ckpt_path")
    return value is not None and not (isinstance(value, ast.Constant) and not value.value)


def _steers(name: str) -> bool:
    return bool(_STEERS.search(name) or _WORDS["optimizer"].search(name.rpartition(".")[2]))


def _gives_optimizer(event: Event) -> bool:
    values = [*event.node.args, *(each.value for each in event.node.keywords)]
    return any(_WORDS["optimizer"].search(last(value)) for value in values)


def _path_first(event: Event) -> bool:
    return any("Fabric()" in name for name in event.names)


def _saved(event: Event) -> ast.expr | None:
    """Return what a call saves: torch.save(obj, f), fabric.save(path, state)."""
    return event.argument("state", 1) if _path_first(event) else event.argument("obj", 0)


def _ranked(words: set[str]) -> bool:
    return any(re.search(r"(?:^|_)(?:rank|get_rank|local_rank|process_index)(?:$|_)", word.lower()) for word in words)


def proposals(saves: Saves, found: dict[str, Fact], options: list[Option]) -> Iterator[Proposal]:
    """Yield the settings of which the script leaves no doubt."""
    if found["loads"].answer is YES and found["loads_alone"].answer is NO and len(options) == 1:
        option = options[0]
        plain = option.known and not option.default and option.flag.startswith("--")
        if plain and _SURELY.search(option.dest):
            value = [option.flag, "{checkpoint}"] if option.takes else [option.flag]
            what = "loads the path behind" if option.takes else "continues with"
            yield Proposal(
                "train.resume_args",
                value,
                f"the script {what} {option.flag}{f' (line {option.line})' if option.line else ''}",
            )
    if found["saves"].answer is not YES or found["save_name_changes"].answer is not NO:
        return
    texts: set[str | None] = set()
    flags = set()
    for event, path in saves._paths([*saves.plain, *(event for event, _ in saves.by_framework)]):
        texts |= saves.judge.trace.texts(event.unit, path)
        flags |= {saves.judge.trace.options[each].flag for each in saves.judge.trace.origin(event.unit, path).options}
    if texts and None not in texts and not saves.trainer:
        watch = sorted({_watched(text) for text in texts if text})
        if watch and len(watch) <= 3 and not any(each.startswith(("*", "/tmp", "~", "$")) for each in watch):
            depends = f"; with another value of {' or '.join(sorted(flags))}, change it" if flags else ""
            yield Proposal("checkpoint.watch", watch, f"the script saves there{depends}")
    if (
        found["loads_alone"].answer is YES
        and texts
        and all(text and not text.startswith(("/", "~", "$")) for text in texts)
    ):
        why = "the script continues from any save in its working directory, also from one of another run"
        yield Proposal("train.workdir", "run", f"{why}; give relative paths of data as absolute ones")


def _watched(text: str) -> str:
    """Return the folder of a save below a folder of its own, else the file as a pattern."""
    folder = text.rpartition("/")[0]
    return folder if folder.strip("./") and "*" not in folder else text
