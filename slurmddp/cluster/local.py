"""The machine itself as a scheduler: the job script runs as a process of its own, here and now (Linux)."""

import os
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slurmddp.cluster.base import JobId, JobView, clean_environment
from slurmddp.errors import ExternalError, UserError

if TYPE_CHECKING:
    import subprocess

_PROC = Path("/proc")


class Local:
    """Starts `bash SCRIPT ARGS...` detached, and finds it again by process id and start time."""

    def __init__(self) -> None:
        # Kept so that a child of this very process is reaped when it ends; any other's parent is init.
        self._children: list[subprocess.Popen[bytes]] = []

    def command(self, options: Sequence[str], script: str, args: Sequence[str], *, log: str) -> tuple[str, ...]:
        """Return `bash SCRIPT ARGS...`: options and log are Slurm's matter; `submit` gets the log."""
        return ("bash", script, *args)

    def submit(self, command: Sequence[str], cwd: Path, *, log: Path) -> JobId:
        """Start the command in a session of its own, its output appended to `log`, and return at once.

        The id is `local-PID-STARTTIME`, the start time in clock ticks since boot (proc(5), /proc/PID/stat,
        field 22), so that a process id which the kernel hands out again is never taken for this job. Raises
        UserError where bash, the log's folder or /proc is missing.
        """
        import subprocess  # here: 20 ms that a dry run does not need

        try:
            output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            todo = "choose another runs folder: --set paths.runs=FOLDER"
            raise UserError(f"the log {log} cannot be written: {error.strerror}", todo=todo) from error
        try:
            child = subprocess.Popen(
                list(command),
                cwd=cwd,
                env=clean_environment(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # outlives the terminal, and its process group is its own id
            )
        except OSError as error:
            todo = "the local site needs bash"
            raise UserError(f"{command[0]} could not be started in {cwd}: {error.strerror}", todo=todo) from error
        finally:
            os.close(output)
        self._children.append(child)
        try:
            return job_id_of(child.pid)
        except ProcessLookupError:
            child.terminate()
            todo = "the local site needs Linux with /proc"
            raise UserError(f"/proc/{child.pid}/stat cannot be read", todo=todo) from None

    def job(self, job_id: JobId) -> JobView | None:
        """RUNNING, or None when the process is gone (on another machine it is never seen)."""
        pid, started = _parts(job_id)
        self._reap()
        if _started(pid) != started:
            return None
        return JobView("RUNNING", restarts=0, nodes=os.uname().nodename, source="process")

    def jobs(self, job_ids: Iterable[JobId]) -> dict[JobId, JobView]:
        """Return `job` for many; those that are gone are left out."""
        return {job_id: view for job_id in job_ids if (view := self.job(job_id))}

    def cancel(self, job_id: JobId) -> bool:
        """SIGTERM to the job's process group if it is still this job; False if it is gone.

        Raises ExternalError.
        """
        if self.job(job_id) is None:
            return False
        pid, _ = _parts(job_id)
        try:
            os.killpg(pid, signal.SIGTERM)
        except ProcessLookupError:
            return False  # it ended between the look and the signal
        except PermissionError as error:
            raise ExternalError(f"process {pid} belongs to another user, so you cannot stop it") from error
        return True

    def requeue(self, job_id: JobId) -> None:
        """Always a UserError: there is no queue here."""
        raise UserError("the local site has no queue, so it cannot requeue a job", todo="submit again with --resume")

    def start_now(self, job_id: JobId) -> None:
        """Always a UserError: nothing waits here."""
        raise UserError("the local site has no queue, so it cannot hold a job")

    def _reap(self) -> None:
        self._children = [child for child in self._children if child.poll() is None]


def job_id_of(pid: int) -> JobId:
    """Return the id of a process that this one has just started. Raises ProcessLookupError if it is gone."""
    started = _started(pid, ended_too=True)
    if started is None:
        raise ProcessLookupError(pid)
    return JobId(f"local-{pid}-{started}")


def _parts(job_id: JobId) -> tuple[int, int]:
    if not job_id.is_local:
        raise UserError(f"job {job_id} is a Slurm job, not a process of the local site")
    _, pid, started = job_id.id.split("-")
    return int(pid), int(started)


def _started(pid: int, *, ended_too: bool = False) -> int | None:
    """Start time of a process in clock ticks since boot; None if there is none, or only its unreaped rest."""
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field, the program's name in parentheses, may itself have spaces and parentheses (proc(5)).
    fields = stat[stat.rindex(b")") + 2 :].split()
    if fields[0] in (b"Z", b"X") and not ended_too:
        return None
    return int(fields[19])  # field 22 of the whole line; this list starts at field 3
