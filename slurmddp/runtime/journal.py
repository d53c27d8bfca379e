"""What ranks and agents append to events.jsonl and metrics.jsonl: a line that cannot be written never ends a run."""

import contextlib
import copy
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slurmddp.records.events import NAMES, Event, Facts, parse
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
        self._attempt, self._node, self._rank = attempt, node, rank
        self._since = round(time.time(), 3)

    def write(self, facts: Facts) -> None:
        """Append one event with time, attempt, node and, if known, rank. Raises nothing, see Journal."""
        event = Event(facts, time.time(), self._attempt, node=self._node, rank=self._rank)
        self._lines.write(event.write())

    def of(self, rank: int, node: str) -> "Events":
        """Return the same file, for events about another rank than this one."""
        other = copy.copy(self)
        other._rank, other._node = rank, node
        return other

    def told(self, kind: type[Facts]) -> bool:
        """Return whether any rank of this attempt has written such an event since this one began."""
        told = (event for event in read_events(self._lines.path, kind) if event.attempt == self._attempt)
        return any(event.time is not None and event.time >= self._since for event in told)


def read_events(path: Path, *kinds: type[Facts]) -> Iterator[Event]:
    """Yield the events of these types. A line that is no event is left out, and a file that cannot be read is empty."""
    words = [f'"{NAMES[kind]}"'.encode() for kind in kinds]  # most lines are of none: parsing them all takes long
    with contextlib.suppress(OSError), path.open("rb") as file:
        for line in file:
            if any(word in line for word in words) and (event := parse(line)) and isinstance(event.facts, kinds):
                yield event
