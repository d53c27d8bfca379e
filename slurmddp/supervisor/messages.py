"""Lines in job.log, events for programs, alerts for people."""

import os
import subprocess
import time
from typing import Any, Dict, List, Optional

from slurmddp.records import events, json_lines
from slurmddp.records.cause import Cause
from slurmddp.supervisor.folder import Folder
from slurmddp.supervisor.loop import Child, Loop


class Messages:
    """What the supervisor says. attempt: the number of the newest one. budget: seconds that an alert may take."""

    def __init__(self, loop: Loop, folder: Folder, run: str, job_id: str, host: str, env: Dict[str, str]) -> None:
        self._loop, self._folder, self._run = loop, folder, run
        self.job_id, self.host, self.env = job_id, host, env
        self.attempt = 0
        self.budget = 30
        self._alerts: List[Child] = []

    def say(self, text: str) -> None:
        self._folder.tell("say", time.strftime("%Y-%m-%d %H:%M:%S") + " job.sh: " + text)

    def event(self, facts: Any) -> None:
        """Write an event, of slurmddp.records."""
        line = events.Event(facts, time.time(), self.attempt, self.job_id, self.host).write()
        self._folder.tell(
            "append", "events.jsonl", json_lines.dump(line).decode("utf-8", "surrogateescape").rstrip("\n")
        )

    def alert(self, kind: str, state: str, cause: Optional[Cause], following: str, text: str = "") -> None:
        """Send a message to people, in the background: nothing waits for a server. A run without alert targets has no
        alert.sh. text: what they read; empty: the line of the cause.
        """
        line, rank, node = ("", None, "") if cause is None else (cause.line(), cause.rank, cause.node)
        text = text or line
        words = [kind, state, text, following, "-" if rank is None else str(rank), node or "-"]
        env = dict(self.env, SLURMDDP_ALERT_BUDGET=str(self.budget))
        script = '[ ! -e "$0" ] || exec bash "$0" "$@"'
        path = os.path.join(self._run, "alert.sh")
        self._alerts.append(
            self._loop.start(["bash", "-c", script, path, *words], env, "tool", stdout=subprocess.DEVNULL)
        )

    def settle(self, seconds: float) -> None:
        """Wait for alerts that are being sent."""
        self._loop.run_until(lambda: all(alert.code is not None for alert in self._alerts), seconds)
