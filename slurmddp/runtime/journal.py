"""What ranks and agents append to events.jsonl and metrics.jsonl: a line that cannot be written never ends a run."""

import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmddp.runtime.watch.process_exit import say
from slurmddp.shared.journal import JsonLines


class Journal:
    """JsonLines that never end a run: where a line cannot be written, stderr says so, once until writing works again.

    The next line that can be written has `lines_lost`, how many are missing before it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: JsonLines | None = None
        self._lost = 0

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one object, as JsonLines does."""
        try:
            if self._lines is None:
                self._lines = JsonLines(self.path)
            self._lines.write({**record, "lines_lost": self._lost} if self._lost else record)
            self._lost = 0
        except OSError as error:
            if not self._lost:
                say(f"warning: {self.path.name} cannot be written ({error.strerror or error}): training continues\n")
            self._lost += 1


class Events:
    """events.jsonl as one rank of one attempt writes it, or a node's torchrun agent (rank None)."""

    def __init__(self, path: Path, *, attempt: int, node: str, rank: int | None) -> None:
        self._lines = Journal(path)
        self._who = {"attempt": attempt, "node": node} | ({} if rank is None else {"rank": rank})
        self._since = round(time.time(), 3)

    def write(self, event: str, **facts: Any) -> None:
        """Append one event with time (unix seconds), attempt, node and, if known, rank. Raises nothing, see Journal."""
        self._lines.write({"time": round(time.time(), 3), "event": event, **self._who, **facts})

    def told(self, event: str) -> bool:
        """Return whether any rank of this attempt has written such an event since this one began."""
        try:
            text = self._lines.path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        for line in text.splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):  # Another's line may be cut.
                found = json.loads(line)
                if (found["event"], found["attempt"]) == (event, self._who["attempt"]) and found["time"] >= self._since:
                    return True
        return False
