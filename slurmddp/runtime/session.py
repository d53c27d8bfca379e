"""Everything that the run of one attempt works with: data, model, optimizer, the ways to speak."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from slurmddp.records.events import Facts
from slurmddp.records.rank_events import Started
from slurmddp.runtime import console, optimizer, randomness, tasks, world
from slurmddp.runtime.checkpoint.state import Trained
from slurmddp.runtime.data import loading
from slurmddp.runtime.data.order import SampleOrder
from slurmddp.runtime.errors import UserError
from slurmddp.runtime.job import Job
from slurmddp.runtime.journal import Events
from slurmddp.runtime.measure.timing import StepTimer
from slurmddp.runtime.parallel.model import Parallel
from slurmddp.runtime.parallel.wrap import wrap
from slurmddp.runtime.step import Stepper
from slurmddp.runtime.tasks.protocol import Samples, Task
from slurmddp.runtime.watch.watch import Watch
from slurmddp.shared import batch
from slurmddp.shared.mesh import kind
from slurmddp.shared.run_folder import RunFolder
from slurmddp.shared.units import short


@dataclass(frozen=True)
class Data:
    """The task and its samples, the same on every rank."""

    task: Task
    train: Samples
    validation: Samples
    fingerprint: str

    @property
    def length(self) -> int:
        """Training samples in one epoch."""
        return len(self.train)


@dataclass(frozen=True)
class Session:
    """One rank's view of one attempt. `rate`: the learning rate's peak. `weights`: each rank's share of a batch."""

    folder: RunFolder
    job: Job
    world: world.World
    events: Events
    console: console.Console
    watch: Watch
    data: Data
    weights: batch.Weights
    rate: float
    parallel: Parallel
    trained: Trained
    timer: StepTimer
    stepper: Stepper

    def record(self, facts: Facts) -> None:
        """Write an event that is about the whole run: rank 0 does, the others do not."""
        if self.world.is_main:
            self.events.write(facts)

    def order(self, origin: int) -> SampleOrder:
        """Return the order of the training samples; `origin`: the position from which windows by length count."""
        job, data = self.job, self.data
        batches, total = job.batch.by_length, job.batch.total
        return loading.order(data.task, data.length, job.train.seed, total=total, by_length=batches, origin=origin)

    def micro_batches(self, order: SampleOrder, *, first_step: int, position: int) -> Iterator[loading.Micro]:
        """Yield this rank's micro batches for the steps after `first_step`, from global `position` in the data on."""
        job, here, mine = self.job, self.world, self.parallel.data
        lists = loading.training_lists(
            order,
            start=position,
            steps=job.train.steps - first_step,
            total=job.batch.total,
            micro=job.batch.micro,
            world=mine.size,
            rank=mine.rank,
            weights=self.weights,
            lockstep=self.parallel.lockstep,
        )
        return loading.load(
            self.data.task,
            self.data.train,
            lists,
            rank=here.rank,
            workers=job.train.workers,
            pin_memory=here.device.type == "cuda",
            prefetch=job.train.prefetch,
        )


def prepare(folder: RunFolder, job: Job, joined: world.World, events: Events, watch: Watch) -> Session:
    """Make the task, its data and the model. Every rank has to call it; a failure on one is raised on all."""
    if job.train.deterministic:
        world.be_deterministic()
    say = console.Console(joined.is_main)
    data = _data(job, joined)
    weights = _weights(job, joined, say)
    timer = StepTimer(joined.device)
    trained, together = _model(job, joined, data.task, timer)
    wanted = job.train.optimizer
    rate = optimizer.scaled(wanted.lr, wanted.lr_rule, wanted.lr_batch, job.batch.total)
    watch.count(together.process_groups())
    stepper = Stepper(joined, data.task, together, trained, job, timer)
    return Session(folder, job, joined, events, say, watch, data, weights, rate, together, trained, timer, stepper)


