"""Sessions of other batches and other ranks than the job's, and steps in them that are timed."""

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle

import torch
import torch.distributed as dist

from slurmddp.runtime import optimizer
from slurmddp.runtime.data import loading
from slurmddp.runtime.data.loading import Micro, to_device
from slurmddp.runtime.job import Job, Parallel
from slurmddp.runtime.precision import PRECISIONS, autocast
from slurmddp.runtime.session import Session
from slurmddp.runtime.step import StepFlags, Stepper
from slurmddp.runtime.world import World

#: Seconds of steps that are timed; at least, and at most so many steps.
_SECONDS, _FEWEST, _MOST = 4.0, 3, 100
#: Steps of a training that is never over.
_ENDLESS = 2**31
#: Bytes that an all-reduce is tried with: about a bucket of DDP.
_BUCKET = 25 * 2**20
_REPEATS = 3
#: Micro batches per rank and step for the noise scale, samples in one of them at most, seconds, and steps.
_PARTS, _SMALL, _NOISE_SECONDS, _NOISE_STEPS = 8, 4, 15.0, (6, 32)


def shaped(job: Job, *, recompute: bool, shard: int = 1, compiled: bool = True) -> Job:
    """Return the job with activation checkpointing or without, and so many ranks that share the model. compiled: False:
    whatever the job says, it is not, which would take a minute for each micro batch.
    """
    compiled = compiled and job.train.compile
    train = replace(job.train, activation_checkpointing=recompute, compile=compiled, steps=_ENDLESS)
    return replace(job, train=train, parallel=Parallel(None, shard, 1))


def resized(session: Session, total: int, micro: int) -> Session:
    """Return the session with other batches of the same model."""
    before = session.job.batch
    by_length = before.by_length if total == before.total else None  # a window of other batches may be too long
    job = replace(session.job, batch=replace(before, total=total, micro=micro, by_length=by_length))
    stepper = Stepper(session.world, session.data.task, session.parallel, session.trained, job, session.timer)
    return replace(session, job=job, stepper=stepper)


def same_again(session: Session, micro: int, passes: int) -> Iterator[Micro]:
    """Yield one micro batch for ever, as steps of so many passes: the loader takes no part."""
    wanted = loading.Wanted([number % session.data.length for number in range(micro)], epochs=[0] * micro)
    made = loading.load(session.data.task, session.data.train, iter([wanted]), rank=0, workers=0, pin_memory=False)
    one = next(iter(made))
    return cycle([replace(one, last=number == passes - 1) for number in range(passes)])


def run(session: Session, micros: Iterator[Micro], steps: range, *, learn: bool = False) -> float:
    """Make some steps, and return their seconds. Unless they learn, the weights stay as they are."""
    schedule = session.job.train.schedule
    synchronize(session.world.device)
    began = time.perf_counter()
    for step in steps:
        rate = session.rate * optimizer.ratio(schedule, step - 1, _ENDLESS) if learn else 0.0
        session.stepper.run(micros, step=step, rate=rate, flags=StepFlags(), before_update=lambda: None)
        session.timer.end()
    session.stepper.settle()
    synchronize(session.world.device)
    return time.perf_counter() - began


def timed(session: Session) -> tuple[float, dict[str, float]]:
    """Train for some seconds. Returns seconds of a step, those of the slowest rank, and rank 0's by part.

    The first step is not counted: it connects the ranks and starts the loader. Every rank has to call it.
    """
    micros = session.micro_batches(session.order(0), first_step=0, position=0)
    run(session, micros, range(1, 2), learn=True)
    session.timer.window()
    slowest = max(session.world.gather(run(session, micros, range(2, 3), learn=True)))
    number = min(_MOST, max(_FEWEST, round(_SECONDS / slowest)))
    session.timer.window()
    seconds = max(session.world.gather(run(session, micros, range(3, 3 + number), learn=True))) / number
    window = session.timer.window()
    return seconds, {part: window.mean(part) for part in window.sums}


def loader_speed(session: Session, *, seconds: float = 2.0) -> float:
    """Return the samples per second of this rank's loader, when nothing else runs."""
    micros = session.micro_batches(session.order(0), first_step=0, position=0)
    for _ in range(1 + session.job.train.workers * session.job.train.prefetch):
        next(micros)  # was loaded ahead
    samples, began = 0, time.perf_counter()
    while (taken := time.perf_counter() - began) < seconds or not samples:
        samples += len(next(micros).ids)
    return samples / taken if taken else float(samples)


def all_reduce(world: World, size: int) -> float | None:
    """Return the seconds of an all-reduce of `size` bytes alone, the slowest rank's; None for a single rank."""
    if world.size == 1:
        return None
    tensor = torch.zeros(max(1, min(size, _BUCKET) // 4), device=world.device)
    dist.all_reduce(tensor)  # connects
    synchronize(world.device)
    world.gather(None)
    began = time.perf_counter()
    for _ in range(_REPEATS):
        dist.all_reduce(tensor)
    synchronize(world.device)
    seconds: float = max(world.gather(time.perf_counter() - began))
    return seconds / _REPEATS * size / (4 * tensor.numel())


def gradient_norms(session: Session, speed: float) -> tuple[list[tuple[float, float]], int, int]:
    """Return the squared norm of the gradient over a small and over a big batch, once per step; and their samples.

    The small batch is a micro batch of one rank, of which the norms are averaged; the big one is all of these. The
    weights stay as they are. speed: samples per second of all ranks. Every rank has to call it.
    """
    world, parallel = session.world, session.parallel
    small = min(session.job.batch.micro, _SMALL)
    big = small * _PARTS * world.size
    fewest, most = _NOISE_STEPS
    steps = min(most, max(fewest, int(_NOISE_SECONDS * speed / big)))
    sampling = resized(session, big, small)
    micros = sampling.micro_batches(sampling.order(0), first_step=0, position=0)
    precision = PRECISIONS[session.job.train.precision]
    parameters = [item for item in parallel.module.parameters() if item.requires_grad]
    found = []
    for _ in range(steps):
        sums = [torch.zeros_like(item) for item in parameters]
        squares = torch.zeros((), dtype=torch.float64, device=world.device)
        for _ in range(_PARTS):
            parallel.clear_gradients()
            # Not exchanged: this rank's own gradient is wanted.
            with parallel.exchanging(last=False):
                with autocast(world.device, precision):
                    loss = session.data.task.loss(parallel.model, to_device(next(micros).data, world.device))
                parallel.backward(loss.total / loss.count)
            squares += _square([item.grad for item in parameters if item.grad is not None])
            for total, item in zip(sums, parameters, strict=True):
                if item.grad is not None:
                    total += item.grad
        for tensor in (*sums, squares):
            dist.all_reduce(tensor)
        count = _PARTS * world.size
        found.append((float(squares) / count, float(_square(sums)) / count**2))
    parallel.clear_gradients()
    return found, small, big


def _square(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.double().square().sum() for tensor in tensors]).sum()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
