"""From a merged tree to a model, with errors that name file, line, key, value and the nearest known key."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from slurmddp.errors import UserError, together
from slurmddp.job.document import Key, Origin, WrongValue
from slurmddp.job.layers import Layered, submodel
from slurmddp.visible import one_line

AnyModel = TypeVar("AnyModel", bound=BaseModel)

_WANTED = {
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_type": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "model_type": "must be a mapping of keys to values",
    "dict_type": "must be a mapping of keys to values",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
}


#: Pydantic's words for bounds, and ours. The first that fits counts.
_BOUNDS = {
    "Input should be greater than or equal to": "must be at least",
    "Input should be less than or equal to": "must be at most",
    "Input should be greater than": "must be above",
    "Input should be less than": "must be below",
    "Input should": "must",
}

#: Pydantic's own words in the location of an error: a map's key, and the forms in which `resources.nodes` is written.
_NO_KEYS = ("[key]", "[number]", "[range]")


#: What a job needs, where it is wrong or missing: so that the rest of the job is checked, too.
_STAND_INS = {("train",): {"module": "__unknown__"}}

#: Mistakes that are shown; the rest are counted.
_TOLD = 20

#: What to do about a mistake below a key, where its own message does not say it.
_HINTS = {
    ("resources", "nodes"): "write 4, 2-4, 4+1 or 2-4+1 (+1: a spare), or {min: 2, max: 4, spares: 1}",
    ("base",): "set what the image is built from: 25.04 (an NGC release), docker://REF, a .sif or a root folder",
    ("alerts",): "example of an entry: {to: slack, name: NAME, on: [failed, finished]}; see docs/alerts.md",
}

_RANKS = (
    "ranks follow from nodes and GPUs: set resources.nodes and resources.gpus_per_node, or resources.ranks_per_node"
)
_PIPELINE = "pipeline parallelism needs your own script, to which process_groups(pipeline=N) gives the groups"
#: Words of Slurm and of trainers that are no keys here, with what to do in their place. `gpus` is in `_gpus_message`.
_NO_WORDS = {"ntasks": _RANKS, "ntasks_per_node": _RANKS, "tasks_per_node": _RANKS, "pipeline": _PIPELINE}


def validate(model: type[AnyModel], layered: Layered, wrong: list[UserError] | None = None) -> AnyModel:
    """Raises one UserError that lists the mistakes, each with its location.

    wrong: gets the mistakes instead, if the tree is valid without these values, which are then removed from it.
    """
    try:
        return model.model_validate(layered.tree)
    except ValidationError as error:
        details = error.errors(include_url=False)
    broken = {each.key for each in wrong or () if isinstance(each, WrongValue)}  # in a section that cannot be read
    shown = [each for each in details if each["type"] != "missing" or _key(each) not in broken]
    mistakes: list[UserError] = [WrongValue(_message(model, layered, each), _key(each)) for each in shown[:_TOLD]]
    if len(shown) > _TOLD:
        mistakes.append(UserError(f"and {len(shown) - _TOLD:,} more mistakes"))
    if wrong is None or not all(_remove(layered.tree, _key(each)) for each in details):
        raise together([*(wrong or ()), *mistakes])
    try:
        value = model.model_validate(layered.tree)
    except ValidationError:
        raise together([*wrong, *mistakes]) from None
    wrong += mistakes
    return value


def depends_on(error: UserError, wrong: Sequence[UserError]) -> bool:
    """Return whether an error may be nothing but the default in the place of a wrong value."""
    keys = [mistake.key for mistake in wrong if isinstance(mistake, WrongValue) and any(mistake.key)]
    names = {next(part for part in reversed(key) if not part.isdecimal()) for key in keys}
    names |= {"batch", "parallel"} if any(key[0] == "resources" for key in keys) else set()
    names |= {"gpus_per_node"} if "gpus" in names else set()
    names.discard("")  # what a refused key holds
    head = str(error).split("\n", 1)[0]
    return any(re.search(rf"(^|[\s.]){re.escape(name)}\b", head) for name in names)


def _remove(tree: dict[str, Any], key: Key) -> bool:
    """Remove a value, or the list or section that holds it; return False where it is missing, and nothing stands in."""
    if key in _STAND_INS:
        tree[key[0]] = dict(_STAND_INS[key])
        return True
    node = tree
    for part in key[:-1]:
        below = node.get(part)
        if not isinstance(below, dict):
            return below is None or node.pop(part, None) is not None
        node = below
    return bool(key) and node.pop(key[-1], key) is not key


def origin_of(layered: Layered, key: Key) -> Origin | None:
    """The origin of a value, or of the nearest map or list that holds it."""
    for end in range(len(key), 0, -1):
        origin = layered.origins.get(key[:end])
        if origin is not None:
            return origin
    return None


def known_keys(model: type[BaseModel], prefix: Key = ()) -> Iterator[Key]:
    """Every key path that the model knows, free maps not entered."""
    for name, field in model.model_fields.items():
        key = (*prefix, field.alias or name)
        yield key
        inner = submodel(field.annotation)
        if inner is not None:
            yield from known_keys(inner, key)


def nearest_key(model: type[BaseModel], key: Key) -> str | None:
    """The known key that an unknown one most likely means: the same word elsewhere, or a similar spelling."""
    import difflib

    known = [".".join(path) for path in known_keys(model)]
    same_word = [name for name in known if name.rsplit(".", 1)[-1] == key[-1]]
    siblings = [name for name in known if name.split(".")[:-1] == list(key[:-1])]
    last = {name.rsplit(".", 1)[-1]: name for name in siblings}
    close = difflib.get_close_matches(key[-1], last, 1, 0.7)
    if close:
        return last[close[0]]
    if same_word:
        return same_word[0]
    anywhere = {name.rsplit(".", 1)[-1]: name for name in reversed(known)}
    close = difflib.get_close_matches(key[-1], anywhere, 1, 0.7)
    return anywhere[close[0]] if close else None


def _key(detail: Any) -> Key:
    return tuple(str(part) for part in detail["loc"] if part not in _NO_KEYS)


def _message(model: type[BaseModel], layered: Layered, detail: Any) -> str:
    key = _key(detail)
    if detail["type"] == "task_option_needed":
        because = origin_of(layered, tuple(detail["ctx"]["because"].split(".")))
        return f"{because.where}: {detail['msg']}" if because else str(detail["msg"])
    origin = origin_of(layered, key)
    shown = _cut(one_line(".".join(key)), 200)
    head = origin.of(shown) if origin else shown
    if origin and shown == "resources.gpus" and origin.where == "--gpus":
        head = origin.where
    kind = detail["type"]
    if kind == "extra_forbidden" and "train" in model.model_fields and key in (("gpus",), ("resources", "gpus")):
        return _gpus_message(layered, head, detail["input"], origin)
    if kind == "extra_forbidden":
        near = nearest_key(model, key)
        page, more = _page(model)
        known = _hint(key) or f"{page} lists all keys; {more}"
        todo = _NO_WORDS.get(key[-1].replace("-", "_")) or (f"did you mean {near}?" if near else known)
        return f"{head}: unknown key\n  -> {todo}"
    if kind == "missing":
        page, more = _page(model)
        todo = _hint(key) or f"set it; {page} lists all keys; {more}"
        return f"{head}: is missing\n  -> {todo}"
    value = detail.get("input")
    written = f", not {_short(value)}" if isinstance(value, str | int | float | list | dict) else ", not empty"
    if kind == "value_error":
        reason = str(detail["ctx"]["error"])
        return f"{head}: {_short(value)} {reason}" if isinstance(value, str) else f"{head} {reason}"
    if kind == "literal_error":
        return f"{head}: must be one of {detail['ctx']['expected']}{written}"
    if kind in _WANTED:
        hint = _hint(key)
        if hint is None and kind in ("tuple_type", "list_type") and isinstance(value, str):
            written_here = origin is not None and origin.where.startswith("--set ")
            hint = (
                f"--set '{shown}=[{_short(value)[1:-1]}]'"
                if written_here
                else f"write {key[-1]}: [{_short(value)[1:-1]}]"
            )
        return f"{head}: {_WANTED[kind]}{written}" + (f"\n  -> {hint}" if hint else "")
    message = detail["msg"]
    for words, ours in _BOUNDS.items():
        message = message.replace(words, ours)
    return f"{head}: {message}{written}"


def _gpus_message(layered: Layered, head: str, value: Any, origin: Origin | None) -> str:
    """Return both meanings of `gpus`: Slurm's is of all nodes together, and the key here is per node."""
    on_command_line = origin is not None and origin.layer == "command line"
    key = "--gpus-per-node" if on_command_line else "resources.gpus_per_node:"
    nodes = (layered.tree.get("resources") or {}).get("nodes", 1)
    if not (str(value).isdecimal() and str(nodes).isdecimal()) or int(nodes) == 0:
        return f"{head}: per node, or of all nodes together?\n  -> write the number per node: {key} N"
    count, several = int(value), int(nodes)
    if several == 1:
        return f"{head}: is written per node here\n  -> {key} {count}"
    each, rest = divmod(count, several)
    in_all = f"{count} do not divide by {several} nodes" if rest else f"{key} {each} for {count} in all"
    return (
        f"{head}: {count} per node, or {count} on all {several} nodes together?\n"
        f"  -> {in_all}; {key} {count} for {count} per node, {count * several} in all"
    )


def _page(model: type[BaseModel]) -> tuple[str, str]:
    """Return the page that lists the model's keys, and the command that helps to write such a file."""
    if "detect" in model.model_fields:
        return "docs/sites.md", "`slurmddp schema site` prints their types"
    return "docs/job.md", "`slurmddp init FILE` writes a valid job file"


def _hint(key: Key) -> str | None:
    return next((hint for prefix, hint in _HINTS.items() if key[: len(prefix)] == prefix), None)


def _short(value: Any) -> str:
    return _cut(repr(str(value)) if isinstance(value, str) else repr(value), 80)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
