"""What doctor reads: log files, folders of logs, standard input, or all that a run folder tells."""

import os
import re
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, cast

from slurmddp.doctor.diagnose import AFTER_A_CANCEL, AFTER_THE_END, SIGNAL_EXITS, Examination
from slurmddp.doctor.flight import is_dump
from slurmddp.errors import UserError
from slurmddp.records import rank_events, refusal
from slurmddp.records.events import NAMES, Event, newest, of, parse
from slurmddp.records.job_events import AttemptEnded, CancelRequested, JobEnded, NodeExcluded, Requeued
from slurmddp.records.json_lines import LONGEST
from slurmddp.run.cause import failing_attempt, hang_of, killed_of, tasks_are_ranks
from slurmddp.run.evidence import Evidence, evidence
from slurmddp.run.layout import RunFolder
from slurmddp.run.logs import Follower
from slurmddp.run.rank_starts import start_notices
from slurmddp.run.written import written_again
from slurmddp.shared.files import bounded_lines, open_plain, read_plain
from slurmddp.visible import one_line

#: Files of a folder, and bytes of a file of the preflight.
_FILES = 2000
_BYTES = 100_000
#: What to do with a file that is no log.
_NO_LOGS = {
    "is empty": "name the log that Slurm wrote (scontrol show job ID: StdOut)",
    "is compressed": "unpack it first, as in: zcat FILE.gz | slurmddp doctor -",
    "is not text": "name a log file in UTF-8 or ASCII",
}
#: Characters of a text of an event.
_LONGEST = 2000
#: Events of a start of the ranks that failed, or of the end of an attempt.
_FAILURES = (rank_events.Error, rank_events.Hang, rank_events.RankExited, AttemptEnded)
_HANGS = (rank_events.Hang, rank_events.HangReported, rank_events.HangOver)
#: Events that say something about a failure, as their lines name them.
_TELLING = tuple(
    f'"{NAMES[kind]}"'.encode()
    for kind in (
        *_FAILURES, *_HANGS, NodeExcluded, JobEnded, CancelRequested, Requeued, rank_events.CheckpointRejected,
        rank_events.FirstStep, rank_events.RankStarted, rank_events.NoProcessGroup, rank_events.ProcessGroupMade,
        rank_events.Restarted,
    )
)  # fmt: skip
#: What ends healthy ranks.
_FROM_OUTSIDE = ("cancelled", "preemption", "time limit")
#: The causes by which Slurm ends a job, whose line stands in the newest attempt's logs.
_ENDS = ("time-limit", "preemption")


def read_path(found: Examination, path: Path) -> None:
    """Read a log, or all files below a folder. Raises UserError."""
    if path.is_dir():
        files = list(_below(path))
        if not files:
            raise UserError(f"{one_line(str(path))} has no files", todo="name a log file")
    else:
        files = [path]
    for each in files:
        try:
            with open_plain(each) as handle:
                if is_dump(handle):
                    found.dump(each, handle)
                elif problem := _no_log(handle):
                    found.notes.append(f"{each} {problem} -> {_NO_LOGS[problem]}")
                else:
                    found.read(str(each), handle)
        except OSError as error:
            if each is path:
                raise UserError(f"{one_line(str(path))} cannot be read: {error.strerror}") from error
            found.notes.append(f"{each}: cannot be read: {error.strerror}")


def _no_log(handle: BinaryIO) -> str:
    """Why a file cannot be a log; an empty text for one that can."""
    head = handle.read(1000)
    handle.seek(0)
    if not head:
        return "is empty"
    if head.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PK\x03\x04")):
        return "is compressed"
    return "is not text" if head.count(0) > len(head) // 10 else ""


def read_stream(found: Examination, handle: BinaryIO) -> None:
    if cast(BufferedReader, handle).peek(1):
        found.read("-", handle)
    else:
        found.notes.append("standard input is empty -> send a log: slurmddp doctor - < FILE")


