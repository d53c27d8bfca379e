"""The training loops that benchmarks/step.py compares, each one optimizer step a `next()`: ours, and what people write.

All train the bundled GPT on the same files with the same optimizer, clipping and batch, and log every LOG_EVERY steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from slurmddp.runtime import environment, job, optimizer, randomness, world
from slurmddp.runtime.data.loading import to_device
from slurmddp.runtime.journal import Events
from slurmddp.runtime.loop import Trainer, trainer
from slurmddp.runtime.precision import PRECISIONS, autocast
from slurmddp.runtime.tasks import create
from slurmddp.runtime.watch.stop import Stop
from slurmddp.runtime.watch.watch import Watch
from slurmddp.shared.run_folder import RunFolder

LOG_EVERY = 10


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is trained: the run folder with our job.json, and the joined world. `trainers`: ours, once made."""

    folder: RunFolder
    job: job.Job
    world: world.World
    trainers: list[Trainer] = dataclasses.field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.job.train.optimizer.lr

    @property
    def staged(self) -> int:
        """Bytes of this rank's copies for checkpoints."""
        copies = [made._checkpointing._writer._staging for made in self.trainers]
        return sum(one.bytes for one in copies if one is not None)


def join(root: Path) -> Setting:
    """Join the process group, as our entrypoint does."""
    folder = RunFolder(root)
    wanted = job.load(folder.job_json)
    return Setting(folder, wanted, world.start(environment.read(), timeout=wanted.timeouts.collective))


def ours(setting: Setting) -> Iterator[Any]:
    """Our loop, all checks on."""
    env = environment.read()
    events = Events(setting.folder.events, attempt=env.attempt, node=env.node, rank=env.rank)
    stop = Stop(setting.folder.path / "stop" if env.local_rank == 0 else None)
    watch = Watch(env, stop)
    watch.install(parent=True)
    watch.connect(setting.world, setting.job.timeouts, events)
    setting.trainers.append(trainer(setting.folder, setting.job, setting.world, env, events, watch))
    return setting.trainers[-1].steps()


def _parts(setting: Setting) -> tuple[Any, torch.nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    train, here = setting.job.train, setting.world
    task = create(train.task, train.data, train.model)
    randomness.seed_all(randomness.derive(train.seed, "model"))
    model = task.build_model().to(here.device)
    optim = optimizer.build(model, train.optimizer)
    samples: Any = task.train_samples()
    sampler: Any = DistributedSampler(samples, num_replicas=here.size, rank=here.rank, seed=train.seed)
    size, pinned = setting.job.batch.total // here.size, here.device.type == "cuda"
    loader = DataLoader(
        samples, batch_size=size, sampler=sampler, drop_last=True, num_workers=train.workers, pin_memory=pinned
    )
    return task, model, optim, loader


def _batches(loader: Any) -> Iterator[Any]:
    epoch = 0
    while True:
        sampler = getattr(loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def _loss(setting: Setting, task: Any, model: Any, batch: Any) -> torch.Tensor:
    """The mean loss of a batch, in the job's precision."""
    device = setting.world.device
    with autocast(device, PRECISIONS[setting.job.train.precision]):
        result = task.loss(model, to_device(batch, device))
    return result.total / result.count


def _log(step: int, loss: torch.Tensor) -> None:
    if step % LOG_EVERY == 0:
        loss.item()


def bare(setting: Setting) -> Iterator[Any]:
    """A hand-written DDP loop."""
    task, model, optim, loader = _parts(setting)
    if setting.job.train.compile:
        model.compile()
    devices = [setting.world.device] if setting.world.device.type == "cuda" else None
    parallel = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
    for step, batch in enumerate(_batches(loader), 1):
        optim.zero_grad(set_to_none=True)
        loss = _loss(setting, task, parallel, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parallel.parameters(), setting.job.train.optimizer.clip or 1e9)
        optim.step()
        _log(step, loss.detach())
        yield step


def fabric(setting: Setting) -> Iterator[Any]:
    """Lightning Fabric, as its documentation has it."""
    from lightning_fabric import Fabric

    task, bare_model, bare_optim, bare_loader = _parts(setting)
    runner: Any = Fabric(accelerator="cpu", devices=setting.world.size, strategy="ddp")
    runner.launch()
    model, optim = runner.setup(bare_model, bare_optim)
    loader = runner.setup_dataloaders(bare_loader, use_distributed_sampler=False)
    for step, batch in enumerate(_batches(loader), 1):
        optim.zero_grad(set_to_none=True)
        loss = _loss(setting, task, model, batch)
        runner.backward(loss)
        runner.clip_gradients(model, optim, max_norm=setting.job.train.optimizer.clip or 1e9)
        optim.step()
        _log(step, loss.detach())
        yield step


def accelerate(setting: Setting) -> Iterator[Any]:
    """Hugging Face Accelerate, as its documentation has it."""
    from accelerate import Accelerator

    task, bare_model, bare_optim, _ = _parts(setting)
    samples: Any = task.train_samples()
    plain = DataLoader(samples, batch_size=setting.job.batch.total // setting.world.size, shuffle=True, drop_last=True)
    runner: Any = Accelerator(cpu=True)
    model, optim, loader = runner.prepare(bare_model, bare_optim, plain)
    for step, batch in enumerate(_batches(loader), 1):
        with runner.accumulate(model):
            optim.zero_grad(set_to_none=True)
            loss = _loss(setting, task, model, batch)
            runner.backward(loss)
            runner.clip_grad_norm_(model.parameters(), setting.job.train.optimizer.clip or 1e9)
            optim.step()
        _log(step, loss.detach())
        yield step


LOOPS: dict[str, Callable[[Setting], Iterator[Any]]] = {
    "ours": ours, "bare": bare, "fabric": fabric, "accelerate": accelerate,
}  # fmt: skip


def barrier() -> None:
    """All ranks are here, and their devices have done what they were given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
