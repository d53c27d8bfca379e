"""The time of a training step: ours with all its checks, a bare DDP loop, Lightning Fabric, Hugging Face Accelerate.

    python -m benchmarks.step [--pairs N] [--block STEPS] [--ranks N] [--write]

All four run in the same processes, in turn, a block of steps each, at two sizes of the model: what else the machine
does falls on all of them alike. Prints each ratio with its spread. There is no target: on CPUs the ratio depends on
how many cores gloo's threads find free.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import environments, page
from benchmarks.measure import Comparison
from slurmddp.shared import schemas

#: By the time of a step: model, samples per rank, steps per block.
SIZES: dict[str, dict[str, Any]] = {
    "10 ms": {"model": {"layers": 2, "heads": 2, "width": 64}, "context": 64, "micro": 4, "block": 20},
    "100 ms": {"model": {"layers": 4, "heads": 4, "width": 128}, "context": 128, "micro": 4, "block": 5},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", nargs="*", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--loops", nargs="*", default=["ours", "bare", "fabric", "accelerate"])
    parser.add_argument("--block", type=int, help="steps in a block; many small ones tell more than few large ones")
    parser.add_argument("--here", action="store_true", help="with this Python, not an environment made for it")
    page.options(parser)
    options = parser.parse_args()
    python = Path(sys.executable) if options.here else environments.peers() / "python"
    about = environments.versions(python, "torch", *([] if options.here else ["lightning-fabric", "accelerate"]))
    figures = []
    for size in options.sizes:
        wanted = {"pairs": options.pairs, "block": options.block or SIZES[size]["block"], "loops": options.loops}
        times = measured(python, make_job(SIZES[size], options.ranks), wanted, options.ranks)["times"]
        first, *others = options.loops
        for name in others:
            title = f"a step of about {size}, {wanted['block']} in a block: {first} over {name}"
            figures.append(page.Figure.of(title, Comparison(title, "ms", times[first], times[name])))
    about += f"; {options.ranks} ranks with gloo, {options.pairs} pairs of blocks"
    return page.finish("step", figures, about, write=options.write)


def measured(python: Path, job: dict[str, Any], wanted: dict[str, Any], ranks: int, **more: str) -> dict[str, Any]:
    """Run the loops named in `wanted` ("loops", "pairs", "block") on `ranks` ranks. Returns "times" by loop, in
    milliseconds a step, and "memory": of each rank the largest resident memory, and of it the copies for checkpoints,
    in bytes. `more`: environment variables. Raises RuntimeError where a rank fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job.json").write_text(json.dumps(job))
        Path(folder, "bench.json").write_text(json.dumps(wanted))
        command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(environments.CHECKOUT), **more}
        done = subprocess.run(
            [*command, "-m", "benchmarks.step_rank", folder], env=variables, cwd=folder, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise RuntimeError(done.stdout[-2000:] + done.stderr[:6000])
        lines = Path(folder, "metrics.jsonl")
        found: dict[str, Any] = json.loads(Path(folder, "found.json").read_text())
        found["metrics"] = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
        return found


def make_job(size: dict[str, Any], ranks: int, **train: Any) -> dict[str, Any]:
    """job.json of our loop, all checks on; `train`: what differs."""
    optimizer = {
        "name": "adamw", "lr": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "momentum": 0.9,
        "clip": 1.0, "fused": True, "lr_rule": "none", "lr_batch": None,
    }  # fmt: skip
    data = {"path": sysconfig.get_paths()["stdlib"], "glob": "*.py", "context": size["context"]}
    return {
        "schema": schemas.JOB,
        "run": {"id": "bench", "name": "bench", "site": "local"},
        "train": {
            "task": "lm", "data": data, "model": size["model"], "steps": 10**6, "seed": 0, "precision": "fp32",
            "deterministic": False, "init_from": None, "compile": False, "activation_checkpointing": False,
            "channels_last": False, "ddp": {"static_graph": False, "bucket_mb": 25.0, "compression": "none"},
            "optimizer": optimizer,
            "schedule": {"kind": "cosine", "warmup": 0, "min_ratio": 0.1, "steps": None},
            "evaluate": {"every_steps": None, "at_end": False, "batches": None},
            "on_nonfinite": None, "replica_check_every": 100, "gc_every": 1000, "log_every": 10,
            "workers": 0, "prefetch": 2, "trace_samples": False, **train,
        },
        "parallel": {"replicate": None, "shard": 1, "tensor": 1},
        "batch": {"global": size["micro"] * ranks, "micro": size["micro"], "weights": {}, "by_length": None},
        "checkpoint": {"every_seconds": 1800.0, "every_steps": None, "keep": 3, "keep_every": None,
                       "asynchronous": True, "at_end": True},
        "resume_from": [],
        "timeouts": {"collective": 600, "hang": 120},
    }  # fmt: skip


def rank(folder: Path) -> None:
    """One rank: all loops in turn; rank 0 writes milliseconds a step, by loop, one figure a block."""
    import torch

    from benchmarks import loops

    torch.set_num_threads(1)
    wanted = json.loads((folder / "bench.json").read_text())
    setting = loops.join(folder)
    running: dict[str, Iterator[Any]] = {name: loops.LOOPS[name](setting) for name in wanted["loops"]}
    times: dict[str, list[float]] = {name: [] for name in running}
    for number in range(wanted["pairs"] + 2):  # Two to warm up.
        for name, steps in running.items():
            loops.barrier()
            before = time.perf_counter()
            for _ in range(wanted["block"]):
                next(steps)
            loops.barrier()
            if number >= 2:
                times[name].append(1000 * (time.perf_counter() - before) / wanted["block"])
    memory = setting.world.gather((_peak(), setting.staged))
    if setting.world.is_main:
        (folder / "found.json").write_text(json.dumps({"times": times, "memory": memory, "device": _device_peak()}))
    loops.barrier()
    os._exit(0)  # The loops are still running: nothing of them is worth a tidy end.


def _peak() -> int:
    """This process's largest resident memory so far, in bytes (proc(5), status)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _device_peak() -> int:
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


if __name__ == "__main__":
    sys.exit(main())