def read_run(found: Examination, folder: RunFolder) -> None:
    """Read the newest attempt of a run: its logs, what the preflight wrote, and its events.

    Of ranks that start again and again without a step, read the attempt that failed last, as `status` does.
    """
    facts = evidence(folder)
    found.job_id = facts.job_id.id if facts.job_id else ""
    found.tasks_are_ranks = tasks_are_ranks(folder)
    attempt = facts.attempt
    if attempt and facts.attempt_ended is None and not _made_steps(facts, attempt):
        attempt = failing_attempt(folder, attempt)
        if attempt != facts.attempt:
            found.notes.append(f"attempt {facts.attempt} has no failure so far: this is why attempt {attempt} failed")
    logs = Follower(folder, attempt=attempt).node_logs()
    if attempt is not None:
        logs.append(folder.attempt_logs(attempt) / "srun.err")
    # job.sh's own log comes last: what it says of an attempt's end it has from the nodes' logs.
    for path in (*logs, folder.job_log):
        node = path.stem if path.suffix == ".log" and path != folder.job_log else None
        try:
            with open_plain(path, folder.path) as handle:
                begin = _begin(folder, attempt) if path == folder.job_log else 0
                found.read(str(path), handle, node=node, begin=begin)
        except OSError:
            continue  # none was written
    if attempt is not None:
        _preflight(found, folder, attempt)
        for path in sorted((folder.attempt_logs(attempt) / "flight_recorder").glob("*")):
            _dump(found, path, folder)
    _events(found, folder, attempt)
    if not found.files:
        raise UserError(f"run {folder.id} has no logs yet", todo=f"slurmddp status {folder.id}")


def _made_steps(facts: Evidence, attempt: int) -> bool:
    return any(event.attempt in (attempt, attempt - 1) for event, _ in of(facts.events, rank_events.FirstStep))


def _begin(folder: RunFolder, attempt: int | None) -> int:
    """Return the size that job.log had when an attempt began; 0 if that is unknown."""
    if attempt is None:
        return 0
    try:
        return int(read_plain(folder.attempt_logs(attempt) / "job_log_begin", 20, folder.path))
    except (OSError, ValueError):
        return 0


def is_done(folder: RunFolder) -> bool:
    """Return whether the newest attempt of a run finished its work."""
    ended = newest((event for _, event in _read(folder)), JobEnded)
    return ended is not None and ended.decision == "done"


def start_notes(folder: RunFolder) -> Iterator[str]:
    """Yield what the ranks of an own script told of their start, and which files another run wrote, too."""
    yield from start_notices(event for _, event in _read(folder))
    if again := written_again(folder):
        yield again


def survived_failures(folder: RunFolder) -> Iterator[str]:
    """Yield what a run that is done survived: one line for each rank that a signal ended."""
    for _, event in _read(folder):
        if killed := killed_of(event):
            yield f"{killed.line()[:_LONGEST]}; the ranks started again"


def _below(folder: Path) -> Iterator[Path]:
    count = 0
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(parent, name)
            if not name.startswith(".") and not path.is_symlink() and path.is_file():
                count += 1
                if count > _FILES:
                    return
                yield path


def _dump(found: Examination, path: Path, folder: RunFolder) -> None:
    try:
        with open_plain(path, folder.path) as handle:
            if is_dump(handle):
                found.dump(path, handle)
    except OSError:
        return


def _dumps(folder: RunFolder, attempt: int) -> list[Path]:
    """Return the dumps that the ranks of an own script wrote in the newest hang."""
    starts = folder.observed(attempt, "*")
    places = [place for place in starts.parent.glob(f"{starts.name}/hang-*") if place.is_dir()]
    newest = sorted(places, key=lambda place: [int(each) for each in re.findall(r"\d+", str(place))])[-1:]
    return sorted(path for place in newest for path in place.glob("rank-*.pickle"))


def _preflight(found: Examination, folder: RunFolder, attempt: int) -> None:
    for path in sorted((folder.attempt_logs(attempt) / "preflight").glob("*.failed")):
        try:
            with open_plain(path, folder.path) as handle:
                text = refusal.read(handle.read(_BYTES).decode("utf-8", errors="replace")).text
        except OSError:
            continue
        if text:
            found.fact(str(path), 2, f"preflight: {text}", node=path.stem)


