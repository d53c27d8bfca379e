"""Real ranks for tests: a pool of processes that join a new gloo group for each task, and torchrun itself."""

import contextlib
import io
import json
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from slurmddp.runtime.environment import Environment
from slurmddp.shared import schemas

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
POOL = 3
#: Seconds until what is waited for counts as hung. Beside `stress-ng --cpu 2`, a test takes several times as long.
PATIENCE = 400.0
#: Seconds for it to leave its process group, where torch 2.4's gloo may wait for ever; a run's ranks end without it.
LEAVING = 20.0
NO_FSDP2 = ("needs FSDP2 (torch 2.6 or newer)", "cannot import name 'fully_shard'")
TORCH = tuple(int(part) for part in version("torch").split(".")[:2])

os.environ["OMP_NUM_THREADS"] = "1"  # Before torch is imported, here and in every child.


def make_job(**changes: Any) -> dict[str, Any]:
    """A job of the toy task; changes by path: train__steps=4, batch__global=5."""
    job: dict[str, Any] = {
        "schema": schemas.JOB,
        "run": {"id": "test-1", "name": "test", "site": "local"},
        "train": {
            "task": "runtime.toy:create",
            "data": {},
            "model": {},
            "steps": 6,
            "seed": 3,
            "precision": "fp32",
            "deterministic": False,
            "init_from": None,
            "compile": False,
            "activation_checkpointing": False,
            "channels_last": False,
            "ddp": {"static_graph": False, "bucket_mb": 25.0, "compression": "none"},
            "optimizer": {
                "name": "adamw",
                "lr": 0.01,
                "weight_decay": 0.1,
                "betas": [0.9, 0.95],
                "eps": 1e-8,
                "momentum": 0.9,
                "clip": 1.0,
                "fused": True,
                "lr_rule": "none",
                "lr_batch": None,
            },
            "schedule": {"kind": "cosine", "warmup": 2, "min_ratio": 0.1, "steps": None},
            "evaluate": {"every_steps": None, "at_end": True, "batches": None},
            "on_nonfinite": None,
            "replica_check_every": 2,
            "gc_every": 3,
            "log_every": 1,
            "workers": 0,
            "prefetch": 2,
            "trace_samples": True,
        },
        "parallel": {"replicate": None, "shard": 1, "tensor": 1},
        "batch": {"global": 5, "micro": 2, "weights": {}, "by_length": None},
        "checkpoint": {
            "every_seconds": None,
            "every_steps": 2,
            "keep": 2,
            "keep_every": None,
            "asynchronous": True,
            "at_end": True,
        },
        "resume_from": [],
        "timeouts": {"collective": 30, "hang": None},
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = job
        for parent in parents:
            place = place[parent]
        place[last] = value
    return job


@dataclass(frozen=True)
class Run:
    """A run folder of a test, and what lies in it."""

    root: Path

    @classmethod
    def create(cls, root: Path, **changes: Any) -> "Run":
        root.mkdir(exist_ok=True)
        (root / "job.json").write_text(json.dumps(make_job(**changes)))
        return cls(root)

    def lines(self, name: str) -> list[dict[str, Any]]:
        path = self.root / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines("events.jsonl") if line["event"] == kind]

    def losses(self, attempt: int) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in self.lines("metrics.jsonl") if line["attempt"] == attempt}

    def marker(self, attempt: int = 0) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.root / "markers" / f"attempt-{attempt:03d}.json").read_text())
        return content

    def stream(self, attempt: int) -> dict[int, list[int]]:
        """Sample ids by step, those of rank 0 first."""
        steps: dict[int, list[int]] = {}
        for path in sorted((self.root / "trace" / f"attempt-{attempt:03d}").glob("rank-*.jsonl")):
            for line in map(json.loads, path.read_text().splitlines()):
                steps.setdefault(line["step"], []).extend(line["ids"])
        return steps

    def checkpoint(self, step: int) -> Path:
        return self.root / "checkpoints" / f"step-{step:08d}"

    def saved(self) -> list[str]:
        return sorted(path.name for path in (self.root / "checkpoints").iterdir())


def place(rank: int, size: int, **other: Any) -> Environment:
    """What a rank of `size` on one node each would read from its environment."""
    usual: dict[str, Any] = {
        "rank": rank,
        "local_rank": rank,
        "local_world": 1,
        "world": size,
        "attempt": 0,
        "node": f"node{rank}",
        "stop_file": None,
    }
    return Environment(**(usual | other))


def free_port() -> int:
    """A port that the kernel gives to nobody by itself: what it gave us could be another process's before we listen."""
    while True:
        port = random.SystemRandom().randint(20000, 29999)  # tests seed the common one
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Failed(Exception):
    """A task failed on some rank; `failures`: rank to (name of the exception, message)."""

    def __init__(self, failures: dict[int, tuple[str, str]], traces: str) -> None:
        super().__init__(traces)
        self.failures = failures


