"""What the supervisor reads and writes in the run folder. Only the child process of `folder` calls these methods.

Their arguments and answers travel as JSON.
"""

import os
import re
import select
import signal
import subprocess
import sys
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

from slurmddp.records import events, json_lines, saves, signed
from slurmddp.records import marker as markers
from slurmddp.records import stop as stops
from slurmddp.records.job_events import AttemptEnded, JobEnded, JobStarted, Requeued
from slurmddp.records.progress import read_failures, read_progress
from slurmddp.records.rehearsal import VERDICT, read_verdict
from slurmddp.supervisor import lease as leases
from slurmddp.supervisor.logs import Logs

#: torchrun's folder of a start: attempt_0, attempt_1, ...
_START = re.compile(r"attempt_(\d+)$")
_ATTEMPT = re.compile(r"attempt-(\d{3,9})$")
#: Bytes of a file that is read whole.
_MOST = 2**20
#: Bytes of events.jsonl that one look reads.
_PART = 2**23
#: Seconds after which the run folder is looked for again.
_STAYS = 10.0
Lines = Tuple[int, List[str]]


def keep_others_from_writing() -> None:
    """In what this process and its children make."""
    os.umask(os.umask(0) | 0o022)


class Foreign(Exception):
    """The run folder belongs to somebody else."""


