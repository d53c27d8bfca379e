"""`slurmddp sync`: send the lines of metrics.jsonl that a tracker does not have yet."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from slurmddp.errors import ExternalError, SlurmddpError, UserError
from slurmddp.records.metrics import Metrics, read
from slurmddp.records.values import number
from slurmddp.runs import manifest
from slurmddp.runs.gate import OwnRun
from slurmddp.runs.metrics import behind
from slurmddp.runs.state import RunState
from slurmddp.shared.files import read_json
from slurmddp.spec.document import read_file, typed
from slurmddp.trackers.base import Facts, Point, Tracker

#: Class of each tracker in the module of its name.
TRACKERS = {"wandb": "Wandb", "mlflow": "MLflow", "tensorboard": "TensorBoard"}
#: Parts of job.yaml that a tracker gets. The others have accounts, addresses and variables.
_TOLD = ("train", "parallel", "checkpoint")


@dataclass(frozen=True)
class Sent:
    """How far a run was sent: bytes and lines of metrics.jsonl, the last step, and the tracker's run.

    key: of that run; state: how slurmddp's run ended, if the tracker was told; newest: the last line with `seconds`.
    """

    offset: int = 0
    lines: int = 0
    step: int = 0
    key: str | None = None
    where: str | None = None
    state: str | None = None
    newest: Mapping[str, Any] | None = None


def sync(
    folder: OwnRun, to: str, look: Callable[[], RunState], wait: Callable[[], None] | None = None
) -> tuple[Sent, int]:
    """Send what the tracker does not have yet. Returns how far it has all, and how many lines were sent now.

    wait: called between two looks at a run that is going; None to look once.
    Raises UserError (no such tracker or library, another sync), ExternalError (the tracker failed), OSError.
    """
    if to not in TRACKERS:
        raise UserError(f"no tracker {to!r}", where="--to", todo=f"use one of {', '.join(TRACKERS)}")
    place = folder.path / "trackers"
    try:
        folder.held.make(place)
        with folder.held.inside(place) as inside:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            lock = os.open(f"{to}.lock", flags, 0o644, dir_fd=inside)
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror}", where=str(place), todo="copy the run folder, then sync the copy"
        ) from None
    try:
        _lock(lock, folder, to)
        work = _Sync(folder, to, place)
        before = work.sent.lines
        work.run(look, wait)
        return work.sent, work.sent.lines - before
    finally:
        os.close(lock)


def _lock(descriptor: int, folder: OwnRun, to: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"another sync of run {folder.id} to {to} is running", todo="wait for it, or stop it first"
        ) from None
    except OSError:
        return  # a file system without locks


class _Sync:
    """One call of `sync`. The tracker is opened when there is something to send."""

    def __init__(self, folder: OwnRun, to: str, place: Path) -> None:
        self._folder, self._to, self._place = folder, to, place
        self._file = place / f"{to}.json"
        self._tracker: Tracker | None = None
        self.sent = _read(self._file, folder.path)

    def run(self, look: Callable[[], RunState], wait: Callable[[], None] | None) -> None:
        state = look()
        try:
            self._send()
            while state.going and wait is not None:
                wait()
                state = look()
                self._send()
        finally:
            self._close(None if state.going else state.state)

    def _send(self) -> None:
        for rows, offset in behind(self._folder.metrics, self.sent.offset):
            points, newest = _points(rows, self.sent)
            if points:
                tracker = self._opened()
                with _failures(self._to):
                    tracker.send(points)
            step = points[-1].step if points else self.sent.step
            lines, told = self.sent.lines + len(rows), newest.write() if newest else None
            self.sent = replace(self.sent, offset=offset, lines=lines, step=step, newest=told)
            if self._tracker is not None and self._tracker.durable:
                self._save()

    def _close(self, state: str | None) -> None:
        if self._tracker is None and state in (None, self.sent.state):
            return
        tracker = self._opened()
        with _failures(self._to):
            tracker.close(state)
        self.sent = replace(self.sent, state=state)
        self._save()

    def _opened(self) -> Tracker:
        if self._tracker is None:
            found = import_module(f"slurmddp.trackers.{self._to}")
            with _failures(self._to):
                tracker: Tracker = getattr(found, TRACKERS[self._to])(
                    _facts(self._folder, self._place), self.sent.key, self.sent.step
                )
            self._tracker = tracker
            self.sent = replace(self.sent, key=tracker.key, where=tracker.where)
        return self._tracker

    def _save(self) -> None:
        self._folder.held.write(self._file, json.dumps(asdict(self.sent)) + "\n")


@contextlib.contextmanager
def _failures(to: str) -> Iterator[None]:
    """Turn whatever a tracker's library raises into one message."""
    try:
        yield
    except SlurmddpError:
        raise
    except Exception as error:  # each library has its own, and those of its connections
        text = str(error) or type(error).__name__
        raise ExternalError(f"{to}: {text}\n  -> run the same command again: it sends what is missing") from error


def _read(path: Path, below: Path) -> Sent:
    try:
        return Sent(**read_json(path, below))
    except FileNotFoundError:
        return Sent()
    except (ValueError, TypeError) as error:
        todo = "remove it: the next sync sends everything again"
        raise UserError(f"is damaged: {error}", where=str(path), todo=todo) from None


def _points(rows: Sequence[Metrics], sent: Sent) -> tuple[list[Point], Metrics | None]:
    """Return the lines that have a time, and the newest line with `seconds`."""
    points: list[Point] = []
    newest = read(sent.newest or {})
    for index, row in enumerate(rows, sent.lines + 1):
        if row.time is not None:
            points.append(Point(index, row.time, row.step, _values(row, newest)))
        newest = row if row.seconds else newest
    return points, newest


def _values(row: Metrics, before: Metrics | None) -> dict[str, float]:
    parts = {f"seconds/{part}": seconds for part, seconds in row.since(before).items()}
    found = {name: number(value) for name, value in {"attempt": row.attempt, **row.figures, **parts}.items()}
    return {name: value for name, value in found.items() if value is not None}


def _facts(folder: OwnRun, place: Path) -> Facts:
    facts = manifest.read(folder)
    settings = {"site": facts.get("site"), "slurmddp": facts.get("slurmddp")}
    if folder.job_yaml.is_file():
        tree = typed(read_file(folder.job_yaml, "run", below=folder.path).tree)
        for name in _TOLD:
            settings.update(_flat(name, tree.get(name)))
    return Facts(folder.id, str(facts.get("name") or folder.id), place, settings)


def _flat(key: str, value: Any) -> dict[str, Any]:
    """`train.batch.global: 512`; a list stays whole, and what is not set is left out."""
    if isinstance(value, Mapping):
        return {path: item for name, part in value.items() for path, item in _flat(f"{key}.{name}", part).items()}
    return {} if value is None else {key: value}
