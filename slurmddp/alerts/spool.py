"""What the nodes could not send waits in the run's boxes; whoever uses the login node next sends it."""

import errno
import os
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from slurmddp.alerts import secrets
from slurmddp.errors import UserError
from slurmddp.records.address import secret_parts
from slurmddp.records.alert import Message
from slurmddp.records.job_events import Alert
from slurmddp.run.gate import Held, OwnRun, hold, own_or_none
from slurmddp.run.layout import RunFolder
from slurmddp.supervisor import post
from slurmddp.supervisor.post import Sent
from slurmddp.supervisor.spool import BESIDE_ADDRESSES, Box, Disk, is_part_of_message


class Delivered(NamedTuple):
    """Messages that have gone out now, and those that still wait; why: what the last failure was, "" without one."""

    sent: int = 0
    left: int = 0
    why: str = ""


class _HeldDisk(Disk):
    """A folder that other users may have filled: nothing is followed, and nothing changed, that is not this user's."""

    def __init__(self, held: Held) -> None:
        self._held = held

    def folders(self, path: Path) -> list[tuple[float, str]]:
        with self._held.inside(path, listed=True) as folder:
            entries = [(os.stat(name, dir_fd=folder, follow_symlinks=False), name) for name in os.listdir(folder)]
        return [(facts.st_mtime, name) for facts, name in entries if stat.S_ISDIR(facts.st_mode)]

    def read(self, path: Path, limit: int) -> bytes:
        return self._held.read(path, limit)

    def write(self, path: Path, data: bytes) -> None:
        self._held.write(path, data.decode("utf-8", errors="surrogateescape"))

    def append(self, path: Path, text: str) -> None:
        self._held.append_text(path, text)

    def make(self, path: Path) -> None:
        self._held.make(path)

    def move(self, path: Path, target: Path) -> None:
        self._held.move(path, target)

    def remove(self, path: Path) -> None:
        with self._held.inside(path, listed=True) as folder:
            for name in os.listdir(folder):
                if is_part_of_message(name):
                    os.unlink(name, dir_fd=folder)
        with self._held.inside(path.parent) as parent:
            try:
                os.rmdir(path.name, dir_fd=parent)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise


def deliver_all(folders: Iterable[RunFolder], *, seconds: float = 2.0) -> Delivered:
    """Send what waits of these runs, taking `seconds` at most (and a second for what hangs in spite of that).

    Only the run's owner sends. Never raises: what does not go out now waits for the next time.
    """
    end = time.monotonic() + seconds
    sent, left, reason = 0, 0, ""
    for folder in folders:
        for box, run in _boxes(folder):
            try:
                done = box.deliver(lambda message, left: _post(folder.id, message, left), end - time.monotonic())  # noqa: B023
                waiting = box.count()
                for message, result in done:
                    if result.outcome == post.ARRIVED and run is not None:
                        run.record(Alert(message.kind, message.target, delivered=True, spooled=False))
            except (OSError, ValueError) as error:
                reason = str(error)
                continue
            failed = [f"{message.target}: {result.why}" for message, result in done if result.outcome != post.ARRIVED]
            refused = sum(result.outcome == post.REFUSED for _, result in done)
            sent, left = sent + len(done) - len(failed), left + waiting + refused
            reason = failed[-1] if failed else reason
    return Delivered(sent, left, reason)


def _boxes(folder: RunFolder) -> Iterator[tuple[Box, OwnRun | None]]:
    """Yield the boxes of a run where something waits, with the run if its folder is there.

    A node writes to the one beside the addresses where the run folder is away.
    """
    if os.path.lexists(folder.alert_spool) and (run := own_or_none(folder)) is not None:
        yield Box(run.path / "alerts", run.id, _HeldDisk(run.held)), run
    beside = secrets.of_run(folder.id, os.environ)
    if os.path.lexists(beside / BESIDE_ADDRESSES):
        try:
            held = hold(beside, "the folder of the addresses", todo="")
        except UserError:
            return
        yield Box(beside / BESIDE_ADDRESSES, folder.id, _HeldDisk(held)), None


def _post(run_id: str, message: Message, seconds: float) -> Sent:
    url = secrets.address(run_id, message.target, os.environ)
    if url is None:
        return Sent(post.WAITS, why=f"the address is not in {secrets.of_run(run_id, os.environ) / message.target}")
    return post.once(message, url, seconds, secrets=secret_parts([url]))
