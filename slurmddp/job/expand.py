"""Variables in paths, expanded once, at submission, by us: no shell ever sees them."""

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel

from slurmddp.job.types import PathText, find_marks

AnyModel = TypeVar("AnyModel", bound=BaseModel)

_VARIABLE = re.compile(r"\$(?:\$|([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\})")


class Unexpanded(str):
    """A path that holds a variable which is not set here (a dry run's): whoever submits it will expand it."""


def begins_open(path: str) -> bool:
    """Return whether a path begins with a variable that is not set here, so that nobody knows if it is absolute."""
    return isinstance(path, Unexpanded) and path.startswith("$")


class Expander:
    """Replaces $NAME and ${NAME} by `environment`; `$$` is a dollar sign, a leading `~/` the home folder.

    A variable that is not set stays as written, and `unset` gets (key path, variable).
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.unset: list[tuple[tuple[str, ...], str]] = []

    def text(self, text: str, key: tuple[str, ...]) -> str:
        def value(match: re.Match[str]) -> str:
            name = match.group(1) or match.group(2)
            if name is None:
                return "$"
            variable = self.environment.get(name)
            if not variable:
                self.unset.append((key, name))
                return match.group(0)
            return variable

        if text == "~" or text.startswith("~/"):
            text = "${HOME}" + text[1:]
        if "$" not in text:
            return text
        before = len(self.unset)
        expanded = _VARIABLE.sub(value, text)
        return Unexpanded(expanded) if len(self.unset) > before else expanded

    def model(self, model: AnyModel, key: tuple[str, ...] = ()) -> AnyModel:
        """A copy of the model with all its path fields expanded, nested models and lists of them included."""
        changed: dict[str, Any] = {}
        paths = path_fields(type(model))
        for name in type(model).model_fields:
            old = getattr(model, name)
            new = self._value(old, (*key, name), name in paths)
            if new is not old:
                changed[name] = new
        return model.model_copy(update=changed) if changed else model

    def _value(self, value: Any, key: tuple[str, ...], is_path: bool) -> Any:
        if isinstance(value, BaseModel):
            return self.model(value, key)
        if isinstance(value, tuple):
            items = tuple(self._value(item, (*key, str(index)), is_path) for index, item in enumerate(value))
            return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
        if is_path and isinstance(value, str):
            return self.text(value, key)
        return value


def expand_data(expand: Callable[[str], str], data: Mapping[str, Any]) -> dict[str, Any]:
    """A task's `data` mapping with `expand` applied to the paths under its key `path`."""
    result = dict(data)
    path = result.get("path")
    if isinstance(path, str):
        result["path"] = expand(path)
    elif isinstance(path, list):
        result["path"] = [expand(item) if isinstance(item, str) else item for item in path]
    return result


def unexpand(path: str) -> str:
    """The text that `Expander` turns into this path again."""
    if isinstance(path, Unexpanded):
        return str(path)
    text = path.replace("$", "$$")
    return f"./{text}" if text == "~" or text.startswith("~/") else text


@cache
def path_fields(model: type[BaseModel], *, relative: bool = False) -> frozenset[str]:
    """Return the fields that hold a path; relative: those whose path may start at the folder of submission."""
    marked = [(name, mark) for name, field in model.model_fields.items() for mark in find_marks(field)]
    return frozenset(name for name, mark in marked if isinstance(mark, PathText) and (mark.relative or not relative))
