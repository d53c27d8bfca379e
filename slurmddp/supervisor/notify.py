"""Sends alerts without making anybody wait: each is sent by a process of its own, of which the loop hears.

As a program, for job.sh: alert RUN_FOLDER KIND STATE CAUSE NEXT [RANK NODE]
RANK and NODE: where it happened, each - or empty if unknown. It takes SLURMDDP_ALERT_BUDGET seconds (30) and some more
at most, always exits with 0, and prints nothing on stdout.
"""

import json
import os
import re
import select
import signal
import sys
import time
import traceback
from typing import Any, Callable, List, Mapping, Optional, Sequence, Tuple

from slurmddp.records.alert import Alert
from slurmddp.supervisor.deliver import Outcome, Sender, Settings, Targets, complain, from_environment
from slurmddp.supervisor.post import Sent

BUDGET = 30.0
#: How often undelivered messages are tried again while the job runs, and for how long.
_RETRY_SECONDS, _RETRY_BUDGET = 120.0, 20.0
#: A sender that has not exited so long after its time hangs, and is left alone.
_OVERTIME = 8.0


class _Child:
    """A process that sends. alert: None if it sends what waits. text: what it has said of its outcome so far."""

    def __init__(self, pid: int, descriptor: int, alert: Optional[Alert], until: float) -> None:
        self.pid, self.descriptor, self.alert, self.until = pid, descriptor, alert, until
        self.text = b""


