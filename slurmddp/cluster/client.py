"""Slurm's commands, run: sbatch, scontrol, squeue, sacct, scancel."""

import os
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmddp.cluster import parse
from slurmddp.cluster.base import JobId, JobView, clean_environment, log_option
from slurmddp.errors import ExternalError, UserError

_SUBMIT_TIMEOUT = 120.0  # seconds: busy controllers take a minute, and giving up early risks a second submission
_ASK_TIMEOUT = 60.0
_LOG_IN = "use a login node of the cluster, or `module load slurm` if the site has that module"
# scancel of a job that has ended, or that nobody knows, is silent and ends with 0; only --verbose tells
# (tried on 24.11.5).
_ALREADY_OVER = ("already completing or completed", "job/step already complet")
#: A shell's exit code for a program that was killed is above this: a wrapper of sbatch may be one.
_KILLED = 128
# How many job numbers go on one command line: far below any limit, and one call for what `runs` lists.
_BATCH = 1000


@dataclass(frozen=True)
class Answer:
    """What one command printed. `missing`: it is not on this machine."""

    code: int
    out: str
    err: str
    missing: bool = False

    @property
    def text(self) -> str:
        """Everything that it printed, standard error first, as it goes into a message."""
        return "\n".join(part for part in (self.err.rstrip(), self.out.rstrip()) if part) or "(it printed nothing)"


class Slurm:
    """A cluster's Slurm as seen from the machine that this runs on. Holds no state and caches nothing."""

    @staticmethod
    def sbatch_command(options: Sequence[str], script: str, args: Sequence[str]) -> tuple[str, ...]:
        """The whole sbatch command line; pure, so that a dry run shows just what a real one runs."""
        return ("sbatch", "--parsable", *options, script, *args)

    def command(self, options: Sequence[str], script: str, args: Sequence[str], *, log: str) -> tuple[str, ...]:
        """`sbatch_command` with the log's path as an option.

        Raises UserError for a path that sbatch cannot take.
        """
        return self.sbatch_command((log_option(log), *options), script, args)

    def submit(self, command: Sequence[str], cwd: Path, *, log: Path | None = None) -> JobId:
        """Run an sbatch command in `cwd`, its environment free of what an outer job left in it.

        `log` is not used: it stands in the command. Raises UserError where sbatch is absent or refuses the
        job (its message whole), ExternalError where it did not answer, or with an id that nobody understands:
        then a job may be in the queue.
        """
        answer = ask(command, timeout=_SUBMIT_TIMEOUT, cwd=cwd, doing="submitting the job")
        if answer.missing:
            todo = f"{_LOG_IN}; `slurmddp submit --dry-run` shows the scripts without Slurm"
            raise UserError(f"{command[0]} is not on this machine", todo=todo)
        if answer.code == 0:
            return parse.submitted(answer.out)
        if parse.is_unreachable(answer.text) or answer.code < 0 or answer.code > _KILLED:
            raise ExternalError(
                f"Slurm did not answer sbatch (exit code {answer.code}):\n{answer.text}\n"
                '  -> the job may be in the queue anyway: check squeue --user "$USER", then try again'
            )
        todo = (
            "change the setting that it names (partition, account, time, ...) in the job file or with --set; "
            "`slurmddp submit --dry-run` shows the scripts"
        )
        if "invalid partition" in answer.text and (names := self._partitions()):
            todo = f"this cluster has: {', '.join(names)}; use --partition NAME, or resources.partition"
        raise UserError(f"sbatch refused the job (exit code {answer.code}):\n{answer.text}", todo=todo)

    def _partitions(self) -> list[str]:
        """Return the names of the partitions; none where Slurm does not say."""
        try:
            answer = ask(("sinfo", "--noheader", "--format=%R"))
        except ExternalError:
            return []
        return sorted(set(answer.out.split())) if answer.code == 0 else []

    def job_of_run(self, run_id: str) -> JobId | None:
        """Return this user's newest job whose script is job.sh in the folder of this run; None if there is none.

        Raises UserError, ExternalError.
        """
        answer = ask(("squeue", "--me", "--noheader", "--states=all", "--format=%i %o"))
        _require_success("squeue", answer)
        ids = re.findall(rf"^([0-9]+) .*/{re.escape(run_id)}/job\.sh(?: |$)", answer.out, re.MULTILINE)
        return JobId(max(ids, key=int)) if ids else None

    def job(self, job_id: JobId) -> JobView | None:
        """Return what Slurm says of the job now, or None if Slurm has forgotten it.

        Asked in turn: scontrol (one small request; it keeps ended jobs for MinJobAge, 300 s by default),
        squeue where scontrol is not there or not allowed, then accounting. A site without accounting is
        normal: None. Raises ExternalError where a daemon does not answer, which is not the same as a
        forgotten job.
        """
        answer = ask(("scontrol", *_cluster(job_id), "--oneliner", "show", "job", job_id.id))
        if answer.code == 0 and (view := parse.scontrol_job(answer.out)):
            return view
        if answer.code != 0 and not parse.is_forgotten(answer.text):
            _refuse_unreachable("scontrol", answer)
            if view := self._squeue([job_id]).get(job_id):
                return view
        return self._sacct([job_id]).get(job_id)

    def jobs(self, job_ids: Iterable[JobId]) -> dict[JobId, JobView]:
        """Return what Slurm says of many jobs, two commands for each thousand of them; forgotten ones are left out.

        Raises ExternalError where a daemon does not answer.
        """
        views: dict[JobId, JobView] = {}
        clusters: dict[str | None, list[JobId]] = {}
        for job_id in dict.fromkeys(job_ids):
            clusters.setdefault(job_id.cluster, []).append(job_id)
        for ids in clusters.values():
            for first in range(0, len(ids), _BATCH):
                part = ids[first : first + _BATCH]
                views.update(self._squeue(part))
                if rest := [job_id for job_id in part if job_id not in views]:
                    views.update(self._sacct(rest))
        return views

    def energy(self, job_ids: Sequence[JobId]) -> float | None:
        """Return the joules that jobs of one cluster used, all starts together; None where accounting does not know."""
        jobs = f"--jobs={parse.numbers(job_ids)}"
        words = ("--parsable2", "--noheader", "--duplicates", jobs, "--format=JobIDRaw,ConsumedEnergyRaw")
        try:
            answer = ask(("sacct", *_cluster(job_ids[0]), *words))
        except ExternalError:
            return None
        return parse.joules(answer.out) if answer.code == 0 else None

    def cancel(self, job_id: JobId) -> bool:
        """scancel the job; False if Slurm had nothing left to end. Raises UserError, ExternalError."""
        answer = ask(("scancel", "--verbose", *_cluster(job_id), job_id.id), doing=f"cancelling job {job_id}")
        _require("scancel", answer)
        # Whatever the exit code: versions differ in it.
        if parse.is_forgotten(answer.text) or any(part in answer.text.lower() for part in _ALREADY_OVER):
            return False
        _require_success("scancel", answer)
        return True

    def requeue(self, job_id: JobId) -> None:
        """`scontrol requeue`: Slurm ends the job and queues it again.

        Raises UserError, ExternalError (its message).
        """
        answer = ask(("scontrol", *_cluster(job_id), "requeue", job_id.id), doing=f"requeuing job {job_id}")
        _require_success("scontrol", answer, f"requeue of job {job_id} ")

    def start_now(self, job_id: JobId) -> None:
        """`scontrol update StartTime=now`, which a job's owner may do: Slurm's hold after a requeue ends.

        Raises UserError, ExternalError (its message).
        """
        command = ("scontrol", *_cluster(job_id), "update", f"JobId={job_id.id}", "StartTime=now")
        answer = ask(command, doing=f"releasing job {job_id}")
        _require_success("scontrol", answer, "update ")

    def _squeue(self, job_ids: Sequence[JobId]) -> dict[JobId, JobView]:
        """Jobs that squeue knows, ended ones within MinJobAge included. Jobs of one cluster only."""
        words = ("--noheader", "--states=all", f"--jobs={parse.numbers(job_ids)}", f"--Format={parse.SQUEUE_FORMAT}")
        answer = ask(("squeue", *_cluster(job_ids[0]), *words))
        # Asked for one job, squeue fails if it is unknown; asked for several, it leaves the unknown ones out.
        if not parse.is_forgotten(answer.text):
            _require_success("squeue", answer)
        known = parse.squeue_jobs(answer.out)
        return {job_id: known[job_id.id] for job_id in job_ids if job_id.id in known}

    def _sacct(self, job_ids: Sequence[JobId]) -> dict[JobId, JobView]:
        """Jobs that accounting knows; empty where the site keeps none. Jobs of one cluster only."""
        words = ("--parsable2", "--noheader", "--allocations", "--duplicates", f"--jobs={parse.numbers(job_ids)}")
        answer = ask(("sacct", *_cluster(job_ids[0]), *words, f"--format={parse.SACCT_FORMAT}"))
        if answer.missing or parse.is_accounting_off(answer.text):
            return {}
        _require_success("sacct", answer)
        known = parse.sacct_jobs(answer.out)
        return {job_id: known[job_id.id] for job_id in job_ids if job_id.id in known}


