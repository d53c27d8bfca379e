"""`slurmddp sync`: send the lines of metrics.jsonl, and the evaluations, that a tracker does not have yet."""

import contextlib
import fcntl
import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from slurmddp.errors import ExternalError, SlurmddpError, UserError
from slurmddp.job.document import read_file, typed
from slurmddp.records.events import Event, of
from slurmddp.records.metrics import Metrics, read
from slurmddp.records.rank_events import Evaluated
from slurmddp.records.values import number
from slurmddp.run import manifest
from slurmddp.run.events import read_events
from slurmddp.run.gate import OwnRun
from slurmddp.run.metrics import behind
from slurmddp.run.state import RunState
from slurmddp.shared.files import read_json
from slurmddp.trackers.base import Facts, Point, Tracker

#: Class of each tracker in the module of its name.
TRACKERS = {"wandb": "Wandb", "mlflow": "MLflow", "tensorboard": "TensorBoard"}
#: Parts of job.yaml that a tracker gets. The others have accounts, addresses and variables.
_TOLD = ("train", "parallel", "checkpoint")


@dataclass(frozen=True)
class Sent:
    """How far a run was sent: bytes and lines of metrics.jsonl, its last step, evaluations, and the tracker's run."""

    offset: int = 0
    lines: int = 0
    step: int = 0
    evaluations: int = 0
    key: str | None = None  # of that run
    where: str | None = None
    state: str | None = None  # how slurmddp's run ended, if the tracker was told
    newest: Mapping[str, Any] | None = None  # the last line with `seconds`


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
        todo = "copy the run folder, then sync the copy"
        raise UserError(f"cannot be written: {error.strerror}", where=str(place), todo=todo) from None
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
        todo = "wait for it, or stop it first"
        raise UserError(f"another sync of run {folder.id} to {to} is running", todo=todo) from None
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
        # First the evaluations, then the lines: when an evaluation is there, so are all lines from before it. Then the
        # points have the same order and numbers in a sync that repeats one that was killed.
        events = of(read_events(self._folder.events, self._folder.path).records, Evaluated)
        evaluations = deque(list(events)[self.sent.evaluations :])
        for rows, offset in behind(self._folder.metrics, self.sent.offset):
            points, sent = _points(rows, evaluations, self.sent)
            self._send_points(points, replace(sent, offset=offset))
        self._send_points(*_evaluated(evaluations, math.inf, self.sent))

    def _send_points(self, points: Sequence[Point], sent: Sent) -> None:
        """Send points. sent: how far the run is sent with them."""
        if points:
            tracker = self._opened()
            with _failures(self._to):
                tracker.send(points)
        self.sent = replace(sent, key=self.sent.key, where=self.sent.where)
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
            module = import_module(f"slurmddp.trackers.{self._to}")
            with _failures(self._to):
                facts = _facts(self._folder, self._place)
                tracker: Tracker = getattr(module, TRACKERS[self._to])(facts, self.sent.key)
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


def _points(
    rows: Sequence[Metrics], evaluations: deque[tuple[Event, Evaluated]], sent: Sent
) -> tuple[list[Point], Sent]:
    """Return the lines that have a time, each behind the evaluations before it, and how far the run is sent then."""
    points: list[Point] = []
    newest = read(sent.newest or {})
    for row in rows:
        if row.time is not None:
            before, sent = _evaluated(evaluations, row.time, sent)
            number = sent.lines + sent.evaluations + 1
            points += [*before, Point(number, row.time, row.step, _values(row, newest), row.step <= sent.step)]
            sent = replace(sent, step=row.step)
        sent = replace(sent, lines=sent.lines + 1)
        newest = row if row.seconds else newest
    return points, replace(sent, newest=newest.write() if newest else None)


def _evaluated(evaluations: deque[tuple[Event, Evaluated]], until: float, sent: Sent) -> tuple[list[Point], Sent]:
    """Take the evaluations up to a time. Return those that can be shown, and how far the run is sent with them."""
    points: list[Point] = []
    while evaluations and (evaluations[0][0].time or 0.0) <= until:
        event, facts = evaluations.popleft()
        sent = replace(sent, evaluations=sent.evaluations + 1)
        if event.time is not None and facts.step is not None:
            values = {
                f"validation/{name}": number(value) for name, value in (("loss", facts.loss), *facts.figures.items())
            }
            sound = {name: value for name, value in values.items() if value is not None}
            points.append(Point(sent.lines + sent.evaluations, event.time, facts.step, sound))
    return points, sent


def _values(row: Metrics, before: Metrics | None) -> dict[str, float]:
    parts = {f"seconds/{part}": seconds for part, seconds in row.since(before).items()}
    values = {name: number(value) for name, value in {"attempt": row.attempt, **row.figures, **parts}.items()}
    return {name: value for name, value in values.items() if value is not None}


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
