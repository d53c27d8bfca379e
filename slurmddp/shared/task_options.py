"""The options of the bundled tasks (train.data and train.model): their names, defaults and what they may be.

A job is checked with the same table at submission, before it waits in the queue, and on the ranks.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple


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


def _number(default: float, form: str, fits: Callable[[float], bool]) -> Option:
    return Option(default, f"a number {form}", lambda value: type(value) in (int, float) and fits(value))


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_paths(value: Any) -> bool:
    return _is_path(value) or (isinstance(value, list) and bool(value) and all(map(_is_path, value)))


def _one_of(default: str, *others: str) -> Option:
    names = (default, *others)
    return Option(default, f"{', '.join(names[:-1])} or {names[-1]}", lambda value: value in names)


def _is_glob(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value != "" and not value.startswith("/"))


#: Tokens where bytes are the tokens.
BYTES = 256

_DROPOUT = _number(0.0, "from 0 to below 1", lambda value: 0 <= value < 1)

#: By task and the key below `train`.
OPTIONS: dict[str, dict[str, dict[str, Option]]] = {
    "lm": {
        "data": {
            "path": Option(None, "a path or a list of paths", _is_paths, required=True),
            "context": _count(128),
            # None: all files; of tokens, .bin and .npy; of jsonl, .jsonl and .ndjson.
            "glob": Option(None, "a pattern of names below the path", _is_glob),
            "exclude": Option([], "a list of patterns", _is_texts),
            "validation_fraction": _number(0.02, "from 0 to 0.5", lambda value: 0 <= value <= 0.5),
            # bytes: files of any kind, each byte a token. tokens: .npy, or raw numbers of `dtype`. jsonl: a document a
            # line, its text under `key`.
            "format": _one_of("bytes", "tokens", "jsonl"),
            "dtype": _one_of("uint16", "uint32"),
            "key": Option("text", "the name of a key", lambda value: isinstance(value, str) and value != ""),
        },
        "model": {
            "layers": _count(2),
            "heads": _count(4),
            "width": _count(128),
            "dropout": _DROPOUT,
            "tied": Option(True, "true or false", lambda value: isinstance(value, bool)),
            # None: 256, where bytes are the tokens; token ids need their tokenizer's number.
            "vocabulary": Option(
                None, _count(1).wanted, lambda value: value is None or (type(value) is int and 1 <= value < 2**31)
            ),
        },
    },
    "images": {
        "data": {
            "path": Option(None, "a path", _is_path, required=True),
            "validation_fraction": _number(0.2, "from 0 to below 1", lambda value: 0 <= value < 1),
            "size": _count(32),
            "augment": _one_of("none", "flip", "crop", "crop+flip"),
        },
        "model": {
            "kind": Option("mlp", "mlp or cnn", lambda value: value in ("mlp", "cnn")),
            "hidden": _count(128),
            "layers": _count(2),
            "dropout": _DROPOUT,
        },
    },
}


def mistakes(
    task: str, part: str, given: Mapping[str, Any], data: Mapping[str, Any] | None = None
) -> Iterator[Mistake]:
    """Yield all that is wrong with `given`, the options below train.`part` of a bundled task.

    `data`: with the part model, the options below train.data; what has to fit them is looked at, too.
    """
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
        yield from _lm_model(overlaid(known, given), None if data is None else data.get("format", "bytes"))


def _lm_model(values: Mapping[str, Any], data_format: str | None) -> Iterator[Mistake]:
    """Check options that have to fit together. `data_format`: None if unknown."""
    if values["width"] % values["heads"]:
        yield Mistake("value", "width", values["width"], f"a multiple of train.model.heads ({values['heads']})")
    vocabulary = values["vocabulary"]
    if data_format == "tokens" and vocabulary is None:
        yield Mistake("missing", "vocabulary", wanted="the tokenizer's number of tokens (train.data.format is tokens)")
    if data_format in ("bytes", "jsonl") and vocabulary is not None and vocabulary < BYTES:
        form = f"at least {BYTES}, as each byte is a token (train.data.format is {data_format})"
        yield Mistake("value", "vocabulary", vocabulary, form)


def overlaid(known: Mapping[str, Option], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults overlaid with `given`."""
    return {**{key: option.default for key, option in known.items()}, **given}
