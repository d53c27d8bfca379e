"""A loop with Accelerate: continues after a killed rank, a lost node, the time limit, a requeue, and with --resume.

    slurmddp submit examples/frameworks/accelerate_loop.py --nodes 2 -- --steps 1000

`--set launch.accelerate=examples/frameworks/accelerate.yaml` adds what `accelerate launch` would read of such a file.
What slurmddp needs are the lines that name a variable SLURMDDP_..., `load_state`, `save`, and `should_stop`.
"""

import argparse
import itertools
import os
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader, TensorDataset

from slurmddp.runtime import should_stop

CHECKPOINTS = Path(os.environ["SLURMDDP_RUN"], "checkpoints")
OLDER = [Path(folder) for folder in os.environ.get("SLURMDDP_RESUME_FROM", "").split(":") if folder]


def save(accelerator: Accelerator, step: int) -> None:
    """Rename the folder once it is whole: a kill at any moment leaves the checkpoint before."""
    accelerator.save_state(CHECKPOINTS / ".saving")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (CHECKPOINTS / ".saving").rename(CHECKPOINTS / f"state-{step:08d}")
        for old in sorted(CHECKPOINTS.glob("state-*"))[:-2]:
            shutil.rmtree(old)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()

    torch.manual_seed(0)
    rows = torch.randn(4096, 16)
    loader = DataLoader(TensorDataset(rows, rows.sin().sum(1, keepdim=True)), batch_size=8, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    order = DataLoaderConfiguration(use_seedable_sampler=True)  # a resumed epoch has its data in the same order
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=order)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    newest = next((max(found) for folder in (CHECKPOINTS, *OLDER) if (found := [*folder.glob("state-*")])), None)
    precision = accelerator.mixed_precision
    accelerator.print(
        f"attempt {os.environ['SLURMDDP_ATTEMPT']} begins with {newest}, precision {precision}", flush=True
    )
    step = 0
    if newest is not None:
        accelerator.load_state(newest)
        step = int(newest.name.rpartition("-")[2])

    for epoch in itertools.count(step // len(loader)):
        loader.set_epoch(epoch)
        for x, y in accelerator.skip_first_batches(loader, step % len(loader)):
            if step == options.steps:
                return
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            stop = should_stop()
            if stop or step % 20 == 0 or step == options.steps:
                save(accelerator, step)
            if stop:
                return


if __name__ == "__main__":
    main()
