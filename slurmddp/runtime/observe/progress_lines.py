"""What rank 0 of a script of the user's own tells about its steps: metrics.jsonl, the first step, the progress file."""

import time
from collections.abc import Callable

from slurmddp.records.metrics import Metrics
from slurmddp.records.progress import read_progress
from slurmddp.records.rank_events import FirstStep
from slurmddp.runtime import environment
from slurmddp.runtime.journal import Events, Journal
from slurmddp.runtime.watch.failures import ProgressFile
from slurmddp.shared.files import text_or_empty
from slurmddp.shared.run_folder import RunFolder


class ProgressLines:
    """Writes a line whenever there are new steps. A step that the script tells itself counts more than what is seen."""

    def __init__(
        self, folder: RunFolder, attempt: int, events: Events, seconds: Callable[[], dict[str, float]]
    ) -> None:
        """Write for rank 0. seconds: what the time since its last call went into, by part."""
        self._attempt, self._events, self._seconds = attempt, events, seconds
        self._metrics = Journal(folder.metrics)
        self._path = folder.progress
        self._progress: ProgressFile | None = ProgressFile(folder.progress, every=0.0)
        self._text = text_or_empty(folder.progress)
        self._seen = 0
        self._told: int | None = None
        self._at = time.monotonic()
        self._start = time.time()
        self._total: dict[str, float] = {}

    def first(self, done: int) -> None:
        """Tell once that training has begun. done: steps so far."""
        if done and not self._seen:
            self._events.write(FirstStep(done, round(environment.seconds_since_start(), 3)))
            self._seen, self._at, self._start = done, time.monotonic(), time.time()
            self._seconds()  # from here on
            self._write(done, {})

    def report(self, done: int) -> None:
        """Write a line, if there are new steps. done: steps so far."""
        self.first(done)
        if done <= self._seen:
            return
        now = time.monotonic()
        speed = (done - self._seen) / max(now - self._at, 1e-9)
        self._seen, self._at = done, now
        for part, seconds in self._seconds().items():
            self._total[part] = self._total.get(part, 0.0) + seconds
        figures = {"steps_per_second": round(speed, 4)}
        self._write(done, figures)

    def _write(self, done: int, figures: dict[str, float]) -> None:
        told = Metrics(self._tell(done), time.time(), self._attempt, self._start, self._total, figures)
        self._metrics.write(told.write())

    def _tell(self, done: int) -> int:
        """Keep the progress file up to date, unless the script does: then its step is returned."""
        text = text_or_empty(self._path)
        if text != self._text:
            self._text, self._progress = text, None
            told = read_progress(text)
            self._told = told.step if told else self._told
        if self._progress is None:
            return done if self._told is None else self._told
        self._progress.tell(done)
        self._text = text_or_empty(self._path)
        return done
