"""Plain PyTorch DDP: continues after a killed rank, a lost node, the time limit, a requeue, and with --resume.

    slurmddp submit examples/frameworks/ddp_snapshot.py --nodes 2 -- --steps 1000

What slurmddp needs are the lines that name a variable SLURMDDP_..., `save`, `torch.load`, and `should_stop`.
"""

import argparse
import itertools
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from slurmddp.runtime import should_stop

CHECKPOINTS = Path(os.environ["SLURMDDP_RUN"], "checkpoints")
OLDER = [Path(folder) for folder in os.environ.get("SLURMDDP_RESUME_FROM", "").split(":") if folder]


def save(snapshot: dict) -> None:
    """Replace the file once the new one is whole: a kill at any moment leaves a whole snapshot."""
    CHECKPOINTS.mkdir(exist_ok=True)
    torch.save(snapshot, CHECKPOINTS / "snapshot.new")
    (CHECKPOINTS / "snapshot.new").replace(CHECKPOINTS / "snapshot.pt")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()

    torch.manual_seed(0)
    rows = torch.randn(4096, 16)
    data = TensorDataset(rows, rows.sin().sum(1, keepdim=True))
    sampler = DistributedSampler(data)  # each rank has its part of each epoch
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    newest = next((path for folder in (CHECKPOINTS, *OLDER) if (path := folder / "snapshot.pt").exists()), None)
    if dist.get_rank() == 0:
        print(f"attempt {os.environ['SLURMDDP_ATTEMPT']} begins with {newest}", flush=True)
    step = 0
    if newest is not None:
        snapshot = torch.load(newest, map_location=device)
        model.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        step = snapshot["step"]
    ddp = DistributedDataParallel(model)

    stop = False
    for epoch in itertools.count(step // len(loader)):
        sampler.set_epoch(epoch)
        # The batches of this epoch that are done. On another number of ranks, the epoch's data come in another order.
        for x, y in itertools.islice(loader, step % len(loader), None):
            if stop or step == options.steps:
                dist.destroy_process_group()
                return
            loss = torch.nn.functional.mse_loss(ddp(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            stop = should_stop()
            if dist.get_rank() == 0 and (stop or step % 20 == 0 or step == options.steps):
                save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step})


if __name__ == "__main__":
    main()