class Ranks:
    """Processes that have imported torch and wait for functions to run together; as many as were ever needed."""

    def __init__(self, size: int) -> None:
        self._workers: list[tuple[Any, Connection]] = []
        self._grow(size)

    def _grow(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        while len(self._workers) < size:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,))
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def __call__(
        self, size: int, function: Callable[..., Any], *arguments: Any, timeout: float = PATIENCE
    ) -> list[Any]:
        """Results of `function(world, *arguments)` on ranks 0..size-1; it lives at a module's top level.

        Raises Failed with what each failed rank raised.
        """
        try:
            return self._run(size, function, arguments, timeout)
        except BaseException as error:
            if not isinstance(error, Failed):
                self.close()  # Answers may be left, which the next test would take for its own.
            raise

    def _run(self, size: int, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float) -> list[Any]:
        self._grow(size)
        port = free_port()
        for rank, (_, pipe) in enumerate(self._workers[:size]):
            pipe.send((rank, size, port, function, arguments))
        results, failures, traces = [], {}, ""
        for rank, (_, pipe) in enumerate(self._workers[:size]):
            assert pipe.poll(timeout), f"rank {rank} gave no answer in {timeout} s"
            good, value = pipe.recv()
            if good:
                results.append(value)
            else:
                failures[rank] = value[:2]
                traces += f"rank {rank}:\n{value[2]}\n"
        for rank, (_, pipe) in enumerate(self._workers[:size]):
            if not pipe.poll(LEAVING if TORCH < (2, 6) else timeout):
                assert TORCH < (2, 6), f"rank {rank} has not left its process group in {timeout} s"
                self.close()
                break
            pipe.recv()
        if failures:
            if TORCH < (2, 6):  # There a sharded model that failed leaves meshes behind, at which the next one hangs.
                self.close()
                if all(any(text in message for text in NO_FSDP2) for _, message in failures.values()):
                    pytest.skip(f"torch {version('torch')} has no FSDP2")
            raise Failed(failures, traces)
        return results

    def train(self, size: int, run: Run, attempt: int = 0, stop_file: Path | None = None) -> str:
        """One attempt of a run, as train.main would make it. Returns what rank 0 printed, stdout and stderr."""
        output: str = self(size, _train, run.root, attempt, stop_file)[0]
        return output

    def close(self) -> None:
        """Kill them; the next call starts new ones. An orderly end would take seconds for each that imported torch."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers.clear()


def _serve(pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from slurmddp.runtime import world

    torch.set_num_threads(1)
    while True:
        try:
            rank, size, port, function, arguments = pipe.recv()
        except EOFError:
            return
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
        }
        try:
            joined = world.start(place(rank, size), timeout=120)
            pipe.send((True, function(joined, *arguments)))
        except Exception as error:  # noqa: BLE001 - the test process has to get it, whatever it is
            pipe.send((False, (type(error).__name__, str(error), traceback.format_exc())))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            pipe.send(None)


def _train(joined: Any, root: Path, attempt: int, stop_file: Path | None) -> str:
    from slurmddp.runtime import loop

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        loop.run(*_arguments(joined, root, attempt, stop_file))
    return output.getvalue()


def trainer(joined: Any, root: Path, attempt: int = 0) -> Any:
    """On a rank: the trainer of a run, for tests that look in between its steps."""
    from slurmddp.runtime import loop

    with contextlib.redirect_stdout(io.StringIO()):
        return loop.trainer(*_arguments(joined, root, attempt, None))


def _arguments(joined: Any, root: Path, attempt: int, stop_file: Path | None) -> tuple[Any, ...]:
    """What train.main would call the loop with."""
    import dataclasses

    from slurmddp.runtime import job
    from slurmddp.runtime.journal import Events
    from slurmddp.runtime.watch.stop import Stop
    from slurmddp.runtime.watch.watch import Watch
    from slurmddp.shared.run_folder import RunFolder

    folder = RunFolder(root)
    wanted = job.load(folder.job_json)
    rank, size = joined.rank, joined.size
    # A tensor group is on one node.
    joined = dataclasses.replace(joined, attempt=attempt, node=f"node{rank // wanted.parallel.tensor}")
    own = place(rank, size, attempt=attempt, node=joined.node, stop_file=stop_file)
    events = Events(folder.events, attempt=attempt, node=joined.node, rank=joined.rank)
    # Every step looks for the stop file: the runs of tests take less than the second between two looks of others.
    watch = Watch(own, Stop(stop_file if rank == 0 else None, interval=0.0))
    return folder, wanted, joined, own, events, watch


def torchrun(run: Run, size: int, timeout: float = PATIENCE, **environment: str) -> "subprocess.CompletedProcess[str]":
    """A run under the real launcher."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    command += ["-m", "slurmddp.runtime.train", str(run.root)]
    path = os.pathsep.join([str(ROOT), str(HERE.parent)])
    variables = {
        **os.environ,
        "PYTHONPATH": path,
        "SLURMDDP_NODE": "here",
        "SLURMDDP_ATTEMPT": "0",
        **environment,
    }
    return subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=timeout, check=False, cwd=run.root
    )
