"""Runs a prepared job here and now: as a step of the allocation that we are in, or on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable

from slurmddp.errors import UserError
from slurmddp.launch.cancel import ask_to_stop
from slurmddp.launch.checks import doubts
from slurmddp.launch.prepare import Prepared
from slurmddp.launch.submit import make_run_folder, record, refuse_problems, still_going
from slurmddp.report.cause import find_cause
from slurmddp.report.follow import Follower
from slurmddp.runs.evidence import evidence
from slurmddp.runs.layout import RunFolder
from slurmddp.slurm.local import job_id_of

#: What is said at the first, second and third Ctrl-C.
_WORDS = ("asking the ranks to save and end (once more: stop at once)", "stopping", "killing")


def run_here(prepared: Prepared, show: Callable[[str], None] | None, say: Callable[[str], None]) -> int:
    """Run job.sh as a child and follow its logs to its end; the exit code is job.sh's.

    show: gets the lines of the logs, None for none of them. Raises UserError where a Slurm site's job is asked for
    outside of any allocation.
    """
    plan = prepared.plan
    outer = os.environ.get("SLURM_JOB_ID")
    if plan.scheduler == "slurm" and outer is None:
        raise UserError(
            "this shell is in no Slurm allocation",
            todo=f"salloc --nodes={plan.layout.nodes} first, or `slurmddp submit`, or --site local",
        )
    refuse_problems(prepared)
    warnings = [*doubts(prepared), *still_going(prepared)]
    folder = make_run_folder(prepared, warnings)
    command = ("bash", str(folder.job_sh), str(folder.path))
    with folder.job_log.open("ab") as log:
        # A session of its own: Ctrl-C is for us, who then ask the ranks to end, and not for them directly.
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=plan.runs_root, start_new_session=True
        )
    if plan.scheduler == "slurm" and outer is not None:
        record(folder, outer, "allocation", command, prepared, warnings)
    else:
        record(folder, str(job_id_of(child.pid)), "local", command, prepared, warnings)
    for warning in warnings:
        say(f"warning: {warning}")
    say(f"run     {folder.id}\nfolder  {folder.path}")
    code, asked = _follow(child, folder, show, say)
    if code != 0 and not asked:
        _tell_cause(folder, say)
    return code


def _tell_cause(folder: RunFolder, say: Callable[[str], None]) -> None:
    """The last lines after torchrun's long traceback: why the run failed, and what tells more."""
    cause = find_cause(folder, evidence(folder).attempt)
    if cause is not None:
        say(f"failed: {cause}")
    say(f"more: slurmddp status {folder.id}")


def _follow(
    child: subprocess.Popen[bytes], folder: RunFolder, show: Callable[[str], None] | None, say: Callable[[str], None]
) -> tuple[int, bool]:
    """Show the logs until the child has ended: its exit code, and whether it was asked to end.

    First Ctrl-C: the stop file, second: SIGTERM, third: SIGKILL.
    """
    follower = Follower(folder)
    # Inside a batch job that is told to end: the run ends with it, in the seconds that are left.
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    asked = 0
    while True:
        try:
            code = child.wait(timeout=0.2)
            break
        except subprocess.TimeoutExpired:
            _show(follower, show)
        except KeyboardInterrupt:
            say(_WORDS[min(asked, 2)])
            if asked == 0:
                ask_to_stop(folder)
            elif asked == 1:
                child.terminate()
            else:
                os.killpg(child.pid, signal.SIGKILL)
            asked += 1
    _show(follower, show, to_the_end=True)
    return code if code >= 0 else 128 - code, asked > 0


def _show(follower: Follower, show: Callable[[str], None] | None, *, to_the_end: bool = False) -> None:
    for line in follower.new_lines(to_the_end=to_the_end):
        if show is not None:
            show(line)