def _events(found: Examination, folder: RunFolder, attempt: int | None) -> None:
    name = str(folder.events)
    # Read twice rather than kept: there may be millions of events.
    hangs = (at for at, event in _read(folder) if isinstance(event.facts, _HANGS) and event.attempt == attempt)
    newest_hang = max(hangs, default=0)
    steps = (at for at, event in _read(folder) if isinstance(event.facts, rank_events.FirstStep))
    survived, failed, first_exit = max(steps, default=0), 0, ""
    for number, event in _read(folder):
        if event.attempt != attempt:
            continue
        facts, rank, node = event.facts, event.rank, _short(event.node or "") or None
        failed = number if isinstance(facts, _FAILURES) else failed
        if isinstance(facts, JobEnded) and facts.slurm_state:
            found.fact(name, number, f"slurm_state {_short(facts.slurm_state)}")
        elif isinstance(facts, rank_events.Error):
            message = _short(facts.message).strip().partition("\n")[0]
            found.fact(name, number, f"{_short(facts.kind)}: {message}", rank=rank, node=node, otherwise="code")
        elif (hang := hang_of(event)) and (isinstance(facts, rank_events.Hang) or number == newest_hang):
            where = _short(hang.node) or None
            found.fact(name, number, _short(hang.line()), rank=hang.rank, node=where, otherwise="hang")
            if number == newest_hang and attempt is not None:
                for path in _dumps(folder, attempt):
                    _dump(found, path, folder)
        elif isinstance(facts, rank_events.RankExited) and (killed := killed_of(event)):
            if number < survived:
                found.notes.append(f"{_short(killed.line())}; the ranks started again")
            else:
                text = _short(f"terminated with signal {facts.signal}: {killed.line()}")
                found.fact(name, number, text, rank=rank, node=node, otherwise="exit-code")
                first_exit = first_exit or found.hits[-1].cause.id
        elif isinstance(facts, NodeExcluded):
            found.fact(name, number, f"preflight: {_short(facts.reason)}", node=_short(facts.excluded))
        elif isinstance(facts, AttemptEnded) and facts.decision != "done" and not found.hits and facts.cause:
            found.fact(name, number, _short(facts.cause), rank=rank, node=node, otherwise="exit-code")
        elif isinstance(facts, rank_events.CheckpointRejected):
            text = f"checkpoint {_short(facts.path)} is corrupt: {_short(facts.why)}"
            found.fact(name, number, text, node=node)
    _explain_the_end(found, folder, attempt)
    if first_exit:  # other ranks died of it, of their containers' end, or of what ended them
        found.explained |= SIGNAL_EXITS - {first_exit}
    if 0 < failed < survived and not found.explained >= AFTER_THE_END:
        found.notes.append(
            "the ranks have made steps again since the newest failure: slurmddp status shows how they are"
        )


def _explain_the_end(found: Examination, folder: RunFolder, attempt: int | None) -> None:
    """Note that the user cancelled the run. What ends healthy ranks from outside is why their processes exited."""
    cancelled = ended = failing = False
    reasons = set()
    for _, event in _read(folder):
        facts = event.facts
        if isinstance(facts, CancelRequested):
            cancelled = True
        elif isinstance(facts, Requeued):
            reasons.add(facts.reason)
        elif event.attempt != attempt:
            continue
        elif isinstance(facts, AttemptEnded):
            ended = facts.ended_by in _FROM_OUTSIDE
        elif isinstance(facts, rank_events.FirstStep):
            failing = False
        elif isinstance(facts, _FAILURES) and not cancelled:
            failing = True
    if cancelled:
        found.notes.append(f"run {folder.id} was cancelled with slurmddp cancel")
    # job.sh may have had no time to write of the end: then Slurm's own line tells.
    attempts = [hit for hit in found.hits if hit.path != str(folder.job_log)]  # which tells of earlier attempts, too
    ended = ended or any(hit.cause.id in _ENDS and hit.sure == "certain" for hit in attempts)
    if not failing:
        found.explained = AFTER_A_CANCEL if cancelled else AFTER_THE_END if ended else frozenset()
    if reasons and "preemption" not in reasons:  # Slurm says of each requeue what it says of a preemption
        found.explained |= {"preemption"}


def _short(text: str) -> str:
    """Return as much of a text as is shown: anybody may have written the file."""
    return text[:_LONGEST]


def _read(folder: RunFolder) -> Iterator[tuple[int, Event]]:
    """The events that may matter, with their lines' numbers."""
    try:
        handle = open_plain(folder.events, folder.path)
    except OSError:
        return
    with handle:
        for number, line in enumerate(bounded_lines(handle, LONGEST), 1):
            if any(word in line for word in _TELLING) and (event := parse(line)) is not None:
                yield number, event
