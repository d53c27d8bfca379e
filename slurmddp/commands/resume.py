"""resume: continue a run in a new one."""

import os
from dataclasses import replace

from slurmddp.commands import options as opt
from slurmddp.commands.submit import DryRunOption, hand_over, show_dry_run
from slurmddp.job.resolve import Request
from slurmddp.launch.find import find_run
from slurmddp.launch.prepare import prepare, prepare_or_refuse


@opt.job_command(without=("job", "args", "module"))
def resume(
    request: Request,
    run: opt.Run = opt.LAST,
    dry_run: DryRunOption = False,
    yes: opt.Yes = False,
    as_json: opt.Json = False,
) -> None:
    """Continue a run from its newest checkpoint, in a new run. The same as `submit --resume RUN`. A script of your own
    gets the checkpoint folders of the older runs in SLURMDDP_RESUME_FROM."""
    request = replace(request, resume=run)
    if dry_run:
        show_dry_run(*prepare_or_refuse(request), as_json=as_json)
        return
    opt.confirm(run, find_run(run, os.environ), "resume", yes=yes)
    hand_over(prepare(request), as_json=as_json)
