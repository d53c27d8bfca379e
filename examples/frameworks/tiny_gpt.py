"""A small GPT, with DDP: continues after a killed rank, a lost node, the time limit, a requeue, and with --resume.

    slurmddp submit examples/frameworks/tiny_gpt.py --nodes 2 -- --steps 1000

What slurmddp needs are the lines that name a variable SLURMDDP_..., `save`, `torch.load`, and `should_stop`.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slurmddp.runtime import should_stop

CHECKPOINTS = Path(os.environ["SLURMDDP_RUN"], "checkpoints")
OLDER = [Path(folder) for folder in os.environ.get("SLURMDDP_RESUME_FROM", "").split(":") if folder]
TEXT = "".join(f"{a}+{b}={a + b};" for a in range(100) for b in range(100))
LETTERS = sorted(set(TEXT))
LENGTH, WIDTH, HEADS, LAYERS, BATCH = 32, 64, 4, 2, 8


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letter, self.position = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, len(LETTERS), bias=False)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, letters.device)
        return self.head(self.blocks(self.letter(letters) + self.position.weight, mask, is_causal=True))


def batch(step: int, text: torch.Tensor) -> torch.Tensor:
    """The rows of this step and rank. They follow from the two numbers, so no state of the data has to be saved."""
    random = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=random)
    return text[starts + torch.arange(LENGTH + 1)]


def save(snapshot: dict) -> None:
    """Replace the file once the new one is whole: a kill at any moment leaves a whole snapshot."""
    CHECKPOINTS.mkdir(exist_ok=True)
    torch.save(snapshot, CHECKPOINTS / "gpt.new")
    (CHECKPOINTS / "gpt.new").replace(CHECKPOINTS / "gpt.pt")


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
    text = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)

    newest = next((path for folder in (CHECKPOINTS, *OLDER) if (path := folder / "gpt.pt").exists()), None)
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
    while step < options.steps and not stop:
        rows = batch(step, text).to(device)
        loss = F.cross_entropy(ddp(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        stop = should_stop()
        if dist.get_rank() == 0 and (stop or step % 20 == 0 or step == options.steps):
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
            save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
