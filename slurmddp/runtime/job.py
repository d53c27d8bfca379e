"""job.json: what this run was asked to do, as written at submission. Standard library only.

Every key must be there and none may be unknown: the file is written by our own login side from defaults and
the user's job, so a difference means that the two sides come from different versions, and guessing would
hide it.
"""

import json
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from slurmddp.runtime.errors import UserError
from slurmddp.shared import schemas

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """Which run this is."""

    id: str
    name: str
    site: str


@dataclass(frozen=True)
class Optimizer:
    """The optimizer and gradient clipping (`clip`: largest global norm; null: none).

    `lr_rule`: how lr follows the global batch from `lr_batch`, which it was tuned for.
    """

    name: Literal["adamw", "sgd"]
    lr: float
    weight_decay: float
    betas: list[float]
    eps: float
    momentum: float
    clip: float | None
    fused: bool
    lr_rule: Literal["none", "linear", "sqrt"]
    lr_batch: int | None


@dataclass(frozen=True)
class Schedule:
    """The learning rate over steps (`steps`: its length; null: that of the training)."""

    kind: Literal["cosine", "linear", "constant"]
    warmup: int
    min_ratio: float
    steps: int | None


@dataclass(frozen=True)
class Evaluate:
    """When to evaluate on the validation set, and on how many global batches of it (null: all)."""

    every_steps: int | None
    at_end: bool
    batches: int | None


@dataclass(frozen=True)
class Ddp:
    """Options of DistributedDataParallel; `compression`: what gradients are rounded to on their way."""

    static_graph: bool
    bucket_mb: float
    compression: Literal["none", "bf16"]


@dataclass(frozen=True)
class Parallel:
    """Ranks that share the model: replicate x shard is the world size (replicate null: as follows from it)."""

    replicate: int | None
    shard: int


@dataclass(frozen=True)
class Train:
    """What to train and how; `data` and `model` belong to the task.

    `on_nonfinite`: what to do about such a loss or gradient (null: halve the scale under fp16, else stop).
    `replica_check_every`: steps between checks that the replicas are equal.
    `gc_every`: steps between garbage collections. `prefetch`: micro batches that each data worker has ready.
    """

    task: str
    data: dict[str, Any]
    model: dict[str, Any]
    steps: int
    seed: int
    precision: Literal["fp32", "bf16", "fp16"]
    deterministic: bool
    init_from: str | None
    compile: bool
    activation_checkpointing: bool
    channels_last: bool
    ddp: Ddp
    optimizer: Optimizer
    schedule: Schedule
    evaluate: Evaluate
    on_nonfinite: Literal["stop", "skip", "halve"] | None
    replica_check_every: int | None
    gc_every: int | None
    log_every: int
    workers: int
    prefetch: int
    trace_samples: bool


@dataclass(frozen=True)
class Batch:
    """Samples per optimizer step over all ranks, and at most per forward pass of one rank.

    `weights`: a rank's share, by pattern of its node's or device's name (default 1). `by_length`: so many global
    batches are sorted by length together (null: none).
    """

    total: int = field(metadata={"key": "global"})
    micro: int
    weights: dict[str, Any]
    by_length: int | None


@dataclass(frozen=True)
class Checkpoint:
    """When to save, and how many complete checkpoints to keep (and each whose step is a multiple of `keep_every`)."""

    every_seconds: float | None
    every_steps: int | None
    keep: int
    keep_every: int | None
    asynchronous: bool
    at_end: bool


@dataclass(frozen=True)
class Timeouts:
    """Seconds. `hang`: the shortest deadline for a sign of progress; null: nobody looks."""

    collective: float
    hang: float | None


@dataclass(frozen=True)
class Job:
    """The whole of job.json."""

    schema: int
    run: Run
    train: Train
    parallel: Parallel
    batch: Batch
    checkpoint: Checkpoint
    resume_from: list[str]
    timeouts: Timeouts


