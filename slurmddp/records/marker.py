"""The marker of an attempt, RUN/markers/attempt-NNN.json: that the attempt is over, and how it ended."""

import json
import time
from typing import Any, Dict, Mapping, NamedTuple, Optional

from slurmddp.records.json_lines import finite
from slurmddp.records.text import first_line
from slurmddp.records.values import whole

VERSION = 1
DONE, STOPPED, FAILED, NO_PROGRESS = "done", "stopped", "failed", "no progress"


class Signal(NamedTuple):
    """A signal, and the rank that got it. name: SIGTERM and so on."""

    name: str
    rank: Optional[int]
    node: str


class Marker(NamedTuple):
    """What a marker says. state: one of those above; empty if it cannot be read."""

    state: str = ""
    reason: str = ""
    cause: str = ""
    signal: Optional[Signal] = None  # for which the ranks stopped; None: for something else
    step: Optional[int] = None  # step, steps: as in Progress
    steps: Optional[int] = None
    validation: Optional[Mapping[str, Any]] = None  # the last evaluation of a bundled task, as in the event `finished`
    rank: Optional[int] = None  # rank, node: of the cause, if it names one
    node: str = ""

    @property
    def terminated(self) -> bool:
        """Return whether the ranks stopped since one of them got a SIGTERM."""
        return self.signal is not None and self.signal.name == "SIGTERM"

    def write(self) -> Dict[str, Any]:
        signal = None if self.signal is None else dict(self.signal._asdict())
        return dict(self._asdict(), schema=VERSION, signal=signal)

    def text(self, attempt: int) -> str:
        """Return the text of the file: a line per key."""
        record = dict(self.write(), attempt=attempt, time=round(time.time(), 3))
        return json.dumps(finite(record), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def read(record: Any) -> Marker:
    """Return what a marker's object says. What is not sound is left out; of a text, the first line is kept."""
    if not isinstance(record, dict):
        return Marker()
    texts = [record.get(key) for key in ("state", "reason", "cause", "node")]
    state, reason, cause, node = (first_line(text) if isinstance(text, str) else "" for text in texts)
    validation = record.get("validation")
    step, steps, rank = (whole(record.get(key)) for key in ("step", "steps", "rank"))
    known = validation if isinstance(validation, dict) else None
    return Marker(state, reason, cause, _signal(record.get("signal")), step, steps, known, rank, node)


def parse(text: str) -> Marker:
    """Return what the text of a marker says."""
    try:
        return read(json.loads(text))
    except (ValueError, RecursionError):
        return Marker()


def _signal(fields: Any) -> Optional[Signal]:
    if not isinstance(fields, dict) or not all(isinstance(fields.get(key), str) for key in ("name", "node")):
        return None
    return Signal(fields["name"], whole(fields.get("rank")), fields["node"])
