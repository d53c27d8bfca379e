"""Lines in job.log, events for programs, alerts for people."""

import re
import time
from typing import Any, Dict, List, Optional

from slurmddp.records import events, json_lines
from slurmddp.records.alert import Alert
from slurmddp.records.cause import Cause
from slurmddp.records.text import UNSAFE
from slurmddp.supervisor.deliver import Outcome, from_environment
from slurmddp.supervisor.folder import Folder
from slurmddp.supervisor.notify import BUDGET, Notifier


class Messages:
    """What the supervisor says. attempt: the number of the newest one. budget: seconds that an alert may take."""

    def __init__(self, folder: Folder, run: str, job_id: str, host: str, env: Dict[str, str]) -> None:
        self._folder = folder
        self.job_id, self.host = job_id, host
        self.attempt = 0
        self.budget = BUDGET
        self._notifier = Notifier(from_environment(run, env))

    def open(self) -> None:
        """Learn where alerts go, for the time when the run folder is away; send what earlier jobs have left."""
        self._notifier.open()

    def say(self, text: str) -> None:
        """Write one line, whatever others' texts in it hold."""
        line = UNSAFE.sub("", re.sub("[\t\r\n\x0b\x0c\x85\u2028\u2029]+", " ", text))
        self._folder.tell("say", time.strftime("%Y-%m-%d %H:%M:%S") + " job.sh: " + line)

    def event(self, facts: Any) -> None:
        """Write an event, of slurmddp.records."""
        line = events.Event(facts, time.time(), self.attempt, self.job_id, self.host).write()
        self._folder.tell(
            "append", "events.jsonl", json_lines.dump(line).decode("utf-8", "surrogateescape").rstrip("\n")
        )

    def alert(self, kind: str, state: str, cause: Optional[Cause], following: str, text: str = "") -> None:
        """Send a message to people: nothing waits for a server. text: what they read; empty: the line of the cause."""
        self._folder.confirm()
        line, rank, node = ("", None, "") if cause is None else (cause.line(), cause.rank, cause.node)
        self._notifier.send(Alert(kind, state, text or line, following, rank, node, attempt=self.attempt), self.budget)

    def poll(self) -> None:
        """Take up what has become of alerts."""
        self._record(self._notifier.poll())

    def settle(self, seconds: float) -> None:
        """Wait for alerts that are being sent."""
        self._record(self._notifier.settle(seconds))
        for alert in self._notifier.unstored():
            self.say("alert {}: not sent, and no disk could store it: {}".format(alert.kind, alert.cause))

    def _record(self, outcomes: List[Outcome]) -> None:
        for outcome in outcomes:
            if not outcome.recorded:  # the run folder did not answer then
                self.event(outcome.event())
