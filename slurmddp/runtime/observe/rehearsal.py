"""What a rehearsal (slurmddp check --rehearse) does in a rank: it ends epochs early, notes the parameters after each
step, and kills the rank or asks it to stop. The script itself is not changed.
"""

import ctypes
import hashlib
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from slurmddp.records.events import Facts
from slurmddp.records.rank_events import CheckpointSaved
from slurmddp.records.rehearsal import KILL, REQUEST, STARTS, Line, Order, read_lines, read_order
from slurmddp.records.stop import CANCELLED, StopRequest
from slurmddp.runtime import torch_private
from slurmddp.runtime.environment import Environment
from slurmddp.runtime.journal import Events
from slurmddp.runtime.observe.signs import Parts
from slurmddp.runtime.watch.process_exit import say
from slurmddp.shared.files import write_whole
from slurmddp.shared.run_folder import RunFolder

#: Values of a parameter that are hashed, and that are noted of it: enough to tell two steps of training apart.
_HASHED, _NOTED, _NOTED_IN_ALL = 4096, 4, 256
#: Seconds that a save may take in the background before a kill, and per step after a request to stop: a script looks
#: at the stop file once per second.
_SETTLE, _PACE = 1.0, 0.25


def start(env: Environment, folder: RunFolder) -> None:
    """Do what the run's rehearsal asks for. A script that cannot be rehearsed does not run on: it would not end."""
    try:
        order = read_order((folder.path / REQUEST).read_text(encoding="utf-8"))
        if order.batches is not None:
            torch_private.end_epochs_after(order.batches)
        if env.rank == 0:
            _Recorder(order, folder, f"{env.attempt:03d}-{env.start}")
    except Exception as error:  # noqa: BLE001 - as its docstring says
        say(f"slurmddp: error: this script cannot be rehearsed: {type(error).__name__}: {error}\n")
        os._exit(1)


class _Recorder:
    """Rank 0's notes of one start, and what it does in the first one."""

    def __init__(self, order: Order, folder: RunFolder, name: str) -> None:
        starts = folder.path / STARTS
        starts.mkdir(exist_ok=True)
        self._order, self._folder = order, folder
        before = [line for path in starts.iterdir() for line in read_lines(path.read_bytes())]
        self._acts = "" if any(line.acted for line in before) else order.act
        self._file = os.open(starts / f"{name}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._optimizer: int | None = None
        self._parts = Parts()
        self._step, self._pace = 0, 0.0
        self._saved: int | None = None
        self._losses: list[torch.Tensor] = []
        self._note_losses()
        self._note_saves()
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)

    def _note_losses(self) -> None:
        plain: Any = torch.Tensor.backward

        def backward(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            if tensor.numel() == 1:
                self._losses.append(tensor.detach().reshape(()).clone())
            return plain(tensor, *args, **options)

        torch.Tensor.backward = backward  # type: ignore[method-assign,assignment]

    def _note_saves(self) -> None:
        plain, written = torch.save, Events.write

        def save(*args: Any, **options: Any) -> Any:
            done = plain(*args, **options)
            file = options.get("f", args[1] if len(args) > 1 else "")
            name = getattr(file, "name", file)
            self._note_save(os.path.basename(name) if isinstance(name, (str, Path)) else "")
            return done

        def write(events: Events, facts: Facts) -> None:
            written(events, facts)
            if isinstance(facts, CheckpointSaved):  # of Checkpointer, which may have saved in another process
                self._note_save("checkpoint")

        torch.save = save
        Events.write = write  # type: ignore[method-assign,assignment]

    def _note_save(self, name: str) -> None:
        if self._step:
            self._write(Line(self._step, time.time(), saved=re.sub(r"\d+", "#", name) or "a stream"))
            self._saved = self._step if self._saved is None else self._saved

    def _before(self, optimizer: Optimizer, _args: Any, _options: Any) -> None:
        if self._optimizer is None and not torch_private.makes_optimizer_state():
            self._optimizer = id(optimizer)
            self._write(_line(0, optimizer, []))

    def _after(self, optimizer: Optimizer, _args: Any, _options: Any) -> None:
        if id(optimizer) != self._optimizer or not self._parts.begins(optimizer):
            return
        self._step += 1
        self._write(_line(self._step, optimizer, self._losses))
        self._losses.clear()
        time.sleep(self._pace)
        at = self._order.at
        if at is None and self._saved is not None:
            at = self._saved + self._order.after
        if self._acts and self._step == at:
            self._act()

    def _act(self) -> None:
        time.sleep(_SETTLE)
        self._write(Line(self._step, time.time(), acted=True))
        if self._acts == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        self._acts, self._pace = "", _PACE
        write_whole(self._folder.stop, StopRequest(CANCELLED).text())

    def _write(self, line: Line) -> None:
        os.write(self._file, line.line())


def _line(step: int, optimizer: Optimizer, losses: "list[torch.Tensor]") -> Line:
    digest, firsts, part = hashlib.sha256(), hashlib.sha256(), False
    sample: list[float] = []
    parameters = [each.detach() for group in optimizer.param_groups for each in group["params"]]
    for parameter in parameters:
        if hasattr(parameter, "to_local"):
            parameter, part = parameter.to_local(), True
        flat = parameter.reshape(-1)
        values = flat[:: max(1, flat.numel() // _HASHED)].cpu().contiguous()
        content = ctypes.string_at(values.data_ptr(), values.nbytes)
        digest.update(content)
        firsts.update(content[: values.itemsize])
        if len(sample) < _NOTED_IN_ALL:
            sample += values[:: max(1, values.numel() // _NOTED)].double().tolist()
    loss = sum(float(each) for each in losses) / len(losses) if losses else None
    return Line(step, time.time(), digest.hexdigest()[:16], sample, loss, firsts.hexdigest()[:16] if part else "")
