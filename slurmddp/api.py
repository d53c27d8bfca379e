"""The Python API: submit a job and look at its run, with the code of the commands. docs/python.md explains it.

Everything else is imported at its first use: the commands use this module, too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurmddp.report.status import RunStatus
    from slurmddp.run.layout import RunFolder

#: Seconds between two questions to the scheduler while a run is awaited, and between two looks at its events.
ASK_EVERY, LOOK_EVERY = 15.0, 1.0
#: The same once job.sh has ended: Slurm will say so soon.
ASK_AT_END = 2.0


@dataclass(frozen=True)
class Status:
    """What `slurmddp status` knows of a run.

    Attributes:
        state: done, stopped, failed, timed out, node failure, cancelled, out of memory, lost, not submitted, pending,
            running, requeued or stopping.
        detail: one line about the state, for people.
        going: whether the run is still pending or running.
        cause: why a failed run failed, for people; else None.
        job_id: the newest job; "" before the submission.
        step: the newest optimizer step, if one is known.
        steps: the steps asked for, if they are known.
        loss: of the newest metrics line, if it has one.
        facts: all keys of `slurmddp status --json`, which docs/files.md lists.
    """

    state: str
    detail: str
    going: bool
    cause: str | None
    job_id: str
    step: int | None
    steps: int | None
    loss: float | None
    facts: Mapping[str, Any]


class Run:
    """A run: one submission, and what has become of it.

    Attributes:
        id: the run's id.
        folder: its folder.
        warnings: what `submit` warned of; empty for a run that was found by its name.
    """

    def __init__(self, run: str | os.PathLike[str] = "last") -> None:
        """Find a run.

        Args:
            run: a run id, the beginning of one, a job id, a run folder, or "last".

        Raises:
            UserError: there is no such run, or there are several.
        """
        from slurmddp.launch.find import find_run

        self._folder = find_run(os.fspath(run), os.environ)
        self.id: str = self._folder.id
        self.folder: Path = self._folder.path
        self.warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"slurmddp.Run({self.id!r})"

    def status(self) -> Status:
        """Ask the scheduler and read the run folder.

        Returns:
            The status of this moment.

        Raises:
            UserError: a file of the run folder is damaged.
            OSError: the run folder cannot be read.
        """
        status = look(self._folder)
        return Status(
            state=status.state.state,
            detail=status.state.detail,
            going=status.state.going,
            cause=status.cause and status.cause.line_with_log(),
            job_id=status.job_id,
            step=status.progress.step,
            steps=status.progress.steps,
            loss=status.progress.loss,
            facts=status.as_dict(),
        )

    def wait(self, timeout: float | None = None) -> Status:
        """Wait until the run is over, also across requeues.

        Asks the scheduler every 15 seconds, and as soon as the run folder has a new event.

        Args:
            timeout: seconds to wait at most; None for as long as it takes.

        Returns:
            The last status. A failed run raises nothing: look at `state`.

        Raises:
            TimeoutError: the run is still pending or running after `timeout` seconds. It continues.
            UserError: a file of the run folder is damaged.
            OSError: the run folder cannot be read.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.status()).going:
            ending = status.state in ("running", "stopping") and status.facts["ended"] is not None
            rest = ASK_AT_END if ending else ASK_EVERY
            if deadline is not None:
                rest = min(deadline - time.monotonic(), rest)
            if rest <= 0:
                raise TimeoutError(f"run {self.id} is still {status.state} after {timeout:g} s")
            await_event(self._folder, rest)
        return status

    def metrics(self) -> Iterator[dict[str, Any]]:
        """Read metrics.jsonl, whose keys docs/files.md lists.

        Returns:
            An iterator over its lines, oldest first. After a restart, steps since the checkpoint come again: the last
            line of a step counts. A damaged line is left out.

        Raises:
            OSError: the file cannot be read. A run that has not trained yet has no lines.
        """
        from slurmddp.run.metrics import behind

        for rows, _ in behind(self._folder.metrics, 0):
            yield from (row.write() for row in rows)

    def cancel(self, *, now: bool = False) -> None:
        """Cancel the run for good. It returns at once: `wait` waits until the job has exited.

        Args:
            now: cancel at once. Otherwise a running job saves a checkpoint first.

        Raises:
            UserError: the run was never submitted, or it is another user's.
            ExternalError: Slurm refused, or did not answer.
        """
        from slurmddp.launch.cancel import cancel_run
        from slurmddp.run.gate import own

        cancel_run(own(self._folder, to="cancel it"), now=now)


def submit(job: str | os.PathLike[str] | Mapping[str, Any], *, settings: Mapping[str, Any] | None = None) -> Run:
    """Check a job, write its run folder, and submit it, as `slurmddp submit` does.

    Args:
        job: the path of a job file (.yaml) or of a training script (.py), or what a job file contains, as a dict.
            Relative paths start at the current directory.
        settings: values that replace those of the job, by key, such as {"resources.nodes": 4}: the same as `--set`.

    Returns:
        The new run.

    Raises:
        UserError: a mistake in the job, the site or the settings. Nothing was submitted.
        ExternalError: sbatch failed, or its answer was not understood.
        OSError: a file cannot be written.
    """
    from slurmddp.job.document import as_text
    from slurmddp.job.resolve import Request
    from slurmddp.launch.prepare import prepare
    from slurmddp.launch.submit import submit as submit_now

    options = [(key, as_text(value, f"settings: {key}"), f"settings: {key}") for key, value in (settings or {}).items()]
    prepared = prepare(Request(job if isinstance(job, Mapping) else os.fspath(job), (), options))
    before = dict(os.environ)
    try:
        submission = submit_now(prepared)
    finally:  # it takes the job's secrets out of the environment: the next submission needs them, too
        os.environ.update(before)
    run = Run(submission.run_folder)
    run.warnings = (*(note.text for note in prepared.plan.notes), *submission.warnings)
    return run


def look(folder: RunFolder) -> RunStatus:
    """Return the run's status. A job that Slurm holds back after a requeue may begin now: see `release_hold`."""
    from slurmddp.launch.requeue_hold import release_hold
    from slurmddp.report.status import run_status

    status = run_status(folder)
    note = release_hold(folder, status.facts, status.view)
    return status.with_note(note) if note else status


def await_event(folder: RunFolder, seconds: float) -> None:
    """Sleep until the run has a new event, `seconds` at most."""
    end = time.monotonic() + seconds
    before = _size(folder.events)
    while (rest := end - time.monotonic()) > 0 and _size(folder.events) == before:
        time.sleep(min(rest, LOOK_EVERY))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
