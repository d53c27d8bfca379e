"""Composes an alert for each target of the run that wants it, writes it down, and sends it.

All of it may take long: the run folder or the home folder may hang, and a receiver may be slow. So this runs in a
process of its own (see `notify`). A folder that does not answer in time is left alone from then on.
"""

import os
import re
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Set, Tuple

from slurmddp.records import events, job_events, json_lines
from slurmddp.records.address import LONGEST, is_address, secret_parts
from slurmddp.records.alert import Alert, Message
from slurmddp.records.owners import replaced_by_others
from slurmddp.records.progress import read_progress
from slurmddp.supervisor import compose, post
from slurmddp.supervisor.compose import Composed
from slurmddp.supervisor.post import Sent
from slurmddp.supervisor.spool import BESIDE_ADDRESSES, Box
from slurmddp.supervisor.values import host, slurm_job

#: Bytes of a payload, and of the variables of environment_from.
_LARGEST = 2**20
#: The cause in an alert that cannot be searched for secrets.
_LEFT_OUT = "the cause is left out, and the log: the run's secrets, which they might hold, could not be read"


class Settings(NamedTuple):
    """Where a run's alerts come from, and where they wait."""

    run: str
    secrets: str  # the folder of its addresses, in the home folder
    disks: Tuple[str, ...]  # folders on the node's own disk; the first one that others cannot change is used
    job_id: str = ""
    host: str = ""
    logs: str = ""  # those of the attempt; empty: found by its number

    @property
    def run_id(self) -> str:
        """The name of the run folder."""
        return os.path.basename(self.run)


class Targets(NamedTuple):
    """By name of a target: its payload and its address; and what no message may hold."""

    payloads: Mapping[str, str] = {}
    addresses: Mapping[str, str] = {}
    secrets: Tuple[str, ...] = ()


_NONE = Targets()


class Outcome(NamedTuple):
    """What became of an alert at one target. spooled: it will be tried again; recorded: events.jsonl says so."""

    target: str
    kind: str
    attempt: Optional[int]
    sent: Sent
    spooled: bool
    recorded: bool

    def event(self) -> job_events.Alert:
        """Return the event that tells of it."""
        return job_events.Alert(self.kind, self.target, self.sent.outcome == post.ARRIVED, self.spooled)


def from_environment(run: str, environment: Mapping[str, str]) -> Settings:
    """Return the settings of a process of the job. run: the path of the run folder."""
    run = os.path.abspath(run)
    home = environment.get("XDG_CONFIG_HOME") or os.path.join(environment.get("HOME", ""), ".config")
    disks = dict.fromkeys((os.path.abspath(environment.get("TMPDIR") or "/tmp"), "/tmp"))
    return Settings(
        run=run,
        secrets=os.path.join(home, "slurmddp", "secrets", os.path.basename(run)),
        disks=tuple(os.path.join(disk, f"slurmddp-alerts-{os.geteuid()}") for disk in disks),
        job_id=environment.get("SLURMDDP_JOB_ID") or slurm_job(environment),
        host=host(environment),
        logs=environment.get("SLURMDDP_LOGS", ""),
    )


def complain(text: str) -> None:
    """Say something in the job's log."""
    try:
        os.write(2, f"slurmddp: alert: {text}\n".encode("utf-8", "replace"))
    except OSError:
        pass  # the log's own disk is full or away


