"""A loop with DeepSpeed: continues after a killed rank, a lost node, the time limit, a requeue, and with --resume.

    slurmddp submit examples/frameworks/deepspeed_loop.py --nodes 2 -- --steps 1000

What slurmddp needs are the lines that name a variable SLURMDDP_..., `newest_checkpoint`, `save`, and `should_stop`.
A checkpoint of another number of ranks is first converted to DeepSpeed's universal format.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

from slurmddp.runtime import should_stop

CHECKPOINTS = Path(os.environ["SLURMDDP_RUN"], "checkpoints")
OLDER = [Path(folder) for folder in os.environ.get("SLURMDDP_RESUME_FROM", "").split(":") if folder]


def newest_checkpoint() -> Path | None:
    """The newest whole checkpoint of this run, else of those that it resumes. `save` writes `latest` last."""
    for folder in (CHECKPOINTS, *OLDER):
        if (latest := folder / "latest").exists():
            return folder / latest.read_text()
    return None


def save(engine: deepspeed.DeepSpeedEngine, step: int) -> None:
    """Replace `latest` once all ranks have saved: a kill at any moment leaves the checkpoint before."""
    tag = f"step-{step:08d}"
    engine.save_checkpoint(CHECKPOINTS, tag, client_state={"step": step}, save_latest=False)
    if dist.get_rank() == 0:
        (CHECKPOINTS / "latest.new").write_text(tag)
        (CHECKPOINTS / "latest.new").replace(CHECKPOINTS / "latest")
        for old in (*sorted(CHECKPOINTS.glob("step-*"))[:-2], *CHECKPOINTS.glob("universal-*")):
            shutil.rmtree(old)


def universal(checkpoint: Path) -> Path:
    """The checkpoint in a format for any number of ranks. Rank 0 converts it, into this run's folder."""
    target = CHECKPOINTS / f"universal-{checkpoint.name}"
    if dist.get_rank() == 0 and not target.exists():
        new = CHECKPOINTS / ".converting"
        shutil.rmtree(new, ignore_errors=True)
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
        subprocess.run([*command, "--input_folder", checkpoint, "--output_folder", new], check=True)
        new.rename(target)
    dist.barrier()
    return target


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()

    # On CPUs, DeepSpeed would compile collectives of its own, which needs a compiler on the nodes. gloo has them, too.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    checkpoint = newest_checkpoint()
    if rank == 0:
        print(f"attempt {os.environ['SLURMDDP_ATTEMPT']} begins with {checkpoint}", flush=True)
    other_ranks = checkpoint is not None and len([*checkpoint.glob("*_optim_states.pt")]) != ranks
    if other_ranks:
        checkpoint = universal(checkpoint)

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": 1},
        "checkpoint": {"load_universal": other_ranks},
    }
    # PyTorch's optimizer needs no compiler on the nodes; some of DeepSpeed's own do.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    step = 0
    if checkpoint is not None:
        _, state = engine.load_checkpoint(checkpoint.parent, checkpoint.name)
        step = state["step"]

    stop = False
    while step < options.steps and not stop:
        random = torch.Generator().manual_seed(step * ranks + rank)
        x = torch.randn(8, 16, generator=random).to(engine.device)
        loss = torch.nn.functional.mse_loss(engine(x), x.sin().sum(1, keepdim=True))
        engine.backward(loss)
        engine.step()
        step += 1
        stop = should_stop()
        if stop or step % 20 == 0 or step == options.steps:
            save(engine, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
