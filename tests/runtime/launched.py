"""torchrun in the background, for tests that send signals to its processes."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .harness import HERE, PATIENCE, ROOT, Run


def until(condition: Callable[[], Any], what: str) -> None:
    """Wait for something that has to come."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"no {what} in {PATIENCE} s"
        time.sleep(0.02)


class Launched:
    """One torchrun and its ranks."""

    def __init__(self, run: Run, size: int, *options: str, **environment: str) -> None:
        self.run = run
        self.size = size
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        command += [*options, "-m", "slurmddp.runtime.train", str(run.root)]
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE.parent)]),
            "SLURMDDP_NODE": "here",
            "SLURMDDP_ATTEMPT": "0",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            **environment,
        }
        self._out = run.root / "stdout"
        self._err = run.root / "stderr"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.agent = subprocess.Popen(command, env=variables, stdout=out, stderr=err, cwd=run.root)
        self._ranks: dict[int, int] = {}

    def wait(self, timeout: float = PATIENCE) -> int:
        """torchrun's exit code."""
        return self.agent.wait(timeout)

    @property
    def stdout(self) -> str:
        return self._out.read_text()

    @property
    def stderr(self) -> str:
        return self._err.read_text()

    def ranks(self) -> dict[int, int]:
        """Process ids of the ranks that are there, by rank."""
        for pid in _children(self.agent.pid):
            with contextlib.suppress(OSError):
                content = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                found = [item for item in content if item.startswith(b"RANK=")]
                if found:
                    self._ranks[int(found[0][5:])] = pid
        return self._ranks

    def send(self, rank: int, number: int) -> None:
        """Send a signal to one rank."""
        os.kill(self.ranks()[rank], number)

    def until_step(self, step: int, attempt: int = 0) -> None:
        """Wait until rank 0 has written the figures of a step."""
        until(lambda: self.agent.poll() is not None or step in self.run.losses(attempt), f"step {step}")
        assert self.agent.poll() is None, self.stderr
        assert len(self.ranks()) == self.size

    def end(self) -> None:
        """Kill whatever is still there of ours."""
        pids = [pid for pid in self._ranks.values() if alive(pid) and _parent(pid) in (1, self.agent.pid)]
        if self.agent.poll() is None:
            pids += self.ranks().values()
            self.agent.kill()
            self.agent.wait()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def launched(run: Run, size: int, *options: str, **environment: str) -> Iterator[Launched]:
    """A run under torchrun, in the background; whatever happens, nothing of it is left."""
    job = Launched(run, size, *options, **environment)
    try:
        yield job
    finally:
        job.end()


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(item) for item in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []
