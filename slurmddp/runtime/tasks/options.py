"""The options of the bundled tasks (train.data and train.model): their names, defaults and what they may be.

Standard library only: the login side checks a job with the same table at submission, before it waits in the queue.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from slurmddp.runtime.errors import UserError


class Option(NamedTuple):
    """One option. `wanted` ends the sentence "must be ..."; `fits` says whether a value is that."""

    default: Any
    wanted: str
    fits: Callable[[Any], bool]
    required: bool = False


class Mistake(NamedTuple):
    """What is wrong with the option `key`; `wanted` as in `Option`."""

    kind: Literal["unknown", "missing", "value"]
    key: str
    value: Any = None
    wanted: str = ""


def _count(default: int) -> Option:
    return Option(default, "a whole number from 1 up", lambda value: type(value) is int and value >= 1)


def _number(default: float, wanted: str, fits: Callable[[float], bool]) -> Option:
    return Option(default, f"a number {wanted}", lambda value: type(value) in (int, float) and fits(value))


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_paths(value: Any) -> bool:
    return _is_path(value) or (isinstance(value, list) and bool(value) and all(map(_is_path, value)))


_DROPOUT = _number(0.0, "from 0 to below 1", lambda value: 0 <= value < 1)

#: By task and the key below `train`.
OPTIONS: dict[str, dict[str, dict[str, Option]]] = {
    "lm": {
        "data": {
            "path": Option(None, "a path or a list of paths", _is_paths, required=True),
            "context": _count(128),
            "glob": Option(
                "**/*",
                "a pattern of names below the path",
                lambda value: isinstance(value, str) and value != "" and not value.startswith("/"),
            ),
            "exclude": Option([], "a list of patterns", _is_texts),
            "held_out": _number(0.02, "from 0 to 0.5", lambda value: 0 <= value <= 0.5),
        },
        "model": {
            "layers": _count(2),
            "heads": _count(4),
            "width": _count(128),
            "dropout": _DROPOUT,
            "tied": Option(True, "true or false", lambda value: isinstance(value, bool)),
        },
    },
    "images": {
        "data": {
            "path": Option(None, "a path", _is_path, required=True),
            "held_out": _number(0.2, "from 0 to below 1", lambda value: 0 <= value < 1),
            "size": _count(32),
        },
        "model": {
            "kind": Option("mlp", "mlp or cnn", lambda value: value in ("mlp", "cnn")),
            "hidden": _count(128),
            "layers": _count(2),
            "dropout": _DROPOUT,
        },
    },
}


def mistakes(task: str, part: str, given: Mapping[str, Any]) -> Iterator[Mistake]:
    """All that is wrong with `given`, the options below train.`part` of a bundled task."""
    known = OPTIONS[task][part]
    wrong = False
    for key, value in given.items():
        if key not in known:
            yield Mistake("unknown", key, value)
        elif not known[key].fits(value):
            wrong = True
            yield Mistake("value", key, value, known[key].wanted)
    for key, option in known.items():
        if option.required and key not in given:
            yield Mistake("missing", key, wanted=option.wanted)
    if (task, part) == ("lm", "model") and not wrong:
        values = _overlaid(known, given)
        if values["width"] % values["heads"]:
            yield Mistake("value", "width", values["width"], f"a multiple of train.model.heads ({values['heads']})")


def checked(task: str, part: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults overlaid with `given`. Raises UserError for the first mistake."""
    known = OPTIONS[task][part]
    for mistake in mistakes(task, part, given):
        if mistake.kind == "unknown":
            raise UserError(f"unknown key train.{part}.{mistake.key}; known here: {', '.join(known)}")
        raise UserError(f"train.{part}.{mistake.key} must be {mistake.wanted}, not {mistake.value!r}")
    return _overlaid(known, given)


def _overlaid(known: Mapping[str, Option], given: Mapping[str, Any]) -> dict[str, Any]:
    return {**{key: option.default for key, option in known.items()}, **given}
