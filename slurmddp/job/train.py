"""The part `train` of a job: what is trained, on which batches, with which optimizer."""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from slurmddp.job.tasks import BUNDLED, check_options
from slurmddp.job.types import Count, Free, Line, Model, PathStr, Text, Whole, Workdir, path_text


class Parallel(Model):
    """How ranks share the model: replicate x shard x tensor = ranks. shard 1 is DDP, all of them FSDP, between them
    HSDP. tensor: ranks of one node that share each layer, and take the same samples."""

    replicate: Count | None = None
    shard: Count = 1
    tensor: Count = 1


class Batch(Model):
    """global = micro x accumulation x ranks; two of global, micro and accumulation give the third.

    weights: a rank's share of the global batch, by pattern of its node's or device's name; 1 for all others.
    by_length: so many global batches are sorted by length together, where samples have lengths.
    """

    global_: Annotated[Count | None, Field(alias="global")] = None
    micro: Count | None = None
    accumulation: Count | None = None
    even: bool = False
    weights: dict[Line, Annotated[float, Field(gt=0)]] = {}
    by_length: Count | None = None

    @model_validator(mode="after")
    def _two_of_three(self) -> "Batch":
        if self.global_ and self.micro and self.accumulation:
            raise ValueError("has global, micro and accumulation: remove one, it follows from the others")
        return self


class Optimizer(Model):
    """`clip`: largest global norm of the gradient; null turns clipping off. `lr_rule`: how lr follows the global batch
    from `lr_batch`, the one that it was tuned for."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: Annotated[float, Field(gt=0)] = 3e-4
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    clip: Annotated[float, Field(gt=0)] | None = 1.0
    fused: bool = True
    lr_rule: Literal["none", "linear", "sqrt"] = "none"
    lr_batch: Count | None = None

    @model_validator(mode="after")
    def _rule_has_its_batch(self) -> "Optimizer":
        if self.lr_rule != "none" and self.lr_batch is None:
            raise ValueError(f"has lr_rule {self.lr_rule} but no lr_batch (the global batch for which lr was tuned)")
        return self


class Schedule(Model):
    """Learning rate over steps: a linear warm-up, then down to `min_ratio` of the peak at `steps`."""

    kind: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: Whole = 0
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    steps: Count | None = None


class Evaluate(Model):
    """Evaluation on the validation set. `batches`: global batches of it; null: every sample once."""

    every_steps: Count | None = None
    at_end: bool = True
    batches: Count | None = None


class Ddp(Model):
    """Options of DistributedDataParallel. compression: what gradients are rounded to on their way."""

    static_graph: bool = False
    bucket_mb: Annotated[float, Field(gt=0, le=10000)] = 25.0
    compression: Literal["none", "bf16"] = "none"


def _is_module(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


class Train(Model):
    """What runs on the ranks: a bundled task, your own task (`package.module:factory`), or your own program: a Python
    script, a bash script (*.sh), or a Python module.

    resume_args: added to args at each start after the first save of the run; {checkpoint}: the newest save.
    observe: how a thread in each rank of your own script reacts to a hang.
    workdir: where it runs: submit (the folder of submission), run (a folder in the run folder), or a path.
    """

    task: Line | None = None
    script: PathStr | None = None
    module: Line | None = None
    args: tuple[Text, ...] = ()
    resume_args: tuple[Text, ...] = ()
    observe: Literal["report", "restart", "off"] = "report"
    project: PathStr | None = None
    workdir: Workdir | None = None
    data: Annotated[dict[str, Free], Field(validate_default=True)] = {}
    model: Annotated[dict[str, Free], Field(validate_default=True)] = {}
    batch: Batch = Batch.model_construct()
    steps: Count = 1000
    seed: Whole = 0
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    deterministic: bool = False
    init_from: PathStr | None = None
    compile: bool = False
    activation_checkpointing: bool = False
    channels_last: bool = False
    ddp: Ddp = Ddp.model_construct()
    optimizer: Optimizer = Optimizer.model_construct()
    schedule: Schedule = Schedule.model_construct()
    evaluate: Evaluate = Evaluate.model_construct()
    on_nonfinite: Literal["stop", "skip", "halve"] | None = None
    replica_check_every: Count | None = 100
    gc_every: Count | None = 1000
    log_every: Count = 10
    workers: Annotated[int, Field(ge=0, le=256)] = 0
    prefetch: Annotated[int, Field(ge=1, le=1024)] = 2
    trace_samples: bool = False

    @model_validator(mode="after")
    def _halving_needs_a_scale(self) -> "Train":
        if self.on_nonfinite == "halve" and self.precision != "fp16":
            raise ValueError(f"has on_nonfinite: halve, which works only with precision fp16, not {self.precision}")
        return self

    @model_validator(mode="after")
    def _sorting_needs_lengths(self) -> "Train":
        alike = self.task == "images" or (self.task == "lm" and self.data.get("format") != "jsonl")
        if self.batch.by_length is not None and alike:
            hint = "; use data.format jsonl for samples of different lengths" if self.task == "lm" else ""
            raise ValueError(
                f"has batch.by_length, but all samples of this job have the same length{hint}"
                "\n  -> remove train.batch.by_length"
            )
        return self

    @field_validator("data")
    @classmethod
    def _data_path(cls, value: dict[str, Any]) -> dict[str, Any]:
        # A bundled task's dataset: it becomes a bind, so it must be a path that a command can be given.
        paths = value.get("path")
        for path in paths if isinstance(paths, list) else [paths]:
            if isinstance(path, str):
                try:
                    path_text(path)
                except ValueError as error:
                    raise ValueError(f"has a path that {error}: {path!r}") from None
        return value

    @field_validator("data", "model")
    @classmethod
    def _bundled_options(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        task = info.data.get("task")
        if task in BUNDLED:
            name = str(info.field_name)
            check_options(task, name, value, info.data.get("data") if name == "model" else None)
        return value

    @model_validator(mode="after")
    def _task_or_script(self) -> "Train":
        if sum(each is not None for each in (self.task, self.script, self.module)) != 1:
            raise ValueError("needs one of task (lm, images, package.module:factory), script and module")
        if self.module is not None and not _is_module(self.module):
            raise ValueError(f"has the module {self.module!r}: write package.module, as for `python -m`")
        if self.task is not None:
            if self.args:
                raise ValueError("has args, but only a script can have args: put a task's options in data and model")
            if self.resume_args:
                raise ValueError("has resume_args, but only a script needs them: a task resumes by itself")
            if self.workdir is not None:
                raise ValueError(
                    "has workdir, but only a script or a module has one: a task writes into the run folder"
                )
            module, _, factory = self.task.partition(":")
            if self.task not in BUNDLED and not (factory.isidentifier() and _is_module(module)):
                raise ValueError(f"has the unknown task {self.task!r}: use lm, images, or package.module:factory")
        return self