class Sender:
    """Sends alerts of one run, and waits for them. known: the targets, as they were before a folder went away.

    stored: called with a target's name once a disk has its message. says: what people should read in the job's log.
    patience: seconds after which a folder counts as away.
    """

    def __init__(
        self,
        settings: Settings,
        known: Targets = _NONE,
        stored: "Callable[[str], None]" = lambda target: None,
        says: "Callable[[str], None]" = complain,
        patience: float = 2.5,
    ) -> None:
        self.settings, self.known = settings, known
        self._stored, self._says, self._patience = stored, says, patience
        self._away: Set[str] = set()
        self._read_secrets = bool(known.secrets)

    def read_targets(self) -> Targets:
        """Return the targets as they are now, or, as far as that is not known, as they were."""
        run, secrets = self.settings.run, self.settings.secrets
        try:
            self.known = self.known._replace(payloads=self._within(run, lambda: _payloads(Path(run, "payloads"))))
        except OSError:
            pass  # purged, or away
        try:
            addresses, values = self._within(secrets, lambda: _secrets(Path(secrets)))
            self.known = self.known._replace(addresses=addresses, secrets=(*secret_parts(addresses.values()), *values))
            self._read_secrets = True
        except FileNotFoundError:
            self._read_secrets = True  # a node without the home folder has no value of environment_from either
        except OSError:
            pass  # each message says that its address is missing
        return self.known

    def send(self, alert: Alert, seconds: float) -> List[Outcome]:
        """Send an alert to each target that wants it, in this time. Each by itself: none waits for a slow one."""
        end = time.monotonic() + seconds
        targets = self.read_targets()
        if targets.addresses and not targets.payloads:
            self._says(f"{self.settings.run}/payloads is missing: was the file system purged? No alert is sent")
        alert = self._with_facts(alert)
        messages = [compose.compose(name, text, alert) for name, text in sorted(targets.payloads.items())]
        outcomes: List[Outcome] = []
        sends = ((each, alert, end, outcomes) for each in messages if each)
        threads = [threading.Thread(target=self._one, args=words, daemon=True) for words in sends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(end + 3 - time.monotonic(), 0))
        return outcomes

    def send_waiting(self, seconds: float) -> List[Outcome]:
        """Send what earlier alerts of this run have left in its boxes, also those on this node's disk."""
        end = time.monotonic() + seconds
        targets = self.read_targets()
        ways = {name: compose.way(text) for name, text in targets.payloads.items()}

        def send(message: Message, left: float) -> Optional[Sent]:
            leave, proxy = ways.get(message.target, ("login", ""))
            url = targets.addresses.get(message.target)
            return None if leave == "login" or url is None else post.once(message, url, left, proxy, targets.secrets)

        (run, shared), *others = self._boxes()
        try:
            for _, box in others:
                self._within(run, lambda: box.hand_over(shared))  # noqa: B023
            done = self._within(run, lambda: shared.deliver(send, end - time.monotonic()), seconds + 1)
        except OSError:
            return []  # still away: they wait
        return [self._recorded(message, None, sent, sent.outcome == post.WAITS) for message, sent in done]

    def _with_facts(self, alert: Alert) -> Alert:
        settings = self.settings
        alert = alert._replace(run=settings.run_id, folder=settings.run, job_id=alert.job_id or settings.job_id)
        end, whole = b"", True
        try:
            alert, end, whole = self._within(settings.run, lambda: _facts(alert, settings))
        except OSError:
            pass  # the message says what is known
        if not self._read_secrets:
            return compose.safe(alert._replace(cause=_LEFT_OUT), ())._replace(log_tail="")
        tail = compose.end_of_log(end, whole, self.known.secrets)
        return compose.safe(alert, self.known.secrets)._replace(log_tail=tail)

    def _one(self, composed: Composed, alert: Alert, end: float, outcomes: List[Outcome]) -> None:
        message = composed.message._replace(until=int(time.time() + end - time.monotonic() + 15))
        try:
            place = self._store(message)
        except FileExistsError:
            return  # it was sent, or another process sends it
        if place is not None:
            self._stored(message.target)
        url = self.known.addresses.get(message.target)
        if composed.leave == "login":
            sent = Sent(post.WAITS, why="messages leave this site from the login node")
        elif url is None:
            sent = Sent(post.WAITS, why=f"its address is not in {self.settings.secrets}/{message.target}")
        else:
            sent = post.deliver(message, url, end - time.monotonic(), composed.proxy, self.known.secrets)
        kept = self._finish(message, sent, place)
        spooled = sent.outcome == post.WAITS and kept is not None
        outcomes.append(self._recorded(message, alert.attempt, sent, spooled))
        if sent.outcome != post.ARRIVED and (composed.leave != "login" or kept is None):  # last: the log may hang
            where = f"kept in {kept}" if kept else "lost: no disk could store it"
            self._says(f"{alert.kind}: target {message.target}: {sent.why}; {where}")

    def _store(self, message: Message) -> "Optional[Tuple[str, Box]]":
        """Write a message down before it is sent; None if no disk takes it. Raises FileExistsError if it is known."""
        for folder, box in self._boxes():
            try:
                known = self._within(folder, lambda: box.knows(message))  # noqa: B023
            except OSError:
                continue
            if known:
                raise FileExistsError(message.name)
        for folder, box in self._boxes(make=True):
            try:
                self._within(folder, lambda: box.store(message))  # noqa: B023
            except FileExistsError:
                raise
            except OSError:
                continue
            return folder, box
        return None

    def _finish(self, message: Message, sent: Sent, place: "Optional[Tuple[str, Box]]") -> Optional[Path]:
        if place is None:
            return None
        folder, box = place
        try:
            kept: Optional[Path] = self._within(folder, lambda: box.finish(message, sent.outcome))
            return kept
        except OSError:
            return box.spool / f".{message.name}"  # taken up later, as that of a sender that was killed

    def _boxes(self, make: bool = False) -> "Iterator[Tuple[str, Box]]":
        """Yield the run's boxes, each with the folder that may be away. make: make the folder on the node's disk."""
        settings = self.settings
        yield settings.run, Box(Path(settings.run, "alerts"), settings.run_id)
        yield settings.secrets, Box(Path(settings.secrets, BESIDE_ADDRESSES), settings.run_id)
        for disk in settings.disks:
            try:
                self._within(disk, lambda: _refuse_shared(disk, make))  # noqa: B023
            except OSError:
                continue
            yield disk, Box(Path(disk, settings.run_id), settings.run_id)

    def _recorded(self, message: Message, attempt: Optional[int], sent: Sent, spooled: bool) -> Outcome:
        settings = self.settings
        outcome = Outcome(message.target, message.kind, attempt, sent, spooled, True)
        event = events.Event(outcome.event(), time.time(), attempt, settings.job_id, settings.host)
        line = json_lines.dump(event.write())
        try:
            self._within(settings.run, lambda: json_lines.append(os.path.join(settings.run, "events.jsonl"), line))
        except OSError:
            return outcome._replace(recorded=False)
        return outcome

    def _within(self, folder: str, call: "Callable[[], Any]", seconds: Optional[float] = None) -> Any:
        """Return what a call returns. Raises what it raises; OSError if the folder is away.

        A system call in a folder that hangs cannot be interrupted: the thread stays behind.
        """
        if folder in self._away:
            raise OSError(f"{folder} does not answer")
        results: List[Tuple[Any, Optional[Exception]]] = []

        def run() -> None:
            try:
                # Another user may have put a folder of theirs in the place of the run's
                if folder == self.settings.run and os.path.exists(folder) and os.stat(folder).st_uid != os.geteuid():
                    raise OSError(f"{folder} belongs to another user")
                results.append((call(), None))
            except Exception as error:  # noqa: BLE001 - raised below
                results.append((None, error))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self._patience if seconds is None else seconds)
        if not results:
            self._away.add(folder)
            raise OSError(f"{folder} does not answer")
        value, error = results[0]
        if error is not None:
            raise error
        return value


