"""Layers of values: how a later one goes over an earlier one, and which of them set a value.

Maps merge. A list adds where its field is marked `Adds` in the model, else the later list replaces the earlier one.
What an adding list holds already is not added again, so that a resolved job can be submitted as it stands.
"""

import copy
import json
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from pydantic import BaseModel

from slurmddp.job.document import Document, Key, Origin
from slurmddp.job.types import Adds


class Layered(NamedTuple):
    """The merged tree; `origins` has the layer that set each value, `overridden` those that had set it before."""

    tree: dict[str, Any]
    origins: Mapping[Key, Origin]
    overridden: Mapping[Key, tuple[Origin, ...]]


def merge(model: type[BaseModel], documents: Iterable[Document], **parts: type[BaseModel]) -> Layered:
    """Lay the documents over one another, the first one lowest. `model` says which lists add.

    parts: models of top-level keys that `model` itself holds as free maps.
    """
    adding = adding_lists(model) | {(name, *key) for name, part in parts.items() for key in adding_lists(part)}
    merger = _Merger(adding)
    for document in documents:
        merger.lay(document)
    return Layered(merger.tree, merger.origins, merger.overridden)


class _Merger:
    def __init__(self, adding: frozenset[Key]) -> None:
        self.adding = adding
        self.tree: dict[str, Any] = {}
        self.origins: dict[Key, Origin] = {}
        self.overridden: dict[Key, tuple[Origin, ...]] = {}

    def lay(self, document: Document) -> None:
        self._map(self.tree, document.tree, (), document.origins)

    def _map(self, below: dict[str, Any], above: dict[str, Any], key: Key, origins: Mapping[Key, Origin]) -> None:
        for name, value in above.items():
            path = (*key, name)
            old = below.get(name)
            if isinstance(value, dict) and isinstance(old, dict):
                self._map(old, value, path, origins)
            elif isinstance(value, list) and isinstance(old, list) and path in self.adding:
                self._add(old, value, path, origins)
            else:
                if path in self.origins:
                    self.overridden[path] = (*self.overridden.get(path, ()), self.origins[path])
                self._forget(path, old)
                below[name] = copy.deepcopy(value)
                self._take_origins(path, value, origins)

    def _add(self, old: list[Any], new: list[Any], path: Key, origins: Mapping[Key, Origin]) -> None:
        known = {json.dumps(item, sort_keys=True) for item in old}
        for index, item in enumerate(new):
            if json.dumps(item, sort_keys=True) in known:
                continue
            item_path = (*path, str(len(old)))
            old.append(copy.deepcopy(item))
            if path in origins:  # of the list itself: `--set` knows no other
                self.origins[item_path] = origins[path]
            self._take_origins(item_path, item, origins, (*path, str(index)))

    def _forget(self, path: Key, value: Any) -> None:
        for key in _keys(path, value):
            self.origins.pop(key, None)

    def _take_origins(self, path: Key, value: Any, origins: Mapping[Key, Origin], source: Key | None = None) -> None:
        """The origins of a value and of all below it, which has them at `source` if that is another key."""
        for key, there in zip(_keys(path, value), _keys(source or path, value), strict=True):
            if there in origins:
                self.origins[key] = origins[there]


def _keys(path: Key, value: Any) -> Iterator[Key]:
    """The key of a value, and those of all below it: to look through all origins for them takes too long."""
    yield path
    if isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _keys((*path, str(name)), item)


def submodel(annotation: Any) -> type[BaseModel] | None:
    """The model inside an annotation such as `Model`, `Model | None` or `dict[str, Model]`."""
    origin = typing.get_origin(annotation)
    # In Python 3.10 `list[str]` is an instance of type, too.
    if origin is None and isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if origin in (typing.Union, types.UnionType, typing.Annotated, dict, tuple):
        for part in typing.get_args(annotation):
            model = submodel(part)
            if model is not None:
                return model
    return None


@cache
def adding_lists(model: type[BaseModel]) -> frozenset[Key]:
    """The key paths of the lists to which a later layer adds."""
    paths: set[Key] = set()
    for name, field in model.model_fields.items():
        key = field.alias or name
        if any(isinstance(mark, Adds) for mark in field.metadata):
            paths.add((key,))
        inner = submodel(field.annotation)
        if inner is not None:
            paths.update((key, *rest) for rest in adding_lists(inner))
    return frozenset(paths)
