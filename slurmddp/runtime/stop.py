"""The stop file: how whoever runs the job asks the ranks to save and end."""

import time
from pathlib import Path


class StopFile:
    """Looks for a file at most once in `interval` seconds; once seen, it stays seen.

    One rank a node looks, and the answer travels in the reduction of the losses: a shared file system with
    attribute caching shows the file at different moments on different nodes, and ranks that stopped at
    different steps would wait for each other for ever.
    """

    def __init__(self, path: Path | None, *, interval: float = 1.0) -> None:
        self._path = path
        self._interval = interval
        self._next = 0.0
        self._seen = False

    def seen(self) -> bool:
        """Whether the file is there (or was)."""
        now = time.monotonic()
        if self._path is not None and not self._seen and now >= self._next:
            self._next = now + self._interval
            self._seen = self._path.exists()
        return self._seen

    def reason(self) -> str:
        """The file's first line, where it can be read and has one; else that it appeared."""
        try:
            text = self._path.read_text(encoding="utf-8", errors="replace") if self._path else ""
        except OSError:
            # Another node may have seen a file that this one's cache does not show yet: the reason is a
            # comment only.
            text = ""
        lines = text.strip().splitlines()
        return lines[0][:500] if lines else "stop file"
