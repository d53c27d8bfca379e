"""Messages that wait on a disk: written before they are sent, deleted once they have arrived.

A box is a folder with `spool` (a folder for each message; its name starts with a dot while somebody sends it),
`refused`, and `sent`, a list of what has arrived. Each run has up to three: in the run folder; beside its addresses in
the home folder, if the run folder is away; and on the node's own disk, if both are.
"""

import os
import re
import stat
import time
from pathlib import Path
from typing import Callable, List, Optional, Tuple

from slurmddp.records.alert import Message, read_message
from slurmddp.supervisor.post import ARRIVED, REFUSED, Sent

#: The name of the box beside a run's addresses.
BESIDE_ADDRESSES = ".alerts"
HEAD, BODY = "head", "body"
#: Bytes of a message; the largest that a target accepts has some kB.
LARGEST = 2**20
#: For this long, a message is left alone whose sender has not said how long it needs.
_STALE_SECONDS = 600.0
_NAME = re.compile(r"\.[0-9]{1,9}\.[A-Za-z0-9][A-Za-z0-9._+-]*\.[A-Za-z0-9][A-Za-z0-9._+-]*")


class Disk:
    """A folder of this user, and what boxes do below it. All methods raise OSError."""

    def folders(self, path: Path) -> List[Tuple[float, str]]:
        """Return the folders in a folder, each with the time of its last change."""
        entries = [(os.lstat(str(path / name)), name) for name in os.listdir(str(path))]
        return [(facts.st_mtime, name) for facts, name in entries if stat.S_ISDIR(facts.st_mode)]

    def read(self, path: Path, limit: int) -> bytes:
        """Return at most the first `limit` bytes of a file."""
        with open(str(path), "rb") as file:
            return file.read(limit)

    def write(self, path: Path, data: bytes) -> None:
        """Write a file such that nobody sees half of it."""
        part = path.with_name(f"{path.name}.part")
        descriptor = os.open(str(part), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as file:
            file.write(data)
        os.rename(str(part), str(path))

    def append(self, path: Path, text: str) -> None:
        descriptor = os.open(str(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        with open(descriptor, "ab") as file:
            file.write(text.encode("utf-8"))

    def make(self, path: Path) -> None:
        """Make a folder. Raises FileExistsError, too."""
        os.mkdir(str(path), 0o700)

    def move(self, path: Path, target: Path) -> None:
        os.rename(str(path), str(target))

    def remove(self, path: Path) -> None:
        """Remove a message: the files that we write. What else lies there stays, with its folder."""
        for name in os.listdir(str(path)):
            if is_part_of_message(name):
                os.unlink(str(path / name))
        os.rmdir(str(path))


def is_part_of_message(name: str) -> bool:
    """Return whether a file of this name is ours."""
    return name in (HEAD, BODY) or name.startswith((f"{HEAD}.part", f"{BODY}.part"))


class Box:
    """One box. run_id: only messages whose names begin with it are touched."""

    def __init__(self, path: Path, run_id: str, disk: Optional[Disk] = None) -> None:
        self.path = path
        self.run_id = run_id
        self.spool = path / "spool"
        self._disk = disk or Disk()

    def knows(self, message: Message) -> bool:
        """Return whether a message has arrived already, or waits here. Raises OSError."""
        if f"{message.key} {message.target}" in self._lines(self.path / "sent"):
            return True
        try:
            names = {name for _, name in self._disk.folders(self.spool)}
        except FileNotFoundError:
            return False
        return bool(names & {message.name, f".{message.name}"})

    def store(self, message: Message) -> None:
        """Write a message down, as one that is being sent. Raises OSError; FileExistsError if another process does."""
        for folder in (self.path, self.spool):
            self._make(folder)
        entry = self.spool / f".{message.name}"
        self._disk.make(entry)
        try:
            self._disk.write(entry / BODY, message.body)  # the head last: if there is one, the message is whole
            self._disk.write(entry / HEAD, message.head().encode("utf-8"))
        except OSError:
            self._disk.remove(entry)
            raise

    def finish(self, message: Message, outcome: str) -> Optional[Path]:
        """Put away a message that was tried; return where it lies now, if it does. Raises OSError."""
        entry = self.spool / f".{message.name}"
        if outcome == ARRIVED:
            self._disk.append(self.path / "sent", f"{message.key} {message.target}\n")
            self._disk.remove(entry)
            return None
        kept = self.path / ("refused" if outcome == REFUSED else "spool")
        self._make(kept)
        self._disk.move(entry, kept / message.name)
        return kept / message.name

    def deliver(self, send: Callable[[Message, float], Optional[Sent]], seconds: float) -> "List[Tuple[Message, Sent]]":
        """Send what waits, the oldest first, in this time. Raises OSError.

        send: sends a message in so many seconds; None if it must wait for somebody else.
        """
        end = time.monotonic() + seconds
        done = []
        for name in self._waiting():
            left = end - time.monotonic()
            message = self._claim(name, left) if left > 0 else None
            if message is None:
                continue
            known = f"{message.key} {message.target}" in self._lines(self.path / "sent")
            sent = Sent(ARRIVED) if known else send(message, left)
            self.finish(message, sent.outcome if sent else "")
            if sent:
                done.append((message, sent))
        return done

    def hand_over(self, other: "Box") -> None:
        """Move what waits here to another box. Raises OSError."""
        for name in self._waiting():
            message = self._claim(name, 0)
            if message is None:
                continue
            if not other.knows(message):
                other.store(message)
                other.finish(message, "")
            self._disk.remove(self.spool / f".{message.name}")

    def count(self) -> int:
        """Return how many messages wait. Raises OSError."""
        return len(self._waiting())

    def _waiting(self) -> List[str]:
        """The messages that may be taken, the oldest first."""
        try:
            folders = self._disk.folders(self.spool)
        except FileNotFoundError:
            return []
        ours = sorted((changed, name) for changed, name in folders if self._is_ours(name))
        return [name for changed, name in ours if not name.startswith(".") or self._is_abandoned(name, changed)]

    def _is_ours(self, name: str) -> bool:
        plain = name[1:] if name.startswith(".") else name
        return plain.startswith(self.run_id) and _NAME.fullmatch(plain[len(self.run_id) :]) is not None

    def _is_abandoned(self, name: str, changed: float) -> bool:
        """Return whether the time is over that its sender had given itself."""
        message = self._read(name)
        return time.time() > (message.until if message and message.until else changed + _STALE_SECONDS)

    def _claim(self, name: str, seconds: float) -> Optional[Message]:
        """Take a message by renaming it; None if another process was faster or it is none of ours."""
        plain = name[1:] if name.startswith(".") else name
        try:
            if name != plain:
                self._disk.move(self.spool / name, self.spool / plain)
            message = self._read(plain)
            if message is None or message.name != plain:
                if message is None and name != plain and not self._lines(self.spool / plain / HEAD):
                    self._disk.remove(self.spool / plain)  # its sender was killed before it had written it down
                return None
            message = message._replace(until=int(time.time() + seconds + 15))
            self._disk.write(self.spool / plain / HEAD, message.head().encode("utf-8"))
            self._disk.move(self.spool / plain, self.spool / f".{plain}")
        except OSError:
            return None  # another process has it
        return message

    def _read(self, name: str) -> Optional[Message]:
        try:
            head = self._disk.read(self.spool / name / HEAD, LARGEST)
            return read_message(head.decode("utf-8", "replace"), self._disk.read(self.spool / name / BODY, LARGEST))
        except FileNotFoundError:
            return None

    def _make(self, path: Path) -> None:
        try:
            self._disk.make(path)
        except FileExistsError:
            pass  # as it should be

    def _lines(self, path: Path) -> List[str]:
        try:
            return self._disk.read(path, 2**20).decode("utf-8", "replace").split("\n")
        except FileNotFoundError:
            return []
