"""Scalars for TensorBoard, where it is installed."""

import importlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class Dashboard:
    """Writes on rank 0, and does nothing elsewhere or where TensorBoard is not installed, which it says once.

    A dashboard never ends a run: if a write fails, it prints one message and writes no more.
    """

    def __init__(self, folder: Path, *, enabled: bool, say: Callable[[str], None], first_step: int = 0) -> None:
        """`folder` is made. `first_step`: the first that will be written; points of an earlier attempt from there
        on disappear from view.
        """
        self._say = say
        self._writer: Any = None
        if not enabled:
            return
        try:
            module = importlib.import_module("torch.utils.tensorboard")
        except ImportError as error:
            say(f"tensorboard is not installed ({error}): metrics.jsonl has all values")
            return
        self._guarded(lambda: self._open(module, folder, first_step))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write one point of each curve; values that are not finite are left out."""
        if self._writer is None:
            return
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._guarded(lambda: self._write(step, finite))

    def close(self) -> None:
        """Write what is left. A second call does nothing."""
        if self._writer is not None:
            self._guarded(self._writer.close)
        self._writer = None

    def _open(self, module: Any, folder: Path, first_step: int) -> None:
        self._writer = module.SummaryWriter(str(folder), purge_step=first_step or None)

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def _guarded(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - its thread passes on whatever went wrong in it
            self._writer = None
            self._say(f"cannot write to tensorboard any more: {error}")