def load(path: Path) -> Job:
    """Read and check job.json. Raises UserError that names the file and the key."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    try:
        data = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    try:
        return parse(data)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def parse(data: object) -> Job:
    """Check the content of job.json. Raises UserError that names the key."""
    if not isinstance(data, Mapping):
        raise UserError(f"must be an object, not {_kind(data)}")
    schema = data.get("schema")
    if schema != schemas.JOB:
        raise UserError(
            f"schema is {schema!r}, but this runtime needs {schemas.JOB}: another version of slurmddp wrote the "
            f"run folder. Use the code in its code/ folder, or submit the job again"
        )
    job = _record(Job, data, "")
    _check_ranges(job)
    return job


def _check_ranges(job: Job) -> None:
    train, batch, checkpoint = job.train, job.batch, job.checkpoint
    at_least: list[tuple[str, float | None, float]] = [
        ("train.steps", train.steps, 1),
        ("train.log_every", train.log_every, 1),
        ("train.workers", train.workers, 0),
        ("train.seed", train.seed, 0),
        ("train.optimizer.lr", train.optimizer.lr, 0),
        ("train.optimizer.weight_decay", train.optimizer.weight_decay, 0),
        ("train.schedule.warmup", train.schedule.warmup, 0),
        ("train.schedule.min_ratio", train.schedule.min_ratio, 0),
        ("train.schedule.steps", train.schedule.steps, 1),
        ("train.evaluate.every_steps", train.evaluate.every_steps, 1),
        ("train.evaluate.batches", train.evaluate.batches, 1),
        ("batch.global", batch.total, 1),
        ("batch.micro", batch.micro, 1),
        ("checkpoint.every_steps", checkpoint.every_steps, 1),
        ("checkpoint.every_seconds", checkpoint.every_seconds, 0),
        ("checkpoint.keep", checkpoint.keep, 1),
        ("checkpoint.keep_every", checkpoint.keep_every, 1),
        ("parallel.replicate", job.parallel.replicate, 1),
        ("parallel.shard", job.parallel.shard, 1),
        ("batch.by_length", batch.by_length, 1),
        ("train.optimizer.lr_batch", train.optimizer.lr_batch, 1),
        ("train.replica_check_every", train.replica_check_every, 1),
        ("train.gc_every", train.gc_every, 1),
        ("train.prefetch", train.prefetch, 1),
        ("timeouts.hang", job.timeouts.hang, 0),
    ]
    for key, value, least in at_least:
        if value is not None and not value >= least:
            raise UserError(f"{key} must be at least {least}, not {value}")
    if len(train.optimizer.betas) != 2:
        raise UserError(f"train.optimizer.betas must be two numbers, not {train.optimizer.betas}")
    if train.optimizer.clip is not None and not train.optimizer.clip > 0:
        raise UserError(f"train.optimizer.clip must be above 0 or null, not {train.optimizer.clip}")
    if not job.timeouts.collective > 0:
        raise UserError(f"timeouts.collective must be above 0 seconds, not {job.timeouts.collective}")


def _record(cls: type[T], data: Mapping[str, Any], where: str) -> T:
    """One dataclass from one JSON object: all keys needed, none unknown."""
    assert is_dataclass(cls)
    hints = get_type_hints(cls)
    keys = {item.metadata.get("key", item.name): item.name for item in fields(cls)}
    for key in data:
        if key not in keys:
            raise UserError(f"unknown key {where}{key}; known keys: {', '.join(keys)}")
    for key in keys:
        if key not in data:
            raise UserError(f"the key {where}{key} is missing")
    values = {name: _value(hints[name], data[key], where + key) for key, name in keys.items()}
    return cls(**values)


def _value(hint: Any, value: Any, where: str) -> Any:
    """`value` checked against a type hint; integers are taken where a float is wanted, booleans never."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _value(next(kind for kind in arguments if kind is not type(None)), value, where)
    if origin is Literal:
        if value not in arguments:
            raise UserError(f"{where} must be one of {', '.join(map(str, arguments))}, not {value!r}")
        return value
    if is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, Mapping):
            raise UserError(f"{where} must be an object, not {_kind(value)}")
        return _record(hint, value, where + ".")
    if origin is list and isinstance(value, list):
        return [_value(arguments[0], item, f"{where}[{number}]") for number, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    # In Python 3.10 `list[str]` is an instance of type, too: hence the origin.
    if (
        origin is None
        and isinstance(hint, type)
        and isinstance(value, hint)
        and (hint is bool or not isinstance(value, bool))
    ):
        return value
    wanted = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    name = wanted.get(hint) or {list: "a list", dict: "an object"}.get(origin, str(hint))
    raise UserError(f"{where} must be {name}, not {_kind(value)}")


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return f"{names.get(type(value), type(value).__name__)} ({json.dumps(value)[:60]})"
