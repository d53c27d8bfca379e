"""What a rank sees of itself, and what it does: a script for test_forking.py, which compares forked and fresh ranks.

ROLE_NAME says what to do: it is among the variables that differ between ranks.
"""

import atexit
import json
import multiprocessing
import os
import pickle
import random
import resource
import signal
import sys
import time
from pathlib import Path

TORCH_BEFORE = any(name.partition(".")[0] == "torch" for name in sys.modules)
if os.environ["ROLE_NAME"] == "threads":
    print("a line above the import")
    os.environ["OMP_NUM_THREADS"] = "1"
if os.environ["ROLE_NAME"] == "devices":
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"


class Mine:
    """A class of __main__."""


def double(number: int) -> tuple[int, str]:
    return 2 * number, __name__


def status(name: str) -> str:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(name + ":"))


def state() -> dict[str, object]:
    """Everything about this process that a script may depend on, and that two starts share."""
    environ = {key: value for key, value in os.environ.items() if key != "_"}
    shown = Path("/proc/self/environ").read_bytes().decode().split("\0")
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    main = sys.modules["__main__"]
    return {
        "argv": sys.argv, "orig": sys.orig_argv, "path": sys.path, "flags": list(sys.flags), "x": sys._xoptions,
        "warnings": sys.warnoptions, "executable": sys.executable, "prefix": sys.prefix,
        "main": [main.__name__, main.__file__, main.__package__, main.__spec__ and main.__spec__.name,
                 type(main.__loader__).__name__,
                 sorted(vars(main))],
        "environ": environ, "cwd": os.getcwd(), "umask": os.umask(0o22),
        "shown": sorted(line for line in shown if line and not line.startswith("_=")),
        "cmdline": Path("/proc/self/cmdline").read_bytes().decode(),
        "comm": Path("/proc/self/comm").read_text(), "parent": os.getppid(),
        "signals": {str(number): str(signal.getsignal(number)).split(" at ")[0] for number in signal.valid_signals()},
        "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        "kernel_signals": [status("SigBlk"), status("SigIgn"), status("SigPnd")],
        "files": sorted(os.listdir("/proc/self/fd")),
        "session": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits},
        "cores": sorted(os.sched_getaffinity(0)), "nice": os.nice(0),
        "oom": Path("/proc/self/oom_score_adj").read_text(), "dumpable": status("Seccomp"),
        "slurmddp": sorted(name for name in sys.modules if name.partition(".")[0] == "slurmddp"),
        "sitecustomize": getattr(sys.modules.get("sitecustomize"), "SEEN", None),
        "torch_before": TORCH_BEFORE, "hash": hash("a text"), "recursion": sys.getrecursionlimit(),
        "streams": [
            [s.encoding, s.errors, s.line_buffering, s.write_through, s.isatty(), s.fileno(), s.name, s.mode]
            for s in (sys.stdin, sys.stdout, sys.stderr)
        ],
        "start_method": multiprocessing.get_start_method(allow_none=True),
        "young": time.clock_gettime(time.CLOCK_BOOTTIME) - int(
            Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK") < 60,
    }  # fmt: skip


def torch_state() -> dict[str, object]:
    """What torch read as it was imported, or made."""
    import torch
    import torch.distributed

    return {
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "file": torch.__file__, "main": sys.modules["torch"] is torch, "dtype": str(torch.get_default_dtype()),
        "cuda": [torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork(), torch.cuda.is_available()],
        "grad": torch.is_grad_enabled(), "deterministic": torch.are_deterministic_algorithms_enabled(),
        "initialized": torch.distributed.is_initialized(), "spec": torch.__spec__.name,
        "devices": os.environ.get("CUDA_VISIBLE_DEVICES"), "omp": os.environ.get("OMP_NUM_THREADS"),
        "meta_path": [str(finder) for finder in sys.meta_path if "Torch" in str(finder)],
        "sum": torch.arange(1000.0).sum().item(), "matmul": (torch.ones(64, 64) @ torch.ones(64, 64)).sum().item(),
    }  # fmt: skip