def _cluster(job_id: JobId) -> tuple[str, ...]:
    return ("-M", job_id.cluster) if job_id.cluster else ()


def _require(name: str, answer: Answer) -> None:
    if answer.missing:
        raise UserError(f"{name} is not on this machine", todo=_LOG_IN)
    _refuse_unreachable(name, answer)


def _require_success(name: str, answer: Answer, doing: str = "") -> None:
    _require(name, answer)
    if answer.code != 0:
        raise ExternalError(f"{name} {doing}failed (exit code {answer.code}):\n{answer.text}")


def _refuse_unreachable(name: str, answer: Answer) -> None:
    if answer.code != 0 and parse.is_unreachable(answer.text):
        raise ExternalError(f"Slurm did not answer {name}, so the job's state is unknown:\n{answer.text}")


def ask(command: Sequence[str], *, timeout: float = _ASK_TIMEOUT, cwd: Path | None = None, doing: str = "") -> Answer:
    """Run one command: no shell, no input, a clean environment.

    A missing program is an answer, a time-out an error.
    """
    import subprocess  # here: 20 ms that a dry run does not need

    try:
        done = subprocess.run(
            list(command),
            cwd=cwd,
            env=clean_environment(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ExternalError(
            f"{shlex.join(command)} did not finish within {timeout:g} s"
            + (f" ({doing}); it may have worked anyway" if doing else "")
            + "\n  -> Slurm's controller is slow or down: check `scontrol ping` and squeue, then try again"
        ) from error
    except OSError as error:
        if isinstance(error, FileNotFoundError) and (cwd is None or cwd.is_dir()):
            return Answer(127, "", f"{command[0]}: command not found", missing=True)
        raise ExternalError(f"{command[0]} could not be started in {cwd or Path.cwd()}: {error}") from error
    return Answer(done.returncode, _text(done.stdout), _text(done.stderr))


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", errors="backslashreplace")
