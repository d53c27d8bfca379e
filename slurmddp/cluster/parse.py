"""Parsers of what Slurm's commands print: pure functions, tested on captured text.

Only plain formats are parsed (columns, --parsable2, scontrol's one-liner): the JSON output has changed with
nearly every release (meta-pytorch/torchx#1101, #1373).
"""

import re
from collections.abc import Iterable, Mapping

from slurmddp.cluster.base import JobId, JobView
from slurmddp.cluster.duration import limit_of
from slurmddp.cluster.states import base_state
from slurmddp.errors import ExternalError

_PARSABLE = re.compile(r"([0-9]+)(?:;([^\s;]+))?", re.ASCII)
_CLASSIC = re.compile(r"Submitted batch job ([0-9]+)(?: on cluster (\S+))?", re.ASCII)

# squeue --Format pads and cuts each field to the width that is asked for, in every version: columns need no
# separator.
_SQUEUE_COLUMNS = (
    ("JobID", 24), ("State", 20), ("RestartCnt", 12), ("StartTime", 24), ("EndTime", 24), ("TimeLimit", 20),
    ("Reason", 160), ("NodeList", 2048),
)  # fmt: skip
SQUEUE_FORMAT = ",".join(f"{name}:{width}" for name, width in _SQUEUE_COLUMNS)

# No field that only newer versions have (Restarts): sacct refuses the whole call for one unknown name.
# NodeList last.
SACCT_FORMAT = "JobIDRaw,State,ExitCode,Submit,Start,End,Timelimit,NodeList"
_SACCT_FIELDS = ("JobID", "State", "ExitCode", "Submit", "StartTime", "EndTime", "TimeLimit", "NodeList")

#: Joules that no job uses: Slurm prints its mark for "unknown" (near 2**64) in some versions.
_NO_ENERGY = 10**15

# src/common/slurm_errno.c and the commands' own texts; lower case.
_FORGOTTEN = re.compile(r"invalid job id specified|\bjob \S+ not found")
_UNREACHABLE = (
    "unable to contact slurm controller", "connection refused", "connection timed out", "timed out on send/recv",
    "communication connection failure", "no route to host", "network is unreachable", "name or service not known",
    "unable to establish configuration source", "could not establish a configuration source", "unable to resolve",
    "problem talking to the database", "slurmdbd connection", "failed to open persistent connection",
    "zero bytes were transmitted or received", "slurm backup controller in standby mode",
)  # fmt: skip
_NO_ACCOUNTING = ("accounting storage is disabled",)


def submitted(output: str) -> JobId:
    """Return the job id in sbatch's standard output.

    Sites wrap sbatch and print banners before or after. Taken is the last line that is `123` or `123;cluster`
    (--parsable), else the last `Submitted batch job 123 [on cluster X]` (wrappers that drop options).
    Raises ExternalError with the whole output: a job may be in the queue then.
    """
    lines = [line.strip() for line in output.splitlines()]
    for match in (_PARSABLE.fullmatch, _CLASSIC.search):
        for line in reversed(lines):
            if id_match := match(line):
                return JobId(id_match[1], id_match[2])
    shown = output.strip() or "(nothing)"
    raise ExternalError(
        "sbatch succeeded, but printed no job id. Its output:\n"
        f"{shown}\n"
        '  -> the job may be in the queue: check squeue --user "$USER" before you submit again'
    )


def is_forgotten(message: str) -> bool:
    """Return whether a command's error says that Slurm no longer (or never) knew the job."""
    return _FORGOTTEN.search(message.lower()) is not None


def is_unreachable(message: str) -> bool:
    """Return whether a command's error says that a daemon of Slurm did not answer."""
    return any(part in message.lower() for part in _UNREACHABLE)


def is_accounting_off(message: str) -> bool:
    """Return whether sacct says that the site keeps no accounting, which is normal and no error."""
    return any(part in message.lower() for part in _NO_ACCOUNTING)


