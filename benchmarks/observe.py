"""What watching a script of the user's own costs: CPU time of the hook per step, and of the thread per second.

    python -m benchmarks.observe [--steps N] [--ranks N]

Plain DDP of a small model over gloo, started as node.sh starts a script. CPU time, not wall time: other load on the
machine changes it little. Exit code 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Microseconds per step, and share of a core.
HOOK, WATCHER = 50.0, 0.01
CALLS = 20_000
SCRIPT = """\
import json, sys, threading, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
(thread,) = [each for each in threading.enumerate() if each.name == "slurmddp observe"]
clock = time.pthread_getcpuclockid(thread.ident)
began, before = time.monotonic(), time.clock_gettime(clock)
for _ in range(int(sys.argv[1])):
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
seconds, used = time.monotonic() - began, time.clock_gettime(clock) - before
(hook,) = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks.values()
before = time.thread_time()
for _ in range(int(sys.argv[2])):
    hook(optimizer, (), {})
cost = time.thread_time() - before
thread._ddp.look = lambda: False  # it asks no more
before = time.thread_time()
for _ in range(int(sys.argv[2])):
    thread._steps.asked = thread._ddp.read
    hook(optimizer, (), {})
reads = time.thread_time() - before
figures = {"hook": cost / int(sys.argv[2]) * 1e6, "reads": reads / int(sys.argv[2]) * 1e6}
told = {"seconds": seconds, "watcher": used / seconds, "modules": len(thread._ddp._modules), **figures}
print("MEASURED", json.dumps(told), flush=True)
dist.destroy_process_group()
"""


def measure(folder: Path, steps: int, ranks: int) -> list[dict[str, float]]:
    """What each rank measured."""
    script = folder / "own.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "slurmddp.runtime.begin", str(script), str(steps), str(CALLS)]
    observed = {"SLURMDDP_OBSERVE": '{"hang": 120}', "SLURMDDP_RUN": str(folder), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **observed}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    lines = [line.partition("MEASURED ")[2] for line in done.stdout.splitlines()]
    return [json.loads(line) for line in lines if line]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observe", description="What watching a script costs.")
    parser.add_argument("--steps", type=int, default=20_000, metavar="N", help="default: %(default)s")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="default: %(default)s")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.steps, options.ranks)
    hook, reads, watcher = (max(rank[name] for rank in found) for name in ("hook", "reads", "watcher"))
    seconds = found[0]["seconds"]
    print(f"{options.steps} steps of {seconds / options.steps * 1000:.2f} ms on {options.ranks} ranks")
    print(f"hook per step    {hook:.2f} us of CPU time (target: at most {HOOK:.0f})")
    print(f"one per second   {reads:.2f} us: it also reads DDP's own times (target: at most {HOOK:.0f})")
    print(f"watcher thread   {watcher:.2%} of a core (target: at most {WATCHER:.0%})")
    if not any(rank["modules"] for rank in found):
        print("rank 0 did not find its DDP module: try more steps", file=sys.stderr)
        return 1
    return 0 if max(hook, reads) <= HOOK and watcher <= WATCHER and len(found) == options.ranks else 1


if __name__ == "__main__":
    sys.exit(main())
