"""job.json: what this run was asked to do, as written at submission. Standard library only.

Every key must be there and none may be unknown: our own login side has checked the values and written the file, so a
difference means that the two sides come from different versions, and guessing would hide it.
"""

import json
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

from slurmddp.runtime.errors import UserError
from slurmddp.shared import schemas

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
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
    """Ranks that share the model: replicate x shard x tensor is the world size (replicate null: follows from it)."""

    replicate: int | None
    shard: int
    tensor: int


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
    schema: int
    run: Run
    train: Train
    parallel: Parallel
    batch: Batch
    checkpoint: Checkpoint
    resume_from: list[str]
    timeouts: Timeouts


def load(path: Path) -> Job:
    """Read job.json and check its keys. Raises UserError that names the file and the key."""
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def parse(data: object) -> Job:
    """Return the content of job.json. Raises UserError that names a key that is unknown or missing."""
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != schemas.JOB:
        raise UserError(
            f"schema is {schema!r}, but this runtime needs {schemas.JOB}: another version of slurmddp wrote the "
            f"run folder. Use the code in its code/ folder, or submit the job again"
        )
    return _record(Job, data, "")


def _record(cls: type[T], data: Any, where: str) -> T:
    """One dataclass from one JSON object: all keys needed, none unknown."""
    assert is_dataclass(cls)
    if not isinstance(data, dict):
        raise UserError(f"{where.rstrip('.')} must be an object, not {json.dumps(data)[:60]}")
    hints = get_type_hints(cls)
    keys = {item.metadata.get("key", item.name): item.name for item in fields(cls)}
    for key in data:
        if key not in keys:
            raise UserError(f"unknown key {where}{key}; known keys: {', '.join(keys)}")
    values = {}
    for key, name in keys.items():
        if key not in data:
            raise UserError(f"the key {where}{key} is missing")
        values[name] = _record(hints[name], data[key], f"{where}{key}.") if is_dataclass(hints[name]) else data[key]
    return cls(**values)
