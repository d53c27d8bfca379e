"""events.jsonl and metrics.jsonl: JSON lines that the job's processes append and everybody reads."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmddp.runtime.journal import JsonLines


@dataclass(frozen=True)
class Lines:
    """Records of a JSON lines file, in the file's order.

    damaged: how many lines were no JSON object. A last line without its newline is being written, or was cut
    by the end of its writer: it is left out and not counted.
    """

    records: tuple[dict[str, Any], ...]
    damaged: int = 0


def read_lines(path: Path) -> Lines:
    """Read a JSON lines file; an absent one is empty. Raises OSError if it cannot be read."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return Lines(())
    records: list[dict[str, Any]] = []
    damaged = 0
    *whole, _torn = raw.split(b"\n")
    for line in whole:
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:  # UnicodeDecodeError and JSONDecodeError; counted, and the reader says so
            damaged += 1
            continue
        if isinstance(record, dict):
            records.append(record)
        else:
            damaged += 1
    return Lines(tuple(records), damaged)


def append_event(path: Path, event: str, **fields: Any) -> None:
    """Append one event with its time (unix seconds, as the runtime writes them). Raises OSError."""
    append_line(path, {"time": round(time.time(), 3), "event": event, **fields})


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON object, as the runtime does: see JsonLines. Raises OSError."""
    with JsonLines(path) as lines:
        lines.write(record)
