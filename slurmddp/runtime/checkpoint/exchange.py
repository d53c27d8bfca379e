"""DCP's plans and results as text, for ranks to exchange: not pickled, and of DCP's own classes only."""

import dataclasses
import enum
import json
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner

#: By name: dataclasses and enumerations of which plans and write results consist.
_CLASSES = {
    name: item
    for module in (filesystem, metadata, planner)
    for name, item in vars(module).items()
    if isinstance(item, type) and (dataclasses.is_dataclass(item) or issubclass(item, enum.Enum))
}
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


def dump(value: Any) -> str:
    """Plans and results of DCP as JSON. Raises TypeError for anything that is no part of one."""
    return json.dumps(_plain(value), separators=(",", ":"))


def load(text: str) -> Any:
    """The value that `dump` was given. Raises ValueError for any other text."""
    try:
        return _value(json.loads(text))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a plan of DCP's: {error}") from error


def _plain(value: Any) -> Any:
    """Lists are ["l", items ...]; every other kind of value that JSON has not has a letter of its own."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    name = type(value).__name__
    if isinstance(value, torch.Size):
        return ["s", *value]
    if isinstance(value, list | tuple):
        return ["l" if isinstance(value, list) else "t", *map(_plain, value)]
    if isinstance(value, dict):
        return ["d", *([_plain(key), _plain(item)] for key, item in value.items())]
    if isinstance(value, _CONSTANTS):
        return ["c", str(value).removeprefix("torch.")]
    if _CLASSES.get(name) is type(value):
        if isinstance(value, enum.Enum):
            return ["e", name, value.name]
        fields = [field.name for field in dataclasses.fields(value)]
        return ["o", name, *([field, _plain(getattr(value, field))] for field in fields)]
    raise TypeError(f"not a part of a plan of DCP's: {name}")


def _value(plain: Any) -> Any:
    if not isinstance(plain, list):
        return plain
    kind, *items = plain
    if kind == "s":
        return torch.Size(items)
    if kind == "l":
        return [_value(item) for item in items]
    if kind == "t":
        return tuple(_value(item) for item in items)
    if kind == "d":
        return {_value(key): _value(item) for key, item in items}
    if kind == "c":
        found = getattr(torch, items[0])
        if not isinstance(found, _CONSTANTS):
            raise TypeError(f"torch.{items[0]} is no constant")
        return found
    if kind == "e":
        return _CLASSES[items[0]][items[1]]  # type: ignore[index]
    if kind == "o":
        return _CLASSES[items[0]](**{field: _value(item) for field, item in items[1:]})
    raise TypeError(f"unknown kind {kind!r}")