def _refuse_shared(folder: str, make: bool) -> None:
    """Raise OSError if others can read a folder, or put another one in its place. make: make it, if it is not there."""
    if replaced_by_others(os.stat(os.path.dirname(folder))):
        raise PermissionError(f"others can replace {folder}")
    if make:
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            pass  # which is looked at next
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        facts = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        raise PermissionError(f"{folder} is not of this user alone")


def _payloads(folder: Path) -> Dict[str, str]:
    files = [folder / name for name in os.listdir(str(folder)) if not name.startswith(".")]
    return {path.name: _text(path, _LARGEST) for path in files if path.is_file()}


def _secrets(folder: Path) -> "Tuple[Dict[str, str], List[str]]":
    """The addresses of a run, and the values of environment_from, with their lines: a log may show one of them."""
    lines = {path.name: _text(path, LONGEST + 1).split("\n")[0] for path in folder.iterdir() if path.name[0] != "."}
    variables = folder / ".environment"
    pairs = _text(variables, _LARGEST).split("\0") if variables.exists() else []
    values = [pair.partition("=")[2] for pair in pairs]
    parts = {part for value in values if len(value) >= 8 for part in (value, *map(str.strip, value.splitlines()))}
    secrets = sorted((part for part in parts if len(part) >= 8), key=len, reverse=True)
    return {name: line for name, line in lines.items() if is_address(line)}, secrets


def _facts(alert: Alert, settings: Settings) -> "Tuple[Alert, bytes, bool]":
    """Add attempt, progress and log to an alert. Returns the end of the log, and whether that is all of it."""
    run = Path(settings.run)
    attempt = alert.attempt
    if attempt is None:
        names = [path.name for path in run.glob("logs/attempt-*")]
        attempt = max([int(name[8:]) for name in names if re.fullmatch("attempt-[0-9]{3,9}", name)] or [0])
    logs = Path(settings.logs or run / "logs" / f"attempt-{attempt:03d}")
    path = run / "progress"
    step, steps = (path.exists() and read_progress(_text(path, 4096))) or (None, None)
    alert = alert._replace(attempt=attempt, step=step, steps=steps)
    log = _log(run, logs, alert.node)
    if log is None:
        return alert, b"", True
    with open(str(log), "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - compose.LOG_BYTES, 0))
        return alert._replace(log=str(log)), file.read(compose.LOG_BYTES), size <= compose.LOG_BYTES


def _log(run: Path, logs: Path, node: str) -> Optional[Path]:
    """The log that the cause is about, else the newest one; None if none has a line."""
    about = logs / f"{node}.log"
    if node and "/" not in node and about.exists() and about.stat().st_size:
        return about
    sizes = [(path.stat(), path) for path in logs.glob("*.log")]
    logs_by_time = [(facts.st_mtime, path) for facts, path in sizes if facts.st_size]
    job = run / "logs" / "job.log"
    return max(logs_by_time)[1] if logs_by_time else job if job.exists() and job.stat().st_size else None


def _text(path: Path, limit: int) -> str:
    with open(str(path), "rb") as file:
        return file.read(limit).decode("utf-8", "ignore")
