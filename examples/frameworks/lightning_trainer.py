"""Lightning's Trainer: continues after a killed rank, a lost node, the time limit, a requeue, and with --resume.

    slurmddp submit examples/frameworks/lightning_trainer.py --nodes 2 -- --steps 1000

What slurmddp needs are the lines that name a variable SLURMDDP_..., `plugins`, `ckpt_path`, and the callback `Stop`.
"""

import argparse
import os
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch.utils.data import DataLoader, TensorDataset

from slurmddp.runtime import should_stop

CHECKPOINTS = Path(os.environ["SLURMDDP_RUN"], "checkpoints")
OLDER = [Path(folder) for folder in os.environ.get("SLURMDDP_RESUME_FROM", "").split(":") if folder]


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Stop(Callback):
    """Save a checkpoint and end when slurmddp asks for it: before the time limit, or on `slurmddp cancel`."""

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if should_stop():
            trainer.save_checkpoint(CHECKPOINTS / "last.ckpt")
            trainer.should_stop = True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()

    torch.manual_seed(0)
    rows = torch.randn(4096, 16)
    loader = DataLoader(TensorDataset(rows, rows.sin().sum(1, keepdim=True)), batch_size=8)

    ranks, ranks_per_node = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = Trainer(
        num_nodes=ranks // ranks_per_node,
        devices=ranks_per_node,
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        strategy="ddp",
        plugins=[TorchElasticEnvironment()],  # RANK and WORLD_SIZE count; the SLURM plugin would requeue the job itself
        max_steps=options.steps,
        max_epochs=-1,
        # One file, which each save replaces as a whole: a kill at any moment leaves the one before.
        callbacks=[
            ModelCheckpoint(CHECKPOINTS, "last", every_n_train_steps=20, enable_version_counter=False),
            Stop(),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    newest = next((path for folder in (CHECKPOINTS, *OLDER) if (path := folder / "last.ckpt").exists()), None)
    trainer.print(f"attempt {os.environ['SLURMDDP_ATTEMPT']} begins with {newest}", flush=True)
    trainer.fit(Model(), loader, ckpt_path=newest)
    trainer.print(f"step {trainer.global_step} of {options.steps}", flush=True)


if __name__ == "__main__":
    main()
