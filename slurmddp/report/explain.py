"""Which layer set a value."""

import re
from typing import Any

from pydantic import BaseModel

from slurmddp.errors import UserError
from slurmddp.job.document import Key
from slurmddp.job.job import Job
from slurmddp.job.layers import Layered
from slurmddp.job.resolve import Resolved
from slurmddp.job.validate import nearest_key


def explain(resolved: Resolved, dotted: str) -> str:
    """Value, layer and place of a key, of everything below it, and what was overridden.

    Raises UserError for a key that the job does not have.
    """
    key = tuple(dotted.split("."))
    value = _lookup(resolved, key, dotted)
    layered = resolved.layered
    paths = leaves(layered, key)
    if not paths:
        return f"{dotted} = {_shown(value)}\n  built-in"
    lines = []
    for path in paths:
        where, *over = sources(layered, path)
        lines += [f"{'.'.join(path)} = {_shown(raw(layered.tree, path))}", f"  {where}"]
        lines += [f"  over {old}" for old in over]
    return "\n".join(lines)


def leaves(layered: Layered, key: Key = ()) -> list[Key]:
    """Return the values at and below a key, sorted: those that have no others below them."""
    below = sorted(path for path in layered.origins if path[: len(key)] == key)
    # In this order, what is below a path stands right behind it.
    return [path for path, other in zip(below, [*below[1:], ()], strict=False) if other[: len(path)] != path]


def sources(layered: Layered, path: Key) -> list[str]:
    """Return the layer and place that set a value, then those that it replaced, the latest first."""
    upwards = (path[:end] for end in range(len(path), 0, -1))  # since a list is replaced as a whole
    replaced = next((layered.overridden[up] for up in upwards if up in layered.overridden), ())
    return [f"{origin.layer}: {origin.where}" for origin in (layered.origins[path], *reversed(replaced))]


def _lookup(resolved: Resolved, key: Key, dotted: str) -> Any:
    value: Any = resolved.job
    for part in key:
        if isinstance(value, BaseModel):
            names = {field.alias or name: name for name, field in type(value).model_fields.items()}
            value = getattr(value, names[part]) if part in names else _Missing
        elif isinstance(value, dict):
            value = value.get(part, _Missing)
        elif isinstance(value, tuple | list):
            value = value[int(part)] if re.fullmatch("[0-9]{1,9}", part) and int(part) < len(value) else _Missing
        else:
            value = _Missing
        if value is _Missing:
            near = nearest_key(Job, key)
            raise UserError(f"{dotted} is not a key of a job file", todo=f"did you mean {near}?" if near else None)
    return value


class _Missing:
    """Stands for a key that is not there; None is a value."""


def raw(tree: Any, path: Key) -> Any:
    for part in path:
        tree = tree[int(part)] if isinstance(tree, list) else tree[part]
    return tree


def _shown(value: Any) -> str:
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", by_alias=True)
    return "null" if value is None else str(value)
