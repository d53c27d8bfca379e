"""The config file of Accelerate that `launch.accelerate` names: what in it cannot work here, and the run's copy of it.

Only Accelerate itself, on the nodes, reads all of it (slurmddp/runtime/agent/accelerate.py).
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slurmddp.errors import UserError
from slurmddp.job.plan.model import Plan
from slurmddp.launch.prepare import Prepared
from slurmddp.run.layout import RunFolder

#: No config file comes near; a data file given by mistake is refused before it is parsed.
_MAX_BYTES = 1_000_000


def copy(plan: Plan) -> dict[str, str]:
    """Return name and text of the run folder's copy; nothing if there is no such file here. Raises UserError."""
    if plan.accelerate is None or not os.path.exists(plan.accelerate):
        return {}
    return {RunFolder(Path()).accelerate.name: _text(plan.accelerate)}


def problems(prepared: Prepared) -> Iterator[UserError]:
    """Yield what in the file cannot work, or that it cannot be read."""
    if (path := prepared.plan.accelerate) is None:
        return
    try:
        errors = list(_refused(_values(path), path, prepared.plan))
    except UserError as error:
        errors = [error]
    for each in errors:
        each.where = prepared.resolved.location("launch", "accelerate")
        yield each


def ignored(prepared: Prepared) -> list[str]:
    """Return what the file says of nodes, ranks and GPUs that the job says otherwise: `num_processes 8`."""
    plan = prepared.plan
    try:
        values = _values(plan.accelerate) if plan.accelerate else {}
    except UserError:
        return []  # `problems` says why
    of_job = {"num_machines": plan.nodes.max, "num_processes": plan.nodes.world, "gpu_ids": "all"}
    return [
        f"{key} {values[key]}"
        for key, planned in of_job.items()
        if planned is not None and values.get(key) not in (None, planned, str(planned), -1)  # -1: left open
    ]


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise _not_a_config(path, f"is larger than {_MAX_BYTES // 1000} kB")
        return data.decode("utf-8")
    except OSError as error:
        todo = "correct the path; `accelerate config --config_file FILE` writes such a file"
        raise UserError(f"cannot read the config file {path}: {error.strerror}", todo=todo) from None
    except UnicodeDecodeError:
        raise _not_a_config(path, "is not UTF-8") from None


def _values(path: str) -> Mapping[str, Any]:
    """Return the file's keys and values. Raises UserError if it is no config file of Accelerate."""
    import yaml

    try:
        values = yaml.safe_load(_text(path))  # as Accelerate reads it
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark is not None else ""
        raise _not_a_config(path, f"is not valid YAML{line}: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(values, dict) or "distributed_type" not in values:
        raise _not_a_config(path, "has no distributed_type")
    return values


def _not_a_config(path: str, reason: str) -> UserError:
    todo = "set launch.accelerate to a file that `accelerate config` has written"
    return UserError(f"{path} is not a config file of Accelerate: it {reason}", todo=todo)


def _refused(values: Mapping[str, Any], path: str, plan: Plan) -> Iterator[UserError]:
    kind = "NO" if values["distributed_type"] is False else str(values["distributed_type"])  # YAML 1.1 reads NO so
    if values.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        message = f"{path} is for {values['compute_environment']}, not for a cluster"
        yield UserError(message, todo="run `accelerate config` again, and choose `This machine`")
    elif kind in ("TPU", "XLA"):
        message = f"{path} has distributed_type {kind}: slurmddp starts ranks on GPUs and CPUs, not on TPUs"
        yield UserError(message, todo="set it to MULTI_GPU, FSDP or DEEPSPEED")
    elif kind == "NO" and plan.nodes.world != 1:
        message = f"{path} has distributed_type NO, which is for one rank; this job starts {plan.nodes.world or 'more'}"
        yield UserError(message, todo="set it to MULTI_GPU, or to MULTI_CPU without GPUs")
    if _part(values, "mpirun_config").get("mpirun_hostfile"):
        message = f"{path} has mpirun_config, but torchrun starts the ranks of this job, not mpirun"
        yield UserError(message, todo="remove mpirun_config from the file")
    yield from _deepspeed(_part(values, "deepspeed_config").get("deepspeed_config_file"), path, plan)


def _deepspeed(named: object, path: str, plan: Plan) -> Iterator[UserError]:
    """The ranks open this further file themselves, in the folder that they work in."""
    if not isinstance(named, str):
        return
    file = os.path.normpath(os.path.join(plan.cwd, named))
    binds = [bind.source for bind in plan.container.binds]
    if not os.path.isfile(file):
        message = f"deepspeed_config_file {named} of {path} does not exist"
        yield UserError(message, todo="correct it; a relative path starts at the current directory")
    elif plan.container.image and not any(Path(file).is_relative_to(source) for source in binds):
        message = f"the container does not see deepspeed_config_file {named} of {path}"
        yield UserError(message, todo=f"add a bind: --set container.binds=[{file}]")


def _part(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = values.get(name)
    return part if isinstance(part, dict) else {}
