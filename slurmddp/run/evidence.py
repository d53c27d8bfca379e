"""What a run folder itself says about how its run went: submission, markers, events, the stop file."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from slurmddp.cluster.base import JobId
from slurmddp.errors import UserError
from slurmddp.records import job_events
from slurmddp.records import marker as marker_records
from slurmddp.records.events import Event, newest, of
from slurmddp.records.marker import Marker
from slurmddp.records.stop import BY_HAND, StopRequest
from slurmddp.records.stop import read as read_stop
from slurmddp.records.submission import Submission
from slurmddp.run import events as event_files
from slurmddp.run import submission as submissions
from slurmddp.run.layout import RunFolder, attempt_of
from slurmddp.shared.files import open_plain, read_json
from slurmddp.styled import labelled

_LONGEST_STOP = 2000  # bytes of a stop file that are read


@dataclass(frozen=True)
class Evidence:
    """What the run folder itself says: all that `judge` needs besides Slurm's word."""

    submission: Submission | None = None
    markers: Mapping[int, Marker] | None = None
    events: Sequence[Event] = ()
    stop: StopRequest | None = None
    notes: tuple[str, ...] = ()

    @property
    def submitted(self) -> float | None:
        """When the job was submitted, unix seconds; None if that is unknown."""
        try:
            return datetime.fromisoformat(self.submission.time).timestamp() if self.submission else None
        except (ValueError, OverflowError, OSError):
            return None

    @property
    def job_id(self) -> JobId | None:
        """The job to ask Slurm about: the newest of them.

        Raises UserError for a submission that names no job.
        """
        return self.job_ids[-1] if self.job_ids else None

    @property
    def job_ids(self) -> tuple[JobId, ...]:
        """The run's jobs, oldest first: the submission's, else that of the newest job_started, and where the site
        wants no requeue, those that were chained to it.

        Raises UserError for a submission that names no job.
        """
        if self.submission and self.submission.job_id:
            first = JobId.parse(self.submission.job_id)
        else:
            try:
                first = JobId.parse((self.started and self.started.job_id) or "")
            except UserError:
                return ()  # a script that somebody started by hand: there is no job to ask about
        chained = [facts.next_job for _, facts in of(self.events, job_events.Requeued) if facts.how == "chain"]
        numbers = dict.fromkeys(number for number in chained if number.isdecimal() and number != first.id)
        return (first, *(JobId(number, first.cluster) for number in numbers))

    @property
    def unanswered(self) -> bool:
        """Return whether sbatch was called and nothing says yet whether there is a job."""
        sent = self.submission
        return sent is not None and sent.queued and not sent.job_id and self.started is None

    @property
    def requeued(self) -> job_events.Requeued | None:
        """The `requeued` after the newest job_started: the script went back to the queue, or chained a job."""
        return newest(self._since_start, job_events.Requeued)

    @property
    def attempt_ended(self) -> job_events.AttemptEnded | None:
        """Return what the script wrote when the newest attempt ended; None while it runs."""
        return newest([event for event in self.events if event.attempt == self.attempt], job_events.AttemptEnded)

    @property
    def excluded(self) -> Mapping[str, str]:
        """The nodes that the run does without, each with the reason; the newest reason of a node counts."""
        found: dict[str, str] = {}
        for _, facts in of(self.events, job_events.NodeExcluded):
            if facts.excluded:
                found[facts.excluded] = facts.reason
        return found

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return what the newest preflight warned of, each with its node."""
        preflight = newest(self.events, job_events.Preflight)
        return preflight.warnings if preflight else ()

    @property
    def network(self) -> str:
        """Return what the newest measurement of the network said; "" before the first."""
        network = newest(self.events, job_events.Network)
        return network.text if network else ""

    @property
    def started(self) -> Event | None:
        """The newest job_started."""
        return next((event for event in self.events[::-1] if isinstance(event.facts, job_events.JobStarted)), None)

    @property
    def ended(self) -> job_events.JobEnded | None:
        """The job_ended after the newest job_started; None while the script runs, or if it was killed."""
        return newest(self._since_start, job_events.JobEnded)

    @property
    def ended_at(self) -> float | None:
        """When that was, unix seconds."""
        return next((event.time for event, _ in of(self._since_start[::-1], job_events.JobEnded)), None)

    @property
    def ranks_terminated(self) -> job_events.RanksTerminated | None:
        """The event of ranks that did not exit after a cancel, so that job.sh terminated them; of the newest job."""
        return newest(self._since_start, job_events.RanksTerminated)

    @property
    def cancel_grace(self) -> int | None:
        """Return the seconds that the running job leaves its own script after a cancel; None with train.task."""
        started = newest(self.events, job_events.JobStarted)
        return started.cancel_grace if started else None

    @property
    def cancel_requested(self) -> bool:
        """Return whether `slurmddp cancel` was called after the newest job_started."""
        return newest(self._since_start, job_events.CancelRequested) is not None

    @cached_property
    def _since_start(self) -> Sequence[Event]:
        """The events after the newest job_started; all of them without one."""
        starts = [at for at, event in enumerate(self.events) if isinstance(event.facts, job_events.JobStarted)]
        return self.events[starts[-1] + 1 :] if starts else self.events

    @cached_property
    def attempt(self) -> int | None:
        """The newest attempt that anything tells of."""
        attempts = [event.attempt for event in self.events if event.attempt is not None]
        return max([*attempts, *(self.markers or {})], default=None)

    @property
    def marker(self) -> Marker | None:
        """The newest attempt's marker; one of an older attempt says nothing about how the run stands now."""
        return (self.markers or {}).get(self.attempt) if self.attempt is not None else None


def evidence(folder: RunFolder) -> Evidence:
    """Read what a run folder says.

    Raises UserError for a damaged submission.json, OSError; notes tell the rest.
    """
    lines = event_files.read_events(folder.events, folder.path)
    notes = [f"{folder.events}: {lines.damaged} damaged lines skipped"] if lines.damaged else []
    markers: dict[int, Marker] = {}
    for path in sorted(folder.markers.glob("attempt-*.json")):
        attempt = attempt_of(path)
        if attempt is None:
            continue
        try:
            found = marker_records.read(read_json(path, folder.path))
        except (OSError, ValueError) as error:
            notes.append(f"{path}: damaged ({type(error).__name__}: {error})")
            continue
        if found.state:
            markers[attempt] = found
        else:
            notes.append(f"{path}: damaged (it names no state)")
    sent = submissions.read(folder)
    return Evidence(sent, markers, lines.records, _stop(folder), tuple(notes))


def _stop(folder: RunFolder) -> StopRequest | None:
    """Return what the stop file says; None without one."""
    try:
        with open_plain(folder.stop, folder.path) as file:
            return read_stop(file.read(_LONGEST_STOP).decode("utf-8", "replace"))
    except FileNotFoundError:
        return None
    except OSError:
        return StopRequest(BY_HAND)  # whatever it is, the ranks see it


def evidence_of(folders: Iterable[RunFolder], say: Callable[[str], None]) -> list[tuple[RunFolder, Evidence]]:
    """Return what each run folder says, in order; say which ones cannot be read, and leave them out."""
    found = []
    for folder in folders:
        try:
            found.append((folder, evidence(folder)))
        except (UserError, OSError) as error:
            say(labelled("warning", f"{folder.path}: {error}"))
    return found
