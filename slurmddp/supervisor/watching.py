"""What happens while something runs on the nodes: the supervisor looks around, and does what the brain makes of it."""

import signal
from typing import Any, Dict, Optional

from slurmddp.records import events, marker
from slurmddp.supervisor.brain.types import (
    Actions,
    Alert,
    Around,
    AskEndTime,
    AskToStop,
    FindCause,
    Kill,
    Marker,
    Say,
    Terminate,
    Write,
)
from slurmddp.supervisor.files import Lines
from slurmddp.supervisor.folder import Unavailable
from slurmddp.supervisor.job import Job
from slurmddp.supervisor.stopping import ask_to_stop


def marker_of(found: Optional[Dict[str, Any]]) -> Optional[Marker]:
    """Return the marker that Files has read; None if there is none."""
    return None if found is None else marker.read(found)


class Watching:
    """The brain's watch, and its eyes and hands."""

    def __init__(self, job: Job) -> None:
        self._job, self._watch = job, job.watch
        self.new_attempt()

    def new_attempt(self) -> None:
        self._watch.new_attempt(self._job.moment())
        self._around = Around()

    def look(self) -> bool:
        """Look around. Where the run folder does not answer, what it said last still holds.

        Return whether srun says that Slurm could not start something.
        """
        job, now = self._job, self._job.moment()
        seldom, beats = self._watch.is_seldom(now), job.values.yes("elastic")
        try:
            changes = job.folder.ask("look", job.attempt, job.logs, job.events_read, seldom, beats)
        except Unavailable:
            changes = None
        if changes is not None:
            self._read(changes)
        job.count_gpu_time()
        around = self._around._replace(gpu_seconds=self._watch.ledger.gpu_seconds)
        self.carry_out(self._watch.look(around, now))
        job.messages.poll()
        job.guard.look()
        return bool(changes and changes.get("unreached"))

    def read_events(self) -> None:
        """Read what the ranks wrote until their end."""
        lines = self._job.folder.known(None, "new_lines", self._job.events_read)
        if lines is not None:
            self._take(lines)

    def _read(self, changes: Dict[str, Any]) -> None:
        self._take(changes["events"])
        self._around = self._around._replace(marker=marker_of(changes["marker"]), stop=changes["stop"])
        if "failures" in changes:
            chosen = self._job.nodes.chosen  # the preflight may have excluded others for it
            unreached = tuple((node, text) for node, text in changes["unreached"] if node in chosen)
            known = self._around._replace(failures=changes["failures"], newest_start=changes["newest_start"])
            self._around = known._replace(unreached=unreached)

    def _take(self, new_lines: Lines) -> None:
        self._job.events_read, lines = new_lines
        for line in lines:
            self._event(line)

    def _event(self, line: str) -> None:
        event = events.parse(line.encode("utf-8", "replace"))
        if event is not None and (event.attempt is None or event.attempt >= self._job.attempt):
            # Ranks of an earlier attempt may live on, where their node was cut off, and come back.
            self.carry_out(self._watch.see(event, self._job.moment()))

    def carry_out(self, actions: Actions) -> None:
        job = self._job
        for action in actions:
            if isinstance(action, Say):
                job.say(action.text)
            elif isinstance(action, Write):
                job.event(action.event)
            elif isinstance(action, (Terminate, Kill)):
                if job.child is not None:
                    job.child.kill(signal.SIGKILL if isinstance(action, Kill) else signal.SIGTERM)
            elif isinstance(action, AskToStop):
                ask_to_stop(job, action.reason)
            elif isinstance(action, AskEndTime):
                self.carry_out(self._watch.end_time_is(job.scheduler.end_time(), job.moment()))
            elif isinstance(action, FindCause):
                self._watch.cause_is(job.find_cause(action.noted))
            elif isinstance(action, Alert):
                job.send(action)
