"""Runs a prepared job in the foreground: as a step of this shell's allocation, or on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable

from slurmddp.cluster.local import job_id_of
from slurmddp.errors import UserError
from slurmddp.launch.follow import Foreground
from slurmddp.launch.job_check.rule import advice
from slurmddp.launch.prepare import Prepared
from slurmddp.launch.problems import refuse_problems
from slurmddp.launch.submit import continue_run, discard, make_run_folder, record, still_going
from slurmddp.launch.workdir import files_before, relative_paths, shared_files, workdir_in
from slurmddp.run.cause import find_cause
from slurmddp.run.evidence import evidence
from slurmddp.run.layout import RunFolder
from slurmddp.run.state import judge
from slurmddp.styled import labelled
from slurmddp.visible import one_line


def run_foreground(
    prepared: Prepared,
    show: Callable[[bytes], None] | None,
    say: Callable[[str], None],
    tell: Callable[[str], None] = lambda doing: None,
) -> tuple[int, RunFolder]:
    """Run job.sh as a child and follow its logs to its end. Whatever ends the following cancels the run.

    show: gets the lines of the logs, None for none of them; tell: what is being done before the job starts.
    Returns the exit code of `status` if the run was cancelled, else that of job.sh; and the run.
    Raises UserError where a Slurm site's job is asked for outside of any allocation.
    """
    plan = prepared.plan
    outer = os.environ.get("SLURM_JOB_ID")
    if plan.scheduler == "slurm" and outer is None:
        raise UserError(
            "this shell is not in a Slurm allocation",
            todo=f"first run salloc --nodes={plan.nodes.max}; or use `slurmddp submit`, or --site local",
        )
    refuse_problems(prepared)
    files = files_before(prepared)
    warnings = [*advice(prepared), *shared_files(plan, files), *relative_paths(plan), *still_going(prepared)]
    folder = make_run_folder(prepared, warnings, files=files, tell=tell)
    try:
        warnings += continue_run(prepared, folder)
    except UserError:
        discard(folder)
        raise
    command = ("bash", str(folder.job_sh), str(folder.path))
    with Foreground(folder, say) as job:
        pid = job.start(command, plan.runs_root)
        if plan.scheduler == "slurm" and outer is not None:
            record(folder, outer, "allocation", command, warnings)
        else:
            record(folder, str(job_id_of(pid)), "local", command, warnings)
        for warning in warnings:
            say(labelled("warning", warning))
        say(f"site    {plan.site} ({prepared.resolved.site_from})\n{_where(prepared, outer)}")
        if plan.program.own:
            say(f"in      {workdir_in(plan, folder.path)}")
        say(f"run     {folder.id}\nfolder  {folder.path}")
        code = job.follow(show or (lambda _line: None))
    if code == 0 or job.requests:
        return judge(None, evidence(folder)).exit_code, folder
    _tell_cause(folder, say)
    return code, folder


def _where(prepared: Prepared, outer: str | None) -> str:
    """Return on what the job runs: the nodes of this shell's Slurm job, or this machine."""
    plan = prepared.plan
    gpus, ranks = plan.layout.gpus_per_node, plan.nodes.ranks_per_node
    each = f", {ranks} rank{'s' * (ranks > 1)}" if ranks else ""
    each += f" on {gpus} GPU{'s' * (gpus > 1)}" if gpus else " on the cores"
    if plan.scheduler == "slurm":
        count = plan.nodes.max
        return f"uses    the allocation of Slurm job {outer}: {count} node{'s' * (count > 1)}{each} per node"
    beside = f"; Slurm job {outer}, in which this shell is, has nodes that it does not use" if outer else ""
    return f"uses    this machine{each}{beside}"


def _tell_cause(folder: RunFolder, say: Callable[[str], None]) -> None:
    """Print why the run failed, and which command shows more, after torchrun's long traceback."""
    cause = find_cause(folder, evidence(folder).attempt)
    if cause is not None:
        say(f"failed: {one_line(cause.line_with_log())}")
    say(f"more: slurmddp status {folder.id}")