def announce(session: Session) -> None:
    """Say what is going to be run, on the console and as an event."""
    job, here, say = session.job, session.world, session.console.say
    nodes = len(set(here.gather(here.node)))
    device = _device_name(here)
    parameters = sum(parameter.numel() for parameter in session.trained.model.parameters())
    takers, sizes = session.parallel.data.size, session.parallel.mesh
    accumulation = batch.accumulation(job.batch.total, job.batch.micro, takers, session.weights)
    unit = "ranks" if takers == here.size else "tensor groups"
    arithmetic = f"micro {job.batch.micro} x accumulation {accumulation} x {unit} {takers}"
    if not batch.is_even(job.batch.total, job.batch.micro, takers, session.weights):
        arithmetic = f"uneven (at most {arithmetic}); every sample weighs the same"
    say(f"run        {job.run.id}, attempt {here.attempt}")
    counts = f"{session.data.length} training samples, {len(session.data.validation)} validation samples"
    say(f"task       {job.train.task}: {counts}")
    say(f"model      {short(parameters)} parameters, {job.train.precision}, {job.train.optimizer.name}")
    say(
        f"world      {here.size} rank{'s' * (here.size > 1)} on {nodes} node{'s' * (nodes > 1)}, {device}, "
        f"{here.backend}, torch {torch.__version__}"
    )
    say(f"batch      {job.batch.total} samples = {arithmetic}")
    if kind(sizes) != "DDP":
        say(f"parallel   {kind(sizes)}, {' x '.join(f'{name} {size}' for name, size in sizes.items())}")
    session.record(
        Started(here.size, nodes, kind(sizes), str(torch.__version__), device, here.backend, parameters=parameters)
    )


def _data(job: Job, joined: world.World) -> Data:
    train = job.train
    task = joined.together(lambda: tasks.create(train.task, train.data, train.model))
    data = joined.together(lambda: Data(task, task.train_samples(), task.validation_samples(), task.fingerprint()))
    seen = joined.gather((joined.node, data.length, data.fingerprint))
    for node, length, fingerprint in seen:
        if [length, fingerprint] != seen[0][1:]:
            raise UserError(
                f"the data differs between nodes: {node} sees {length} samples, fingerprint {fingerprint}; "
                f"{seen[0][0]} sees {seen[0][1]} samples, fingerprint {seen[0][2]}",
                shared=True,
            )
    if data.length == 0:
        raise UserError(f"the task {train.task} has no samples to train on", shared=True)
    return data


def _model(job: Job, joined: world.World, task: Task, timer: StepTimer) -> tuple[Trained, Parallel]:
    """The model, built alike on all ranks; from then on, every rank's random stream is its own."""
    train = job.train
    randomness.seed_all(randomness.derive(train.seed, "model"))
    bare: nn.Module = joined.together(task.build_model)
    randomness.seed_all(randomness.derive(train.seed, 0, joined.rank))
    together = wrap(bare, job, joined, timer.mark)
    optim = optimizer.build(together.module, train.optimizer)
    scaler = torch.amp.GradScaler(joined.device.type, enabled=train.precision == "fp16")
    return Trained(together.module, optim, scaler), together


def _weights(job: Job, joined: world.World, say: console.Console) -> batch.Weights:
    """The share of the global batch of each rank, or tensor group, relative to the others'; None if all are equal."""
    if not job.batch.weights:
        return None
    everyone = joined.gather((joined.node, _device_name(joined)))
    who = [(node, device) for node, device in everyone[:: job.parallel.tensor]]
    listed = ", ".join(sorted({name for names in who for name in names}))
    for pattern in batch.unused_patterns(job.batch.weights, who):
        say.warn(f"train.batch.weights: {pattern!r} matches no node and no device of this run: {listed}")
    try:
        return batch.weights_of(job.batch.weights, who)
    except ValueError as error:
        raise UserError(f"train.batch.weights: {error}", shared=True) from error


def _device_name(joined: world.World) -> str:
    return torch.cuda.get_device_name(joined.device) if joined.device.type == "cuda" else joined.device.type
