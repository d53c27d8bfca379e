"""The toy task with trouble at a place in time, for tests of stopping and of hangs.

`data.trouble`: {"kind", "rank", "call", "where": "loss"|"validation"|"data", "once": path or absent, "path"}. `call`
counts what this rank does of that kind, from 1; the loss of the warm-up is the first, so call n + 1 is step n in a run
that has not been resumed. `data.pace`: seconds that every loss takes at least.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from slurmddp.runtime.tasks.protocol import Loss, Samples

from .toy import Rows, Toy


class Trouble:
    """Happens at one call of one rank."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._wanted: Mapping[str, Any] = data.get("trouble") or {}
        self._calls = {"loss": 0, "validation": 0, "data": 0}

    def pass_by(self, where: str) -> None:
        self._calls[where] += 1
        wanted = self._wanted
        if not wanted or wanted["where"] != where or int(os.environ["RANK"]) != wanted["rank"]:
            return
        if self._calls[where] == wanted["call"] and self._first_time():
            self._happen(wanted["kind"])

    def _first_time(self) -> bool:
        if "once" not in self._wanted:
            return True
        try:
            os.close(os.open(self._wanted["once"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _happen(self, kind: str) -> None:
        if kind == "spin":
            turning_for_ever()
        elif kind == "sleep":
            sleeping_for_ever()
        elif kind == "stop_file":
            Path(self._wanted["path"]).write_text("made by the task\n")
        else:
            # As some schedulers do: to data workers, too.
            for pid in [*data_workers(), os.getpid()]:
                os.kill(pid, getattr(signal, kind))


def data_workers() -> list[int]:
    """Process ids of this process's children."""
    return [int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]


def turning_for_ever() -> None:
    while True:
        pass


def sleeping_for_ever() -> None:
    while True:
        time.sleep(3600)


class TroubledRows(Rows):
    def __init__(self, trouble: Trouble, count: int) -> None:
        super().__init__(0, count)
        self._trouble = trouble

    def __getitem__(self, index: int) -> torch.Tensor:
        self._trouble.pass_by("data")
        return super().__getitem__(index)


class Troubled(Toy):
    def __init__(self, data: Mapping[str, Any], model: Mapping[str, Any]) -> None:
        super().__init__(data, model)
        self._trouble = Trouble(data)

    def train_samples(self) -> Samples:
        return TroubledRows(self._trouble, 23)

    def loss(self, model: Callable[..., Any], batch: dict[str, torch.Tensor]) -> Loss:
        time.sleep(self._data.get("pace", 0.0))
        self._trouble.pass_by("loss" if torch.is_grad_enabled() else "validation")
        return super().loss(model, batch)


def create(data: Mapping[str, Any], model: Mapping[str, Any]) -> Troubled:
    return Troubled(data, model)
