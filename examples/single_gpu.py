"""A classifier on one GPU as people write it: it starts from the beginning each time, and uses one GPU of a node.

    python examples/single_gpu.py --epochs 10

single_gpu.diff makes it a DDP script that saves, resumes, and exits when asked to.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def digits(count: int) -> TensorDataset:
    """Stand-in for MNIST: ten patterns and much noise."""
    patterns = torch.randn(10, 1, 28, 28)
    labels = torch.randint(10, (count,))
    return TensorDataset(patterns[labels] + 8 * torch.randn(count, 1, 28, 28), labels)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--output", default="model.pt")
    options = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dataset = digits(1920)
    loader = DataLoader(dataset, batch_size=64, shuffle=True)

    model = nn.Sequential(nn.Conv2d(1, 8, 5, 2), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(1152, 10))
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=120)
    step = 0

    for epoch in range(options.epochs):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if step % 10 == 0:
                print(f"epoch {epoch}  step {step}  loss {loss.item():.6f}", flush=True)
    torch.save(model.state_dict(), options.output)


if __name__ == "__main__":
    main()