def scontrol_job(output: str) -> JobView | None:
    """Return the job in the text of `scontrol show job --oneliner ID`; None if no line is a job.

    The fields stand in a fixed order (src/api/job_info.c of Slurm: JobId, JobName, UserId, ..., JobState,
    Reason, ..., NumTasks, ..., Command, Comment). What users write freely, the job's name and everything from
    Features on, is cut off: a name such as `x JobState=FAILED` must not be read as a state.
    """
    for line in reversed(output.splitlines()):
        if not line.startswith("JobId="):
            continue
        begin = line.find(" UserId=")
        if begin < 0:
            continue
        middle = re.split(r" (?:Features|Command|Comment)=", line[begin:], maxsplit=1)[0]
        field: dict[str, str] = {}
        for word in middle.split():
            name, equals, value = word.partition("=")
            if equals:
                field.setdefault(name, value)
        if "JobState" not in field:
            continue
        return _view("scontrol", field["JobState"], field, _number(field.get("Restarts")))
    return None


def squeue_jobs(output: str) -> dict[str, JobView]:
    """Jobs by number in the output of `squeue --noheader --Format=SQUEUE_FORMAT`; other lines are skipped."""
    jobs: dict[str, JobView] = {}
    for line in output.splitlines():
        field: dict[str, str] = {}
        begin = 0
        for name, width in _SQUEUE_COLUMNS:
            field[name] = line[begin : begin + width].strip()
            begin += width
        if not field["JobID"].isdecimal() or not field["State"]:
            continue
        jobs[field["JobID"]] = _view("squeue", field["State"], field, _number(field["RestartCnt"]))
    return jobs


def sacct_jobs(output: str) -> dict[str, JobView]:
    """Jobs by number in the output of `sacct -P -n -X -D --format=SACCT_FORMAT`.

    A requeued job has one record for each time it was queued; the newest one (by submit time: a requeue sets
    it anew) counts, and the older ones are its restarts. Other lines are skipped.
    """
    records: dict[str, list[tuple[str, int, dict[str, str]]]] = {}
    for index, line in enumerate(output.splitlines()):
        field = dict(zip(_SACCT_FIELDS, line.split("|", len(_SACCT_FIELDS) - 1), strict=False))
        if len(field) == len(_SACCT_FIELDS) and field["JobID"].isdecimal():
            records.setdefault(field["JobID"], []).append((_known(field["Submit"]) or "", index, field))
    newest = {job: max(starts)[2] for job, starts in records.items()}
    return {job: _view("sacct", field["State"], field, len(records[job]) - 1) for job, field in newest.items()}


def _view(source: str, state: str, field: Mapping[str, str], restarts: int | None) -> JobView:
    """field: by the names of scontrol, which squeue has, too."""
    exit_code, signal = _exit(field.get("ExitCode", ""))
    return JobView(
        word=base_state(state),
        reason=_known(field.get("Reason")) or "",
        restarts=restarts,
        exit_code=exit_code,
        signal=signal,
        nodes=_known(field.get("NodeList")) or "",
        start=_known(field.get("StartTime")),
        end=_known(field.get("EndTime")),
        time_limit=limit_of(field.get("TimeLimit")),
        source=source,
    )


def joules(output: str) -> float | None:
    """Return the energy in the output of `sacct --format=JobIDRaw,ConsumedEnergyRaw`; None where it has none.

    The record of a job stands for its steps, whose records (`42.0`) count only where that of the job is empty.
    """
    whole = parts = 0.0
    for line in output.splitlines():
        job, _, value = line.partition("|")
        if value.isdecimal() and 0 < int(value) < _NO_ENERGY:
            whole, parts = (whole, parts + int(value)) if "." in job else (whole + int(value), parts)
    return whole or parts or None


def numbers(job_ids: Iterable[JobId]) -> str:
    """Job numbers as squeue and sacct take them: comma separated."""
    return ",".join(job.id for job in job_ids)


def _known(value: str | None) -> str | None:
    """None if Slurm prints one of its words for "nothing"."""
    nothing = ("", "(null)", "None", "N/A", "n/a", "Unknown", "NONE", "None assigned")
    return None if value is None or value in nothing else value


def _number(value: str | None) -> int | None:
    return int(value) if value and value.isdecimal() else None


def _exit(value: str) -> tuple[int | None, int | None]:
    """(exit code, signal) of `code:signal`; a signal of 0 is none."""
    code, _, signal = value.partition(":")
    if not (code.isdecimal() and signal.isdecimal()):
        return None, None
    return int(code), int(signal) or None
