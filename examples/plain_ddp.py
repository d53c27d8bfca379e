"""A plain DDP script as people write it: it starts from the beginning each time, and a signal kills it.

    slurmddp submit examples/plain_ddp.py --nodes 2 -- --epochs 10

plain_ddp.diff has the five lines with which it resumes on any number of ranks, and exits when asked to.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--output", default="model.pt")
    options = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()

    torch.manual_seed(0)
    rows = torch.randn(1000, 16)
    dataset = TensorDataset(rows, rows.sin().sum(1, keepdim=True))
    sampler = DistributedSampler(dataset, seed=0)
    loader = DataLoader(dataset, batch_size=24 // dist.get_world_size(), sampler=sampler)

    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if dist.get_rank() == 0 and step % 20 == 0:
                print(f"epoch {epoch}  step {step}  loss {loss.item():.6f}", flush=True)
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), options.output)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
