"""submit, resume, rerun, run, init, import: from a job to its scripts and its run."""

from __future__ import annotations

import os

from slurmddp.commands import options as opt
from slurmddp.commands.options import Json
from slurmddp.commands.run_options import LAST, Run, Yes, confirm
from slurmddp.commands.submit import DryRunOption, hand_over, show_dry_run
from slurmddp.launch.find import find_run


@opt.job_command(without=("job", "args", "module"))
def resume(
    asked: opt.Asked, run: Run = LAST, dry_run: DryRunOption = False, yes: Yes = False, as_json: Json = False
) -> None:
    """Continue a run from its newest checkpoint, in a new run. The same as `submit --resume RUN`. A script of your own
    gets the checkpoint folders of the older runs in SLURMDDP_RESUME_FROM."""
    if dry_run:
        show_dry_run(asked, run, as_json=as_json, full=False)
        return
    confirm(run, find_run(run, os.environ), "resume", yes=yes)
    hand_over(asked.prepare(strict=True, resume=run), as_json=as_json)
