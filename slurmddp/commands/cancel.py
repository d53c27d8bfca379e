"""cancel: end a run for good."""

import os

import typer

from slurmddp.api import look
from slurmddp.commands import options as opt
from slurmddp.launch.cancel import cancel_other_version, cancel_run, wait_for_job, wait_until_over
from slurmddp.launch.find import find_any_version
from slurmddp.run.gate import own
from slurmddp.run.manifest import other_version
from slurmddp.run.state import next_commands


def cancel(
    run: opt.Run = opt.LAST,
    now: bool = opt.flag("--now", "Cancel at once, with no time to save"),
    wait: bool = opt.flag("--wait", "Wait until the job has exited"),
    yes: opt.Yes = False,
    as_json: opt.Json = False,
) -> None:
    """Cancel a run. A bundled task saves a checkpoint first; a script of your own has some time to save, then gets
    SIGTERM. The job is not requeued."""
    folder = own(find_any_version(run, os.environ), to="cancel it")
    opt.confirm(run, folder, "cancel", yes=yes)
    older = other_version(folder)
    done = cancel_other_version(folder, now=now) if older else cancel_run(folder, now=now)
    if not as_json:
        typer.echo(done.text)
    end = None
    if wait:
        end = wait_for_job(folder) if older else wait_until_over(lambda: look(folder).state).line
    if as_json:
        jobs = [{"job_id": str(job_id), "action": action} for job_id, action in done.jobs]
        next_ = [] if older else next_commands(folder.id, look(folder).state.state)
        fields = {"run_id": folder.id, "jobs": jobs, "text": done.text, "end": end, "next": next_}
        typer.echo(opt.json_text(fields))
    elif end is not None:
        typer.echo(end)
