"""job.json has one schema on both sides: what the job's models write is what the ranks' dataclasses read."""

import types
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from pydantic import BaseModel

from slurmddp.job import job as of_job
from slurmddp.job import train as of_train
from slurmddp.runtime import job as read

#: Keys that `runtime_job` (slurmddp/job/plan/program.py) leaves out or names otherwise.
LEFT_OUT = {
    "Train": {"script", "module", "args", "resume_args", "observe", "project", "workdir", "batch"},
    "Checkpoint": {"watch"},
    "Timeouts": {"rendezvous", "join", "stop"},
}
RENAMED = {"Checkpoint": {"interval": "every_seconds"}}
#: A job without a task has no job.json.
NEVER_NULL = {("Train", "task")}
#: Written as whole numbers; the ranks read any number, which tests use.
SECONDS = {"every_seconds", "collective", "hang"}


def shape(hint: Any) -> Any:
    """A type hint without its checks: the kind of value, or the words that it may be, and whether it may be null."""
    if get_origin(hint) is Annotated:
        return shape(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        (kind,) = [item for item in get_args(hint) if item is not type(None)]
        return shape(kind), "or null"
    if get_origin(hint) is Literal:
        return frozenset(get_args(hint))
    if is_dataclass(hint) or (get_origin(hint) is None and isinstance(hint, type) and issubclass(hint, BaseModel)):
        return hint.__name__
    return {tuple: list}.get(get_origin(hint), get_origin(hint) or hint)


@pytest.mark.parametrize(
    "name", ["Train", "Optimizer", "Schedule", "Evaluate", "Ddp", "Parallel", "Checkpoint", "Timeouts"]
)
def test_both_sides_have_the_same_keys_of_the_same_kinds(name: str) -> None:
    model, record = getattr(of_train if hasattr(of_train, name) else of_job, name), getattr(read, name)
    ours = {
        RENAMED.get(name, {}).get(key, key): shape(hint)
        for key, hint in get_type_hints(model, include_extras=True).items()
        if key in model.model_fields and key not in LEFT_OUT.get(name, set())
    }
    hints = get_type_hints(record)
    theirs = {item.name: shape(hints[item.name]) for item in fields(record)}
    for key, kind in theirs.items():
        if (name, key) in NEVER_NULL:
            theirs[key] = kind, "or null"
        elif key in SECONDS:
            theirs[key] = (int, "or null") if kind == (float, "or null") else {float: int}[kind]
    assert ours == theirs
