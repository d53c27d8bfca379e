"""Everything that the run of one attempt works with: data, model, optimizer, the ways to speak."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slurmddp.runtime import batch, console, loading, optimizer, randomness, tasks, world
from slurmddp.runtime.checkpoint.state import Trained
from slurmddp.runtime.errors import UserError
from slurmddp.runtime.folder import RunFolder
from slurmddp.runtime.job import Job
from slurmddp.runtime.journal import Events
from slurmddp.runtime.order import SampleOrder
from slurmddp.runtime.step import Stepper
from slurmddp.runtime.tasks.protocol import Samples, Task


@dataclass(frozen=True)
class Data:
    """The task and its samples, the same on every rank."""

    task: Task
    train: Samples
    held_out: Samples
    fingerprint: str

    @property
    def length(self) -> int:
        """Training samples in one epoch."""
        return len(self.train)


@dataclass(frozen=True)
class Session:
    """One rank's view of one attempt."""

    folder: RunFolder
    job: Job
    world: world.World
    events: Events
    console: console.Console
    data: Data
    trained: Trained
    stepper: Stepper

    def record(self, event: str, **facts: object) -> None:
        """Write an event that is about the whole run: rank 0 does, the others do not."""
        if self.world.is_main:
            self.events.write(event, **facts)

    def micro_batches(self, *, first_step: int, position: int) -> Iterator[loading.Micro]:
        """This rank's micro batches for the steps after `first_step`, from global `position` in the data
        on.
        """
        job, here = self.job, self.world
        lists = loading.training_lists(
            SampleOrder(self.data.length, job.train.seed),
            start=position,
            steps=job.train.steps - first_step,
            total=job.batch.total,
            micro=job.batch.micro,
            world=here.size,
            rank=here.rank,
        )
        return loading.load(
            self.data.task,
            self.data.train,
            lists,
            rank=here.rank,
            workers=job.train.workers,
            pin_memory=here.device.type == "cuda",
        )


def prepare(folder: RunFolder, job: Job, joined: world.World, events: Events) -> Session:
    """Make the task, its data and the model. Every rank has to call it; a failure on one is raised on all."""
    if job.train.deterministic:
        world.be_deterministic()
    data = _data(job, joined)
    trained, model = _model(job, joined, data.task)
    stepper = Stepper(joined, data.task, model, trained, job)
    return Session(folder, job, joined, events, console.Console(joined.is_main), data, trained, stepper)


def announce(session: Session) -> None:
    """Say what is going to be run, on the console and as an event."""
    job, here, say = session.job, session.world, session.console.say
    nodes = len(set(here.gather(here.node)))
    device = torch.cuda.get_device_name(here.device) if here.device.type == "cuda" else here.device.type
    parameters = sum(parameter.numel() for parameter in session.trained.model.parameters())
    accumulation = batch.accumulation(job.batch.total, job.batch.micro, here.size)
    arithmetic = f"micro {job.batch.micro} x accumulation {accumulation} x ranks {here.size}"
    if not batch.is_even(job.batch.total, job.batch.micro, here.size):
        arithmetic = f"dealt unevenly (at most {arithmetic}); every sample weighs the same"
    say(f"run        {job.run.id}, attempt {here.attempt}")
    say(f"task       {job.train.task}: {session.data.length} training samples, {len(session.data.held_out)} held out")
    say(f"model      {console.short(parameters)} parameters, {job.train.precision}, {job.train.optimizer.name}")
    say(
        f"world      {here.size} rank{'s' * (here.size > 1)} on {nodes} node{'s' * (nodes > 1)}, {device}, "
        f"{here.backend}, torch {torch.__version__}"
    )
    say(f"batch      {job.batch.total} samples = {arithmetic}")
    facts = {
        "torch": str(torch.__version__),
        "device": device,
        "backend": here.backend,
        "parameters": parameters,
    }
    session.record("started", world=here.size, nodes=nodes, **facts)


def _data(job: Job, joined: world.World) -> Data:
    train = job.train
    task = joined.together(lambda: tasks.create(train.task, train.data, train.model))
    data = joined.together(lambda: Data(task, task.train_samples(), task.held_out_samples(), task.fingerprint()))
    seen = joined.gather((joined.node, data.length, data.fingerprint))
    for node, length, fingerprint in seen:
        if (length, fingerprint) != seen[0][1:]:
            raise UserError(
                f"the data is not the same on all nodes: {node} sees {length} samples, fingerprint "
                f"{fingerprint}; "
                f"{seen[0][0]} sees {seen[0][1]} samples, fingerprint {seen[0][2]}",
                shared=True,
            )
    if data.length == 0:
        raise UserError(f"the task {train.task} has no samples to train on", shared=True)
    return data


def _model(job: Job, joined: world.World, task: Task) -> tuple[Trained, DistributedDataParallel]:
    """The model, built alike on all ranks; from then on, every rank's random stream is its own."""
    train, device = job.train, joined.device
    randomness.seed_all(randomness.derive(train.seed, "model"))
    bare: nn.Module = joined.together(task.build_model).to(device)
    randomness.seed_all(randomness.derive(train.seed, 0, joined.rank))
    optim = optimizer.build(bare, train.optimizer)
    scaler = torch.amp.GradScaler(device.type, enabled=train.precision == "fp16")
    device_ids = [device] if device.type == "cuda" else None
    model = DistributedDataParallel(bare, device_ids=device_ids, gradient_as_bucket_view=True)
    return Trained(bare, optim, scaler), model
