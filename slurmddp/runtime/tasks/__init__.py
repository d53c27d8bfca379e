"""Tasks: what is trained. `lm` and `images` are bundled; any other is the user's own
"package.module:factory".
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slurmddp.runtime.errors import UserError

if TYPE_CHECKING:
    from slurmddp.runtime.tasks.protocol import Task

BUNDLED = {"lm": "slurmddp.runtime.tasks.lm:create", "images": "slurmddp.runtime.tasks.images:create"}

_NEEDED = (
    "targets_per_sample",
    "unit",
    "metrics",
    "build_model",
    "train_samples",
    "validation_samples",
    "fingerprint",
    "collate",
    "loss",
    "report",
)


def create(name: str, data: Mapping[str, Any], model: Mapping[str, Any]) -> Task:
    """Return the task of that name, made by calling its factory with train.data and train.model (mappings).

    Raises UserError where the name, the module or the factory is not there, or what it returns is no task.
    Errors inside the user's own module or factory pass through with their traceback.
    """
    module_name, colon, factory_name = BUNDLED.get(name, name).partition(":")
    if not colon or not module_name or not factory_name:
        raise UserError(f"train.task must be {', '.join(BUNDLED)} or package.module:factory, not {name!r}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Only when the module asked for (or a package above it) is missing; else an import inside it has
        # failed.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise UserError(
            f"train.task is {name!r}, but there is no module {error.name!r} on the path: "
            f"{', '.join(filter(None, sys.path))}"
        ) from error
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        raise UserError(f"train.task is {name!r}, but {module.__file__} has no function {factory_name!r}")
    task: Task = factory(dict(data), dict(model))
    missing = [item for item in _NEEDED if not hasattr(task, item)]
    if missing:
        raise UserError(
            f"train.task is {name!r}, but what it returns (a {type(task).__name__}) lacks "
            f"{', '.join(missing)}; slurmddp/runtime/tasks/protocol.py says what a task has"
        )
    return task
