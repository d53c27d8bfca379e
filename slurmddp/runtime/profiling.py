"""`slurmddp debug profile`: torch.profiler over some steps of a running job, on the ranks that were asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from slurmddp.records.rank_events import Profiled
from slurmddp.runtime.session import Session
from slurmddp.runtime.watch.stop import StopFile
from slurmddp.shared.files import read_json

_MOST_STEPS = 1000


class Profiling:
    """Made on every rank, which all call `step` after each step. A profile that fails is reported; training continues.

    Rank 0 looks for the request, and the ranks agree on it in a reduction that happens anyway: all profile the same
    steps. They wait for each other while the traces are written, so that no rank looks hung.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._look()
        self._left = self._first = 0
        self._profile: profile | None = None
        self._error = ""

    @property
    def wanted(self) -> bool:
        """Return whether rank 0 has seen a request. Cheap: called in every step."""
        return not self._left and self._file.seen()

    def step(self, step: int, asked: bool) -> None:
        """After a step. asked: whether any rank had seen a request when it began; the same on every rank."""
        if self._left:
            self._left -= 1
            if not self._left:
                self._finish(step)
        elif asked:
            self._begin(step)

    def close(self, step: int) -> None:
        """At a clean end, on every rank: write what was profiled until then."""
        if self._left:
            self._left = 0
            self._finish(step)

    def _look(self) -> None:
        self._file = StopFile(self._session.folder.profile_request if self._session.world.is_main else None)

    def _begin(self, step: int) -> None:
        """Start on the ranks that were asked for. A request that cannot be read counts as none."""
        world = self._session.world
        steps, ranks = world.broadcast(self._request() if world.is_main else None)
        if steps:
            self._look()
        else:  # nor will the next one be readable, or removable
            self._file = StopFile(None)
        self._left, self._first, self._error = steps, step + 1, ""
        if steps and (ranks == "all" or world.is_main):
            activities = [ProfilerActivity.CPU]
            activities += [ProfilerActivity.CUDA] if world.device.type == "cuda" else []
            try:
                self._profile = profile(activities=activities)
                self._profile.start()
            except (RuntimeError, OSError) as error:
                self._profile, self._error = None, str(error)

    def _request(self) -> tuple[int, str]:
        """Return how many steps, and of which ranks ("0" or "all"), and remove the request. On rank 0."""
        path = self._session.folder.profile_request
        try:
            facts: Any = read_json(path)
            path.unlink()
            steps = facts["steps"]
            return (steps if isinstance(steps, int) and 0 < steps <= _MOST_STEPS else 0), str(facts["ranks"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._session.console.warn(f"profile: {path}: {error}")
            return 0, "0"

    def _finish(self, step: int) -> None:
        """Write the traces, and wait for each other."""
        session, world = self._session, self._session.world
        session.watch.enter("profile")
        path = session.folder.profile_trace(world.attempt, self._first, world.rank)
        written = self._profile is not None and self._write(self._profile, path)
        self._profile = None
        told = world.gather([str(path) if written else "", self._error])
        files = [file for file, _ in told if file]
        error = next((f"rank {rank}: {text}" for rank, (_, text) in enumerate(told) if text), "")
        session.record(Profiled(self._first, step, tuple(files), error))
        session.console.say(f"profiled   steps {self._first} to {step}: {error or files[0]}")
        session.watch.enter("step", step)

    def _write(self, profiled: profile, path: Path) -> bool:
        try:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            profiled.stop()
            path.parent.mkdir(parents=True, exist_ok=True)
            profiled.export_chrome_trace(str(path))
        except (RuntimeError, OSError) as error:
            self._error = str(error)
            return False
        return True
