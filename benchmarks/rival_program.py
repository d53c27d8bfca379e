"""The training that benchmarks/rivals.py has every launcher run: plain DDP, or the same arithmetic in Lightning.

    rival_program.py FOLDER [lightning | undisturbed]

It saves every EVERY steps and loads the newest save when it starts. FOLDER gets what it did: starts.jsonl (a line per
start of a rank), steps.jsonl (a line per step, by rank 0), and weights.pt at its end. While the file FOLDER/slow is
there, steps take a second longer. What a launcher's own manual asks for is in a branch of its own.
"""

import datetime
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

STEPS, EVERY, PACE, WIDTH = 150, 5, 0.1, 200
FOLDER = Path(sys.argv[1])
#: slurmddp wants saves in the run folder.
CHECKPOINTS = Path(os.environ.get("SLURMDDP_RUN", FOLDER)) / "checkpoints"
TIMEOUT = datetime.timedelta(seconds=60)


def note(name: str, **row: Any) -> None:
    with (FOLDER / name).open("a") as file:
        file.write(json.dumps({"time": time.time(), **row}) + "\n")


def note_start(rank: int) -> None:
    note("starts.jsonl", rank=rank, node=socket.gethostname(), pid=os.getpid())


def note_step(rank: int, step: int) -> None:
    time.sleep(PACE + (FOLDER / "slow").exists())
    if rank == 0:
        note("steps.jsonl", step=step, start=f"{socket.gethostname()}-{os.getpid()}")


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    rows = torch.rand(6, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))
    return (model(rows) - rows).square().mean()


def finish(model: nn.Module) -> None:
    torch.save(model.state_dict(), FOLDER / "weights.new")
    (FOLDER / "weights.new").replace(FOLDER / "weights.pt")


def plain() -> None:
    beat = None
    if "SLURMDDP_RUN" in os.environ:
        from slurmddp.runtime import should_stop
    elif "FT_RANK_MONITOR_IPC_SOCKET" in os.environ:
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

        beat = RankMonitorClient()
        beat.init_workload_monitoring()
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank, step = dist.get_rank(), 0
    note_start(rank)
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    CHECKPOINTS.mkdir(exist_ok=True)
    newest = CHECKPOINTS / "last.pt"
    if newest.exists():
        saved = torch.load(newest)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    ddp, stop = nn.parallel.DistributedDataParallel(model), False
    while step < STEPS and not stop:
        step += 1
        optimizer.zero_grad()
        loss_of(ddp, step, rank).backward()
        optimizer.step()
        note_step(rank, step)
        if beat:
            beat.send_heartbeat()
        stop = "SLURMDDP_RUN" in os.environ and should_stop()
        if rank == 0 and (stop or step % EVERY == 0):
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(saved, CHECKPOINTS / "last.new")
            (CHECKPOINTS / "last.new").replace(newest)
    if step == STEPS and rank == 0:
        finish(model)
    dist.destroy_process_group()


def with_lightning() -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.environments import SLURMEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build_model()

        def training_step(self, _: Any) -> torch.Tensor:
            return loss_of(self.model, self.global_step + 1, self.global_rank)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

        def on_fit_start(self) -> None:
            note_start(self.global_rank)

        def on_train_batch_end(self, *_: Any) -> None:
            note_step(self.global_rank, self.global_step)

    module = Module()
    trainer = Trainer(
        default_root_dir=FOLDER,
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy=DDPStrategy(process_group_backend="gloo", timeout=TIMEOUT),
        plugins=[SLURMEnvironment(auto_requeue=True)],
        max_steps=STEPS,
        max_epochs=-1,
        callbacks=[ModelCheckpoint(CHECKPOINTS, save_last=True, every_n_train_steps=EVERY)],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(range(2 * STEPS)), ckpt_path="last")
    if trainer.global_step == STEPS and trainer.is_global_zero:
        finish(module.model)


def undisturbed() -> None:
    """In one process, the weights of two ranks."""
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        for rank in range(2):
            (loss_of(model, step, rank) / 2).backward()
        optimizer.step()
    finish(model)


if __name__ == "__main__":
    {"lightning": with_lightning, "undisturbed": undisturbed}.get(sys.argv[-1], plain)()
