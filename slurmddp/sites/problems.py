"""All mistakes in a site file at once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from slurmddp.errors import UserError
from slurmddp.job.document import Document, Key, Origin
from slurmddp.job.job import Job
from slurmddp.job.layers import Layered, merge
from slurmddp.job.site import Site
from slurmddp.job.validate import known_keys, origin_of, validate
from slurmddp.sites.catalogue import Catalogue


def problems(catalogue: Catalogue, name: str) -> list[str]:
    """Return one message per mistake, with its file and line: of the profile, its bases, and its `job`."""
    try:
        path = catalogue.path(name)
        if not path.is_file():
            raise UserError("no such file", where=str(path), todo="`slurmddp site` lists all profiles")
        merged = catalogue.layered(name)
    except UserError as error:
        return [str(error)]
    file = Origin("site", str(path))  # of a key that is missing
    layered = merged._replace(origins={("name",): file, ("title",): file, **merged.origins})
    errors = _mistakes(Site, layered) + _mistakes(Job, _job(layered, ("job",)))
    if errors:
        return errors
    for name in layered.tree.get("when") or {}:
        errors += _mistakes(Job, _job(layered, ("job",), ("when", name, "job")))
    return errors or list(_beyond_the_models(layered, path))


def _mistakes(model: type[BaseModel], layered: Layered) -> list[str]:
    try:
        validate(model, layered)
    except UserError as error:
        return [str(error)]
    return []


def _job(layered: Layered, *keys: Key) -> Layered:
    """Return the layers of the job at these keys over one another, with what only a job file says."""
    layers = []
    for key in keys:
        tree: Any = layered.tree
        for word in key:
            tree = tree.get(word) if isinstance(tree, dict) else None
        size = len(key)
        origins = {path[size:]: origin for path, origin in layered.origins.items() if path[:size] == key}
        layers.append(Document(tree if isinstance(tree, dict) else {}, origins))
    trains = [layer.tree.get("train") or {} for layer in layers]
    named = any({"task", "script", "module"} & set(train) for train in trains)
    base = Document({"site": "this", "train": {} if named else {"script": "train.py"}}, {})
    return merge(Job, [*layers, base])


def _beyond_the_models(layered: Layered, path: Path) -> Iterator[str]:
    """Yield mistakes in values that are valid, each by itself."""
    site = Site.model_validate(layered.tree)

    def message(key: tuple[str, ...], problem: str, todo: str) -> str:
        origin = origin_of(layered, key)
        return str(UserError(f"{'.'.join(key)}: {problem}", where=origin.where if origin else str(path), todo=todo))

    if site.name != path.stem:
        yield message(("name",), f"{site.name!r} is not the file's name", f"write {path.stem}, or rename the file")
    keys = {".".join(key) for key in known_keys(Job)}
    for index, key in enumerate(site.required):
        if key not in keys:
            yield message(("required", str(index)), f"{key!r} is not a key of a job file", "docs/job.md lists all keys")
    resources = site.job.get("resources") or {}
    default = resources.get("partition")
    if default is not None and site.partitions and default not in site.partitions:
        known = ", ".join(site.partitions)
        yield message(("job", "resources", "partition"), f"{default!r} is not under partitions", f"use one of {known}")
