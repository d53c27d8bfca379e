"""A plain DDP script of your own, as torchrun starts it on every rank: slurmddp changes nothing in it.

    slurmddp submit examples/own_script.py --nodes 2 -- --steps 50

It also shows the one thing that a long run should do: look for the stop file, and end in time.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(dist.get_rank())

    model = DistributedDataParallel(torch.nn.Linear(16, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
    wanted = torch.arange(16.0, device=device) / 16
    stop_file = Path(os.environ.get("SLURMDDP_STOP_FILE", "/nonexistent"))

    for step in range(1, options.steps + 1):
        x = torch.randn(32, 16, device=device)
        loss = torch.nn.functional.mse_loss(model(x).squeeze(1), x @ wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        # Every rank has to end at the same step: one that sees the file tells the others.
        facts = torch.stack([loss.detach(), torch.tensor(float(stop_file.exists()), device=device)])
        dist.all_reduce(facts)
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}  loss {facts[0].item() / dist.get_world_size():.4f}  ranks {dist.get_world_size()}")
        if facts[1] > 0:
            break

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
