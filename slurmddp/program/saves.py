"""Facts about saves: what, where, and on which ranks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from slurmddp.program.facts import NO, UNKNOWN, YES, Answer, Fact
from slurmddp.program.judge import Judge
from slurmddp.program.libraries import CHECKPOINTER, CHECKPOINTER_SAVES
from slurmddp.program.names import chain, is_value, last
from slurmddp.program.ranks import process_group
from slurmddp.program.trace import strings
from slurmddp.program.walk import Event, Unit

KINDS = ("optimizer", "scheduler", "step", "random")
WORDS = {
    "optimizer": re.compile(r"opt(?:im|imizer|imizers)?(?:$|[^a-z])|optim", re.IGNORECASE),
    "scheduler": re.compile(r"sched|^lr_s", re.IGNORECASE),
    "step": re.compile(r"epoch|step|iter(?:ation|_num|s)?(?:$|_)|(?:^|_)it$", re.IGNORECASE),
    "random": re.compile(r"rng|random_state|get_state", re.IGNORECASE),
}
_TORCH_SAVE = re.compile(
    r"torch\.save|pickle\.dump|(?:accelerate(?:\.\w+)*\.Accelerator\(\)|lightning(?:\.\w+)*\.Fabric\(\))\.save|"
    r"torch_xla(?:\.\w+)*\.save|safetensors(?:\.\w+)*\.save_(?:file|model)"
)
#: Methods with which frameworks save from all ranks, and whether KINDS are in it.
_FRAMEWORK_SAVES = (
    (r"accelerate(?:\.\w+)*\.Accelerator\(\)\.save_state", (YES, UNKNOWN, UNKNOWN, YES)),
    (r"deepspeed\.initialize\(\)\.save_checkpoint", (YES, UNKNOWN, YES, NO)),
    (r"torch\.distributed\.checkpoint(?:\.\w+)*\.(?:save|save_state_dict|async_save)", (UNKNOWN,) * 4),
    (r"timm\.utils(?:\.\w+)*\.CheckpointSaver\(\)\.save_checkpoint", (YES, NO, YES, NO)),
)
_CHANGES = re.compile(
    r"time\.(?:time|strftime|ctime|asctime|localtime|time_ns)|(?:datetime\.)*(?:datetime\.)?(?:now|utcnow|today)|"
    r"datetime(?:\.datetime|\.date)?\.(?:now|today|utcnow)|os\.getpid|uuid\.\w+|tempfile\.\w+|secrets\.\w+|random\.(?:randint|random|choice)"
)
#: What depends on a folder's content, perhaps the number of the next run; and loggers, which name their folders.
_LISTS = re.compile(
    r"glob\.i?glob|os\.(?:listdir|scandir)|(?:.*\.)?(?:iterdir|increment_path|SummaryWriter|\w+Logger)|wandb\.\w+"
)
_MEMORY = re.compile(r"io\.BytesIO")
_PATHS = ("f", "output_dir", "dirpath", "save_dir", "checkpoint_id", "default_root_dir", "path", "filename")
_PLAIN_TEST = re.compile(
    r"epoch|step|iter|best|acc|loss|save|every|interval|freq|ckpt|checkpoint|output|out_dir|dir|path|args|cfg|config|opt|len|"
    r"num|total|max|min|val|eval|exists|os|print|log|last|model|metric|score|True|False|None|n_|self|isfile|flags|state|only",
    re.IGNORECASE,
)


class Saves:
    """The saves of a program. trainer: the framework that saves by itself."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        found = [each for event in judge.calls(_TORCH_SAVE) for each in self._passed_on(event)]
        self.plain = [event for event in found if not self._is_data(event)]
        self.by_framework = {
            event: answers for pattern, answers in _FRAMEWORK_SAVES for event in judge.calls(re.compile(pattern))
        }
        #: slurmddp's Checkpointer where it is made, and those of them that save in the run folder.
        made, saving = judge.calls(CHECKPOINTER), judge.calls(CHECKPOINTER_SAVES)
        extra = any(re.search(WORDS["scheduler"], word) for event in saving for word in strings([event.node]))
        for event in made if saving else ():
            scheduler = YES if event.argument("scheduler") else UNKNOWN if extra else NO
            self.by_framework[event] = (YES, scheduler, YES, YES)
        self.in_run = [event for event in made if saving and event.argument("folder", 2) is None]
        self.events = [*self.plain, *self.by_framework]
        self.exports = [
            event for event in judge.methods("save_pretrained", "save_model")
            if not any(name.startswith("@") for name in event.names)
        ]  # fmt: skip
        self.configured = bool(judge.configured & {"transformers Trainer", "Lightning"})
        self.trainer = next((name for name in ("transformers Trainer", "Lightning") if name in judge.frameworks), "")
        #: Frameworks that may save and load by options that are not read here.
        self.own_loop = next((name for name in ("Composer", "Ray Train") if name in judge.frameworks), "")

    def _passed_on(self, event: Event) -> list[Event]:
        """Return, for the call in a wrapper such as save_on_master(*args), the calls of the wrapper."""
        if not any(isinstance(arg, ast.Starred) for arg in event.node.args):
            return [event]
        wrapper = f"@{event.unit.source.module}:{event.unit.name}"
        calls = [each for each in self.judge.events if wrapper in each.names]
        return [each._replace(guards=(*each.guards, *event.guards), names=event.names) for each in calls] or [event]

    def _is_data(self, event: Event) -> bool:
        """Return whether a save is of a dataset or of results: its words have no model in them."""
        if (saved := _saved(event)) is None:
            return False
        path = event.argument("f", 1)
        if path is not None and self.judge.trace.always(event.unit, path, _MEMORY):
            return True
        words = " ".join(self.judge.trace.origin(event.unit, saved).words).lower()
        return not re.search(r"state_dict|model|net|optim|ckpt|checkpoint|snapshot|state|weight", words)

    # Contents. Each part is collected, also behind one that is not known: not lazily.

    def _content(self, event: Event) -> tuple[Answer, ...]:
        if event in self.by_framework:
            return self.by_framework[event]
        found: set[str] = set()
        saved = _saved(event)
        otherwise = NO if saved is not None and self._keys(event.unit, saved, found, 0) else UNKNOWN
        return tuple(YES if any(map(WORDS[kind].search, found)) else otherwise for kind in KINDS)

    def _keys(self, unit: Unit, node: ast.expr, found: set[str], depth: int) -> bool:
        """Collect the keys of what is saved. Return whether these are all."""
        if depth > 8:
            return False
        if isinstance(node, ast.Dict):
            return False not in [
                self._item(unit, *each, found, depth) for each in zip(node.keys, node.values, strict=True)
            ]
        if isinstance(node, (ast.List, ast.Tuple)):
            return False not in [self._element(unit, each, found, depth) for each in node.elts]
        if isinstance(node, ast.Call):
            if last(node.func) == "state_dict" and isinstance(node.func, ast.Attribute):
                found.update(part for part in chain(node.func.value).split(".") if part != "self")
                return not self._is_own_state(node, unit)
            if isinstance(node.func, ast.Name) and node.func.id == "dict":
                keys = [ast.Constant(each.arg) if each.arg else None for each in node.keywords]
                items = zip(keys, (each.value for each in node.keywords), strict=True)
                return False not in [self._item(unit, *each, found, depth) for each in items] and not node.args
            returned = self.judge.trace.returned(self.judge.program.names.dotted(unit.source.module, node.func))
            return bool(returned) and self._each(returned, found, depth)
        if isinstance(node, (ast.Name, ast.Attribute)):
            if WORDS["step"].search(last(node)) is None and re.fullmatch(
                r"(?:self\.)?(?:model|net|network)", chain(node)
            ):
                return True
            values = self.judge.trace.sources(unit, node)
            if any(isinstance(value, ast.Dict) for _, value in values):  # not what was loaded under the same name
                values = [(of, value) for of, value in values if chain(getattr(value, "func", value)) != "torch.load"]
            grown = self._added(node, found, depth)
            return bool(values) and self._each(values, found, depth) and grown
        if isinstance(node, ast.DictComp):
            return self._keys(unit, node.generators[0].iter, found, depth + 1)
        return False

    def _item(self, unit: Unit, key: ast.expr | None, value: ast.expr, found: set[str], depth: int) -> bool:
        if key is None:
            return self._keys(unit, value, found, depth + 1)
        if isinstance(key, ast.Constant):
            found.add(str(key.value))
            found.update(strings([value]) if isinstance(value, ast.Call) and last(value.func) == "state_dict" else ())
        return isinstance(key, ast.Constant)

    def _element(self, unit: Unit, node: ast.expr, found: set[str], depth: int) -> bool:
        """Collect from an element of a list: a state, or a number by its name."""
        if isinstance(node, ast.Call):
            return self._keys(unit, node, found, depth + 1)
        found.add(last(node))
        return bool(last(node))

    def _each(self, values: list[tuple[Unit, ast.expr]], found: set[str], depth: int) -> bool:
        """Collect the keys of each of several values: all of them, also behind one that is not known."""
        return False not in [self._keys(unit, value, found, depth + 1) for unit, value in values]

    def _is_own_state(self, node: ast.Call, unit: Unit) -> bool:
        names = self.judge.program.names.dotted(unit.source.module, node.func)
        return any("@" in name and name.endswith("state_dict") and "_state" in name for name in names)

    def _added(self, node: ast.expr, found: set[str], depth: int) -> bool:
        """Collect what is put into a dict or list later. Return whether all is known."""
        sure = True
        for unit in self.judge.program.reached:
            for target, value, _ in unit.assigns:
                if isinstance(target, ast.Subscript) and last(target.value) == last(node):
                    sure &= self._item(unit, target.slice, value, found, depth)
        for event in self.judge.methods("update", "append", "extend"):
            if isinstance(event.node.func, ast.Attribute) and chain(event.node.func.value) == chain(node):
                added = event.node.args[0] if event.node.args and event.node.func.attr == "append" else None
                sure &= added is not None and self._element(event.unit, added, found, depth)
        return sure

    # Facts

    def facts(self) -> Iterator[Fact]:
        """Yield the facts about saves."""
        judge, answers = self.judge, [self._content(event) for event in self.events]
        if not self.events:
            yield from self._without_calls()
            return
        yield judge.on_demand("saves", self.events)
        yield self._every_rank()
        for index, kind in enumerate(KINDS):
            hits = [event for event, each in zip(self.events, answers, strict=True) if each[index] is YES]
            more = judge.unseen or self.trainer or any(each[index] is UNKNOWN for each in answers)
            yield judge.fact(f"saves_{kind}", YES if hits else UNKNOWN if more else NO, hits)
        yield from self._places(self.events)

    def _without_calls(self) -> Iterator[Fact]:
        """Yield the facts of a program that saves by a framework, a library, or not at all."""
        judge = self.judge
        if self.configured or self.trainer:
            yield from self._of_trainer()
            return
        saves = judge.yes("saves", self.exports) if self.exports else self._no_save()
        none = NO if saves.answer is not UNKNOWN else UNKNOWN
        yield saves
        yield Fact("saves_every_rank", none if not self.exports else UNKNOWN)
        yield from (Fact(f"saves_{kind}", none) for kind in KINDS)
        yield from self._places(self.exports)

    def _no_save(self) -> Fact:
        """Return no, or cannot tell if an object that is not known saves something."""
        names = ("save", "save_checkpoint", "save_weights", "save_state", "save_snapshot", "save_state_dict", "report")
        maybe = [e for e in self.judge.methods(*names) if not e.names or any(n.startswith("torch.") for n in e.names)]
        maybe += [e for e in self.judge.events if e not in maybe and foreign(e, r"save(?!fig)|dump|checkpoint")]
        if maybe or self.own_loop:
            return self.judge.fact("saves", UNKNOWN, maybe, self.own_loop)
        return self.judge.no("saves")

    def _of_trainer(self) -> Iterator[Fact]:
        judge = self.judge
        events = judge.frameworks.get(self.trainer, [])
        off = any(is_value(event.argument("enable_checkpointing"), False) for event in events)
        known, name = (
            (NO if off else YES, self.trainer) if self.trainer else (UNKNOWN, "a Trainer, as it is configured")
        )
        yield judge.fact("saves", known, events, name)
        more = [each for each in (*self.exports, *judge.methods("save"))
                if each not in events and not judge.program.always_under(each.unit, each.guards)]  # fmt: skip
        yield judge.fact("saves_every_rank", UNKNOWN if more or not self.trainer else NO, more, name)
        for kind in KINDS:
            no_random = kind == "random" and name == "Lightning"
            yield Fact(f"saves_{kind}", NO if no_random else known, (), name)
        named = re.compile(r"TrainingArguments$|ModelCheckpoint$|Trainer$|Config$")
        yield from self._places([each for each in judge.events if named.search(last(each.node.func))], surely=False)

    def _every_rank(self) -> Fact:
        program, unsure = self.judge.program, []
        judge_no_group = process_group(self.judge).answer is NO
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

    def paths(self, events: list[Event]) -> Iterator[tuple[Event, ast.expr]]:
        """Yield the events of which a path is known, with it."""
        for event in events:
            if event.matches(CHECKPOINTER):
                if (folder := event.argument("folder", 2)) is not None:
                    yield event, folder
                continue
            named = [value for each in _PATHS if (value := event.argument(each)) is not None]
            position = 1 if event in self.plain and not _path_first(event) else 0
            args = [] if re.search(r"Trainer$|ModelCheckpoint$", last(event.node.func)) else event.node.args
            for value in (named or args[position : position + 1])[:1]:
                yield event, value

    def _places(self, events: list[Event], *, surely: bool = True) -> Iterator[Fact]:
        """Yield the facts about names and folders. surely: whether the calls, not a framework, choose the names."""
        judge, paths = self.judge, list(self.paths(events))
        origins = [(event, judge.trace.origin(event.unit, path)) for event, path in paths]
        changing = [event for event, path in paths if judge.trace.always(event.unit, path, _CHANGES)]
        perhaps = [
            event for event, each in origins if any(_CHANGES.fullmatch(c) or _LISTS.fullmatch(c) for c in each.calls)
        ]
        ranked = [event for event, each in origins if _ranked(each.words)]
        in_run = [event for event, each in origins if each.words & {"SLURMDDP_RUN", "SLURMDDP_CHECKPOINTS"}]
        all_seen = not (judge.unseen or any(each.unknown for _, each in origins))
        in_run += self.in_run
        no_path = len({id(event.node) for event, _ in paths} | {id(event.node) for event in self.in_run}) < len(events)
        rest = NO if all_seen and surely and not no_path else UNKNOWN
        names = changing or perhaps
        yield judge.fact("save_name_changes", YES if changing else UNKNOWN if perhaps else rest, names)
        no_rank = NO if all_seen and not (surely and no_path) else UNKNOWN
        yield judge.fact("rank_in_name", UNKNOWN if ranked else no_rank, ranked)
        yield judge.fact("saves_in_run", YES if in_run else rest, in_run)


def foreign(event: Event, pattern: str) -> bool:
    """Return whether a library's call may save or load a model, by its last name."""
    ours = ("@", "builtins", "json", "yaml", "toml", "csv", "logging", "matplotlib", "datasets", "torch.", "slurmddp.")
    other = bool(event.names) and not any(name.startswith(ours) for name in event.names)
    return other and re.search(pattern, last(event.node.func), re.IGNORECASE) is not None


def _path_first(event: Event) -> bool:
    return any("Fabric()" in name for name in event.names)


def _saved(event: Event) -> ast.expr | None:
    """Return what a call saves: torch.save(obj, f), fabric.save(path, state)."""
    return event.argument("state", 1) if _path_first(event) else event.argument("obj", 0)


def _ranked(words: set[str]) -> bool:
    return any(re.search(r"(?:^|_)(?:rank|get_rank|local_rank|process_index)(?:$|_)", word.lower()) for word in words)
