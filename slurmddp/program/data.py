"""Facts about data: which part a rank gets, from where, by how many workers."""

from __future__ import annotations

import ast
import re

from slurmddp.program.facts import NO, UNKNOWN, YES, Fact
from slurmddp.program.judge import RANK_WORD, Judge
from slurmddp.program.libraries import CALL, DOES, SAMPLER
from slurmddp.program.names import is_value, last
from slurmddp.program.walk import Event, Unit

_PREPARE = re.compile(r"accelerate(?:\.\w+)*\.Accelerator\(\)\.prepare")
_OWN = re.compile(r"Sampler|Data|Load|Batch", re.IGNORECASE)
_NOT_DATA = re.compile(r"sys\.path|setup_root|print\(|log|split\(__file__|basename")
_LOCAL_FILES = ("data_files", "data_dir", "local_files_only", "source", "local_dir")


def shares(judge: Judge) -> tuple[Fact, Fact]:
    """Answer shards_data and set_epoch."""
    shards, epochs = judge.by_call("shards_data"), judge.methods("set_epoch") or judge.calls(SAMPLER)
    prepared = [
        event for event in judge.calls(_PREPARE)
        if any(isinstance(arg, ast.Starred) or re.search(r"load|data|dl", last(arg).lower()) for arg in event.node.args)
    ]  # fmt: skip
    if prepared:
        return judge.yes("shards_data", prepared, "Accelerate"), judge.yes("set_epoch", prepared, "Accelerate")
    for name, events in judge.frameworks.items():
        if name in DOES["set_epoch"] or (name == "Fabric" and shards.answer is YES):
            offs = [e.argument("use_distributed_sampler") or e.argument("replace_sampler_ddp") for e in events]
            if any(off is not None and not is_value(off, True) for off in offs):
                return judge.unknown("shards_data", events), judge.unknown("set_epoch", events)
            return shards, judge.yes("set_epoch", events, name)
    engines = [e for e in judge.frameworks.get("DeepSpeed", ()) if e.argument("training_data") is not None]
    if engines:
        shards = judge.yes("shards_data", engines, "DeepSpeed")
    elif shards.answer is NO:
        other = [event for event in judge.events if _reads_by_rank(judge, event)]
        if other or _splits_by_rank(judge):
            shards = judge.unknown("shards_data", other, "the rank goes into how it reads")
    if epochs:
        return shards, judge.yes("set_epoch", epochs)
    return shards, judge.unknown("set_epoch") if engines or shards.answer is UNKNOWN else judge.no("set_epoch")


def _reads_by_rank(judge: Judge, event: Event) -> bool:
    """Return whether a loader or sampler gets the rank, or is timm's, which asks for it."""
    name = last(event.node.func)
    if "load" in name and any(each.startswith("timm.") for each in event.names):
        return True
    words = (word for each in event.values for word in judge.trace.origin(event.unit, each).words)
    return bool(re.search("Loader|Sampler|Dataset|seed", name)) and any(map(RANK_WORD.search, words))


def _splits_by_rank(judge: Judge) -> bool:
    """Return whether a sampler or dataset of its own may look at the rank, or a library's splits by node."""
    for unit in judge.program.reached:
        own = _OWN.search(unit.of or unit.name)
        for name in (last(node) for node, _ in unit.refs):
            if re.search(r"Distributed\w*Sampler|split_by_|nodesplitter", name) or (own and RANK_WORD.search(name)):
                return True
    return False


def internet(judge: Judge) -> Fact:
    """Answer data_from_internet. A download that stands under a condition is cannot tell."""
    name, unsure = "data_from_internet", []
    known = judge.calls(CALL[name])
    flags = {event: event.argument("download") or event.argument("pretrained") for event in judge.events}
    flagged = [event for event, flag in flags.items() if flag is not None]
    for event in dict.fromkeys([*known, *flagged, *judge.methods("from_pretrained")]):
        flag = None if event in known else flags[event]
        if isinstance(flag, ast.Constant) and not flag.value:
            continue
        first = event.argument("path", 0) or event.argument("url", 0)
        given = first is None or judge.trace.origin(event.unit, first).options
        texts = judge.trace.texts(event.unit, first) if first is not None and not given else {None}
        here = any(text and text.startswith(("/", ".", "~")) for text in texts) or any(
            map(event.argument, _LOCAL_FILES)
        )
        sure = isinstance(flag, ast.Constant) if flag is not None else None not in texts and not here
        if sure and not judge.is_conditional(event):
            return judge.yes(name, [event])
        unsure.append(event)
    return judge.unknown(name, unsure, "it depends on arguments") if unsure else judge.no(name)


def workers(judge: Judge) -> Fact:
    """Answer workers; detail has the number, or the argument that sets it."""
    unsure: list[tuple[Event, str]] = []
    for event in (e for e in judge.events if re.search(r"Loader$|^create_loader$", last(e.node.func))):
        values = judge.trace.keyword(event, "num_workers", 5 if last(event.node.func) == "DataLoader" else None)
        if not values and any(each.arg is None for each in event.node.keywords):
            unsure.append((event, ""))
        for unit, value in values:
            numbers, flag = _numbers(judge, unit, value)
            if all(numbers):
                what = "/".join(sorted(map(str, numbers)))
                return judge.yes("workers", [event], f"{flag}, default {what}" if flag else what)
            if flag or numbers != {0}:
                unsure.append((event, flag))
    if any(event.argument("training_data") is not None for event in judge.frameworks.get("DeepSpeed", ())):
        return judge.unknown("workers", (), "DeepSpeed's num_local_io_workers")
    if unsure:
        return judge.unknown("workers", [event for event, _ in unsure], unsure[0][1])
    trainer = {"transformers Trainer", "Composer"} & set(judge.frameworks)
    return judge.unknown("workers", (), "dataloader_num_workers") if trainer else judge.no("workers")


def _numbers(judge: Judge, unit: Unit, value: ast.expr) -> tuple[set[int | None], str]:
    """Return which numbers an expression may be (None: unknown), and the argument that sets it."""
    origin = judge.trace.origin(unit, value)
    options = [judge.trace.options[each] for each in origin.options]
    if options:
        default = options[0].default
        plain = len(options) == 1 and options[0].known and not origin.unknown
        return {default if plain and isinstance(default, int) else None}, options[0].flag
    texts = judge.trace.texts(unit, value)
    return {int(text) if text and text.isdigit() else None for text in texts}, ""


def in_tmp(judge: Judge) -> Fact:
    """Answer data_in_tmp: $TMPDIR, or tempfile."""
    events = judge.calls(re.compile(r"tempfile\.\w+"))
    events += [e for e in judge.events if any(is_value(arg, "TMPDIR") for arg in e.node.args)]
    return judge.yes("data_in_tmp", events) if events else judge.no("data_in_tmp")


def beside_script(judge: Judge) -> Fact:
    """Answer data_beside_script: __file__ in code other than changes of sys.path."""
    for event in judge.events:
        reads = re.search(r"^open$|(?:^|_)(?:load|read|Dataset|ImageFolder)", last(event.node.func))
        words = judge.trace.origin(event.unit, event.node.args[0]).words if reads and event.node.args else set()
        if "__file__" in words and words & {"dirname", "parent", "parents"}:
            return judge.yes("data_beside_script", [event])
    for unit in judge.program.reached:
        for node in (each for each, _ in unit.refs if last(each) == "__file__"):
            if not _NOT_DATA.search((place := judge.program.place(unit, node)).text):
                return Fact("data_beside_script", UNKNOWN, (place,))
    return judge.no("data_beside_script")