def apart(question: Callable[[], bool], seconds: float) -> bool:
    """Return the answer of a process of its own, which may meet a mount that hangs. Raises OSError without one."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer = b"?"
        try:
            answer = b"y" if question() else b"n"
        finally:
            os.write(writer, answer)
            os._exit(0)
    os.close(writer)
    arrived, _, _ = select.select([reader], [], [], seconds)
    answer = os.read(reader, 1) if arrived else b""
    os.close(reader)
    os.kill(pid, signal.SIGKILL)
    if answer:
        os.waitpid(pid, 0)  # else it may hang for as long as the mount does
    if answer not in (b"y", b"n"):
        raise OSError("no answer")
    return answer == b"y"


class Files(Logs):
    """A run folder. Paths in it begin at the folder that `enter` has opened, if it was called."""

    def __init__(self, run: str, lease: Optional[leases.Lease] = None) -> None:
        """lease: the one that this process's parent has taken. held: nothing is read or written, since this node is cut
        off, and another one may take over.
        """
        super().__init__(run)
        self._entered = float("-inf")
        self.lease, self.held = lease, False

    def enter(self) -> None:
        """Make the run folder this process's own, if it is this user's: nothing in a folder that another user puts in
        its place is read, written or run. It is looked for again from time to time.
        """
        if time.monotonic() - self._entered < _STAYS:
            return
        descriptor = os.open(self._run, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if os.fstat(descriptor).st_uid != os.geteuid():
                raise Foreign("{} belongs to another user: nothing in it is run".format(self._run))
            os.fchdir(descriptor)
        finally:
            os.close(descriptor)
        self._at, self._entered = ".", time.monotonic()

    def look_again(self) -> None:
        """Have the next `enter` look for the folder: something has failed in the one that it has."""
        self._entered = float("-inf")

    def read(self, *names: str) -> Optional[str]:
        """Return a file's text; None where there is none. Raises OSError."""
        try:
            with open(self.path(*names), "rb") as file:
                return file.read(_MOST).decode("utf-8", "replace")
        except FileNotFoundError:
            return None

    def key(self) -> str:
        """Return the run's key, in hexadecimal digits. Raises UnsafeKeyError."""
        return signed.load(self.path("rendezvous.key")).secret.hex()

    def rehearsed(self) -> Optional[bool]:
        """Return whether a killed rehearsal of this program resumed; None: there was none, or that is not known."""
        return read_verdict(self.read(VERDICT) or "").resumes

    # --- who leads (standby.py)

    def leader(self) -> Optional[leases.Lease]:
        """Return the newest lease; None if there is none."""
        return leases.newest(self.path(leases.FOLDER))

    def begin_lease(self, holder: str) -> Optional[leases.Lease]:
        """Lead from now on, at the start of a job."""
        self.lease = leases.begin(self.path(leases.FOLDER), holder)
        return self.lease

    def take_lease(self, seen: List[Any], holder: str) -> Optional[leases.Lease]:
        """Take over from the leader that was seen; None: it has renewed its lease, or another one was quicker."""
        self.lease = leases.take(self.path(leases.FOLDER), leases.Lease(*seen), holder)
        return self.lease

    def leads(self) -> bool:
        """Renew the lease, if there is one. Return False if another process leads. Raises OSError."""
        if self.lease is None:
            return True
        if self.held:
            seen = self.leader()
            if seen is not None and seen.generation > self.lease.generation:
                return False
            raise OSError("this node is cut off")
        renewed = leases.renew(self.path(leases.FOLDER), self.lease)
        self.lease = renewed or self.lease
        return renewed is not None

    def speak_into_log(self) -> None:
        """Have `say` write where job.sh did."""
        with open(self.path("logs", "job.log"), "ab") as log:
            os.dup2(log.fileno(), 1)

    # --- before the first attempt

    def forget_stop(self) -> None:
        """Remove the stop file of an earlier job, by a rename: one that `slurmddp cancel` writes now stays."""
        stop, taken = self.path("stop"), self.path(".stop")
        try:
            os.rename(stop, taken)
        except FileNotFoundError:
            return
        if stops.read(self.read(".stop") or "").reason == stops.CANCELLED:
            try:
                os.link(taken, stop)
            except FileExistsError:
                pass
        os.unlink(taken)

    def is_shared(self) -> bool:
        """Return whether others may read the run folder. They must still not write there: keep them from it here."""
        shared = bool(os.stat(self.path()).st_mode & 0o077)
        if shared:
            keep_others_from_writing()
        return shared

    def begin(self, attempt: int) -> Dict[str, Any]:
        """Note when this job began. Return what earlier ones have left. attempt: the first one of this job.

        length: of events.jsonl. names: of its events job_started and requeued. step: of the run. unended: of each start
        right before this one whose end nobody could record, the step that it reached.
        """
        with open(self.path("job_began"), "w"):
            pass
        names: List[str] = []
        begun: List[int] = []  # the steps at which those starts began
        ended, length, begin = -1, -1, 0
        while begin != length:
            length, (begin, lines) = begin, self.new_lines(begin)
            for event in filter(None, (events.parse(line.encode("utf-8", "replace")) for line in lines)):
                if isinstance(event.facts, (JobStarted, Requeued)):
                    names.append(event.name)
                if isinstance(event.facts, JobStarted):
                    begun.append(event.facts.step or 0)
                elif isinstance(event.facts, (AttemptEnded, Requeued, JobEnded)):
                    ended = max(ended, -1 if event.attempt is None else event.attempt)
                    begun = begun if isinstance(event.facts, AttemptEnded) else []
        progress = read_progress(self.read("progress") or "")
        step = 0 if progress is None else progress.step
        reached = [*begun, step][1:]
        # Where not even job_started could be written, attempts still have folders.
        reached = [step] * (attempt - ended - 1 - len(reached)) + reached
        return {"length": length, "names": names, "step": step, "unended": reached}

    def open_attempt(self, attempt: int) -> List[Any]:
        """Make the folders of the first attempt from this number on that has none. Return its number and logs."""
        while True:
            logs = self.path("logs", "attempt-{:03d}".format(attempt))
            try:
                os.mkdir(logs)
                break
            except FileExistsError:
                attempt += 1
        for name in ("flight_recorder", "preflight", "sweep"):
            os.makedirs(os.path.join(logs, name), exist_ok=True)
        try:
            size = os.stat(self.path("logs", "job.log")).st_size
            with open(os.path.join(logs, "job_log_begin"), "w") as file:
                file.write("{}\n".format(size))  # doctor reads what this attempt adds to it
        except OSError:
            pass
        return [attempt, os.path.join(self._run, "logs", os.path.basename(logs))]

    def newest_attempt(self) -> int:
        """Return the number of the newest attempt that has a folder; 0 if there is none."""
        matches = [_ATTEMPT.search(path) for path in self.listed(os.path.join(self._run, "logs"), "attempt-*")]
        return max((int(number.group(1)) for number in matches if number), default=0)

    # --- writing

    def say(self, line: str) -> None:
        sys.stdout.buffer.write(line.encode("utf-8", "surrogateescape") + b"\n")  # whatever the locale is
        sys.stdout.buffer.flush()

    def append(self, name: str, line: str) -> None:
        json_lines.append(self.path(name), line.encode("utf-8", "surrogateescape") + b"\n")

    def write(self, name: str, text: str) -> None:
        """Write a file, whole or not at all."""
        path = self.path(name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        part = "{}.{}.part".format(path, os.getpid())
        with open(part, "wb") as file:
            file.write(text.encode("utf-8", "surrogateescape"))
        os.rename(part, path)

    def write_marker(self, attempt: int, marker: Dict[str, Any]) -> None:
        """Write the marker of an attempt that is over, so that ranks that start late do not train."""
        self.write("markers/attempt-{:03d}.json".format(attempt), markers.read(marker).text(attempt))

    def remove(self, name: str) -> None:
        try:
            os.unlink(self.path(name))
        except FileNotFoundError:
            pass

    def ask_to_stop(self, reason: str, signal: bool) -> bool:
        """Make the stop file, whole or not at all. The first reason stays: return whether this is it."""
        part = self.path(".stop.{}".format(os.getpid()))
        with open(part, "w") as file:
            file.write(stops.StopRequest(reason, signal).text())
        try:
            os.link(part, self.path("stop"))
        except FileExistsError:
            return False
        finally:
            os.unlink(part)
        return True

    # --- looking

    def stop(self) -> Optional[str]:
        """Return the reason in the stop file; None if there is none."""
        text = self.read("stop")
        return None if text is None else stops.read(text).reason

    def marker(self, attempt: int) -> Optional[Dict[str, Any]]:
        """Return the object of an attempt's marker; None if there is none."""
        text = self.read("markers", "attempt-{:03d}.json".format(attempt))
        return None if text is None else markers.parse(text).write()

    def look(self, attempt: int, logs: str, begin: int, seldom: bool, beats: bool) -> Dict[str, Any]:
        """Return what has changed. begin: as for new_lines. seldom: with what does not hurry. beats: and with the
        heartbeat, which the guards on other nodes read.
        """
        changes: Dict[str, Any] = {"marker": self.marker(attempt), "stop": self.stop(), "events": self.new_lines(begin)}
        if seldom:
            if beats:
                self._beat()
            changes["unreached"] = self.unreached(logs)
            failures = read_failures(self.read("failures") or "")
            changes["failures"] = sum(failure.attempt == attempt for failure in failures)
            starts_made = self.listed(logs, "torchrun/*/*/attempt_*")
            numbers = [_START.search(path) for path in starts_made]
            changes["newest_start"] = max((int(number.group(1)) for number in numbers if number), default=None)
        return changes

    def _beat(self) -> None:
        try:
            with open(self.path("heartbeat"), "w") as file:
                file.write("{}\n".format(int(time.time())))
        except OSError:
            pass  # what cannot be written may still be read

    def ledger(self) -> List[str]:
        """Return the texts of the breaker's files: failures, progress, best."""
        return [self.read(name) or "" for name in ("failures", "progress", "best")]

    def saved(self, watch: List[str]) -> Optional[bool]:
        """Return whether something was saved since this job began; None where that is not known."""
        in_checkpoints = self._saved_in_checkpoints()
        if in_checkpoints or not watch:
            return in_checkpoints
        try:
            elsewhere = apart(lambda: saves.newest(watch, os.stat(self.path("job_began")).st_mtime) is not None, 5)
        except OSError:
            return None
        return elsewhere or in_checkpoints

    def _saved_in_checkpoints(self) -> Optional[bool]:
        """Any file newer than this job: nothing else is written there."""
        began, checkpoints = self.path("job_began"), self.path("checkpoints")
        if not os.path.exists(began):
            return None
        if not os.path.exists(checkpoints):
            return False
        words = ["timeout", "3", "find", checkpoints + "/", "!", "-type", "d", "-newer", began, "-print", "-quit"]
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
        return bool(done.stdout) if done.returncode == 0 else None

    def newest(self, names: List[str]) -> Optional[Dict[str, Any]]:
        """Return the newest event of one of these names; None if there is none."""
        for line in reversed(self.new_lines(0)[1]):
            event = events.parse(line.encode("utf-8", "replace"))
            if event is not None and event.name in names:
                return event.write()
        return None

    def heartbeat(self) -> Optional[List[float]]:
        """Return what tells whether the heartbeat was written again; None if there is none."""
        try:
            facts = os.stat(self.path("heartbeat"))
        except FileNotFoundError:
            return None
        return [facts.st_mtime, facts.st_size]

    def new_lines(self, begin: int) -> Lines:
        """Return whole lines that events.jsonl has from this byte on, some MiB at most, and where the next one will
        begin. A line that is longer is left out.
        """
        try:
            with open(self.path("events.jsonl"), "rb") as file:
                file.seek(begin)
                part = file.read(_PART)
        except FileNotFoundError:
            return begin, []
        whole, newline, _ = part.rpartition(b"\n")
        if not newline:
            return begin + (len(part) if len(part) == _PART else 0), []
        return begin + len(whole) + 1, whole.decode("utf-8", "replace").split("\n")