class Notifier:
    """The alerts of one run. No method waits for a folder or for a receiver, but `settle` if it is asked to."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._clock = settings, clock
        self._targets = Targets()
        self._children: List[_Child] = []
        self._exited: List[int] = []
        self._unstarted: List[Tuple[Optional[Alert], float]] = []
        self._waiting = False
        self._last_retry = clock()

    def open(self) -> None:
        """Learn the targets, so that alerts arrive if the run folder goes away; send what earlier jobs have left."""
        self._start(None, _RETRY_BUDGET)

    def send(self, alert: Alert, seconds: float = BUDGET) -> None:
        """Send an alert. seconds: how long it is tried; what has not arrived by then waits on a disk."""
        self._start(alert._replace(time=alert.time or int(time.time())), seconds)

    def descriptors(self) -> List[int]:
        """Return what can be read when there is news for `poll`."""
        return [child.descriptor for child in self._children]

    def poll(self) -> List[Outcome]:
        """Return what has become of alerts since the last call. Call it at least once a minute."""
        outcomes: List[Outcome] = []
        self._reap()
        unstarted, self._unstarted = self._unstarted, []
        for alert, seconds in unstarted:
            self._start(alert, seconds)
        for child in list(self._children):
            if self._read(child) or self._clock() > child.until + _OVERTIME:
                self._children.remove(child)
                outcomes += self._finished(child)
        idle = not self._children and not self._unstarted
        if self._waiting and idle and self._clock() - self._last_retry > _RETRY_SECONDS:
            self._start(None, _RETRY_BUDGET)
        return outcomes

    def settle(self, seconds: float) -> List[Outcome]:
        """Wait for alerts that are being sent, this long at most, and return what has become of them.

        What is still on its way then is on a disk: the next job or the login node takes it up.
        """
        self._waiting = False
        end = self._clock() + seconds
        outcomes = self.poll()
        while self._sending() and self._clock() < end:
            select.select(self.descriptors(), [], [], min(end - self._clock(), 1.0))
            outcomes += self.poll()
        return outcomes

    def unstored(self) -> List[Alert]:
        """Return the alerts that no disk has yet: if the job ends now, they are lost."""
        alerts = [(child.alert, child.text) for child in self._children]
        alerts += [(alert, b"") for alert, _ in self._unstarted]
        return [alert for alert, text in alerts if alert is not None and b'["stored"' not in text]

    def _sending(self) -> bool:
        return any(child.alert for child in self._children) or any(alert for alert, _ in self._unstarted)

    def _start(self, alert: Optional[Alert], seconds: float) -> None:
        if alert is None:
            self._last_retry = self._clock()
        pipe: Tuple[int, ...] = ()
        try:
            reader, writer = pipe = os.pipe()
            pid = os.fork()
        except OSError:  # too many processes, or no memory: `poll` tries again
            for descriptor in pipe:
                os.close(descriptor)
            self._unstarted.append((alert, seconds))
            return
        if pid == 0:
            _send(self._settings, self._targets, alert, seconds, writer)
        os.close(writer)
        os.set_blocking(reader, False)
        self._children.append(_Child(pid, reader, alert, self._clock() + seconds))

    def _read(self, child: _Child) -> bool:
        """Read what a child says; return whether it has said all."""
        while True:
            try:
                part = os.read(child.descriptor, 65536)
            except BlockingIOError:
                return False
            child.text += part
            if not part:
                return True

    def _finished(self, child: _Child) -> List[Outcome]:
        os.close(child.descriptor)
        self._exited.append(child.pid)
        outcomes: List[Outcome] = []
        for line in child.text.split(b"\n"):
            word, value = json.loads(line.decode("ascii")) if line.endswith(b"]") else ("", [])
            if word == "targets":
                self._targets = Targets(value[0], value[1], tuple(value[2]))
            elif word == "outcome":
                target, kind, attempt, sent, spooled, recorded = value
                outcomes.append(Outcome(target, kind, attempt, Sent(*sent), spooled, recorded))
        self._waiting = any(outcome.spooled for outcome in outcomes) or (self._waiting and child.alert is not None)
        return outcomes

    def _reap(self) -> None:
        """Forget processes that have exited. One that hangs in a folder stays until the job ends."""
        for pid in list(self._exited):
            try:
                if os.waitpid(pid, os.WNOHANG) == (0, 0):
                    continue
            except ChildProcessError:
                pass  # the loop has waited for it
            self._exited.remove(pid)


def _send(settings: Settings, targets: Targets, alert: Optional[Alert], seconds: float, writer: int) -> None:
    """Send, as a process of its own, and exit. writer: where the parent reads JSON lines: a word and its value."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)  # Slurm sends them to all of a job's processes
        for name in os.listdir("/proc/self/fd"):  # a pipe that stays open here keeps its reader waiting
            if int(name) > 2 and int(name) != writer:
                try:
                    os.close(int(name))
                except OSError:
                    pass  # that of the listing

        def tell(word: str, value: Any) -> None:
            os.write(writer, json.dumps([word, value]).encode("ascii") + b"\n")

        sender = Sender(settings, targets, lambda name: tell("stored", name), patience=max(1.0, min(2.5, seconds / 4)))
        outcomes = sender.send_waiting(seconds) if alert is None else sender.send(alert, seconds)
        tell("targets", sender.known)
        for outcome in outcomes:
            tell("outcome", outcome)
    except Exception:  # noqa: BLE001 - nobody above it could say so
        complain(traceback.format_exc())
    finally:
        os._exit(0)  # without waiting for threads that hang


def main(words: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Send one alert, as the command line says."""
    if len(words) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    run, kind, state, cause, following, rank, node = (*words, "", "", "", "", "")[:7]
    budget = environment.get("SLURMDDP_ALERT_BUDGET", "")
    seconds = float(budget) if re.fullmatch("[0-9]{1,5}", budget) else BUDGET
    attempt = environment.get("SLURMDDP_ATTEMPT", "")
    numbers = [int(text) if re.fullmatch("[0-9]{1,9}", text) else None for text in (rank, attempt)]
    alert = Alert(kind, state, cause, following, numbers[0], node, attempt=numbers[1])
    send_one(alert, from_environment(run, environment), seconds)
    return 0


def send_one(alert: Alert, settings: Settings, seconds: float) -> None:
    """Send an alert, and wait until it has arrived, or waits on a disk, or its time is over."""
    notifier = Notifier(settings)
    notifier.send(alert, seconds)
    notifier.settle(seconds + _OVERTIME)
    for lost in notifier.unstored():
        complain(f"{lost.kind}: not sent, and no disk could store it: {lost.cause}")
