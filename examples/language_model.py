"""A small GPT as people write it, alone or under torchrun: it starts from the beginning each time.

    torchrun --nproc-per-node 2 examples/language_model.py --steps 200

language_model.diff makes it save, resume, and exit when asked to.
"""

import argparse
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TEXT = "".join(f"{a}+{b}={a + b};" for a in range(100) for b in range(100))
LETTERS = sorted(set(TEXT))
LENGTH, WIDTH, BATCH, ACCUMULATION = 32, 32, 4, 2


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letter, self.position = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, 0.1, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 1, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, len(LETTERS), bias=False)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, letters.device)
        return self.head(self.blocks(self.letter(letters) + self.position.weight, mask, is_causal=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", default="model.pt")
    options = parser.parse_args()

    rank, device = int(os.environ.get("RANK", "0")), torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    torch.manual_seed(1337 + rank)
    text = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    model = GPT().to(device)
    if "RANK" in os.environ:
        dist.init_process_group()
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.55 + 0.45 * math.cos(0.01 * done))

    for step in range(options.steps):
        for _ in range(ACCUMULATION):
            starts = torch.randint(len(text) - LENGTH, (BATCH, 1))
            rows = text[starts + torch.arange(LENGTH + 1)].to(device)
            loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            (loss / ACCUMULATION).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}  loss {loss.item():.6f}", flush=True)

    if rank == 0:
        torch.save(getattr(model, "module", model).state_dict(), options.output)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