def draws() -> dict[str, object]:
    """Random numbers, which no two ranks share unless they seed them."""
    import numpy
    import torch

    found: dict[str, object] = {"torch": torch.rand(1).item(), "python": random.random(), "numpy": numpy.random.rand()}
    found["authkey"] = bytes(multiprocessing.current_process().authkey).hex()
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
    return {"free": found, "seeded": [torch.rand(1).item(), random.random(), numpy.random.rand()]}


def processes() -> dict[str, object]:
    """Pickles, pools of each kind, and workers of a DataLoader."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    found: dict[str, object] = {"pickle": type(pickle.loads(pickle.dumps(Mine()))) is Mine}
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            found[method] = pool.map(double, [1, 2])
    data = TensorDataset(torch.arange(8.0))
    found["loader"] = [batch[0].tolist() for batch in DataLoader(data, batch_size=4, num_workers=2)]
    return found


def training() -> dict[str, object]:
    """Losses of DDP on one rank, seeded, on threads."""
    import torch
    import torch.distributed

    torch.manual_seed(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{os.getcwd()}/meet-{os.getpid()}", rank=0, world_size=1
    )
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 1))
    )
    optimizer, losses = torch.optim.AdamW(model.parameters()), []
    imported = set(sys.modules)
    for _ in range(4):
        loss = model(torch.randn(64, 256)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    late = [name for name in sys.modules if name not in imported and name.partition(".")[0] == "torch"]
    torch.distributed.destroy_process_group()
    return {"losses": losses, "late": late}


def on_gpu() -> dict[str, object]:
    """Losses of DDP with nccl on one GPU: autocast, fused AdamW, torch.compile, a pinned loader with workers."""
    import torch
    import torch.distributed
    from torch.utils.data import DataLoader, TensorDataset

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # after the import of torch, so the fork stays one
    torch.use_deterministic_algorithms(True)
    before = [torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork()]
    torch.manual_seed(1)
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{os.getcwd()}/meet-{os.getpid()}", rank=0, world_size=1
    )
    layers = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 1)).cuda()
    model = torch.compile(torch.nn.parallel.DistributedDataParallel(layers, device_ids=[0]))
    optimizer, losses = torch.optim.AdamW(layers.parameters(), fused=True), []
    data = DataLoader(TensorDataset(torch.randn(256, 256)), batch_size=64, num_workers=2, pin_memory=True)
    for (batch,) in data:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(batch.cuda(non_blocking=True)).float().pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    torch.distributed.destroy_process_group()
    return {"losses": losses, "before": before, "device": torch.cuda.get_device_name()}


def compiled() -> dict[str, object]:
    import torch

    model = torch.compile(lambda x: torch.relu(x) * 2 + 1, backend=sys.argv[1])
    return {"compiled": model(torch.tensor([-1.0, 2.0])).tolist(), "graphs": torch._dynamo.utils.counters["stats"]}


def main() -> None:
    role = os.environ["ROLE_NAME"]
    if role in ("state", "state2"):
        print(json.dumps(state()))
    elif role in ("torch", "threads", "devices"):
        print(json.dumps(torch_state()))
    elif role in ("draws", "processes", "training", "on_gpu", "compiled"):
        print(json.dumps(globals()[role]()))
    elif role == "exit":
        atexit.register(print, "registered first")
        atexit.register(print, "registered last")
        sys.exit(int(sys.argv[2]))
    elif role == "text":
        sys.exit("a text")
    elif role == "error":
        raise ValueError("an error of the script")
    elif role == "usage":
        import argparse

        argparse.ArgumentParser().parse_args(["--unknown"])
    elif role == "interrupt":
        signal.raise_signal(signal.SIGINT)
    elif role.isdecimal():
        signal.raise_signal(int(role))
    elif role == "wait":
        print("waits", flush=True)
        time.sleep(600)


if __name__ == "__main__":
    main()
