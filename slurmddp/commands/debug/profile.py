"""`slurmddp debug profile`: ask the ranks of a running job for a profile, and wait for its traces."""

import json
import os
import time

import typer

from slurmddp.commands import options as opt
from slurmddp.errors import ExternalError, UserError
from slurmddp.launch.find import find_own_run
from slurmddp.launch.inside import running_attempt
from slurmddp.records.events import Event, of
from slurmddp.records.rank_events import Profiled
from slurmddp.run.events import read_events
from slurmddp.run.gate import OwnRun
from slurmddp.run.layout import RunFolder
from slurmddp.run.state import judge, observe

_LOOK_EVERY = 1.0
#: Seconds between questions to Slurm.
_ASK_EVERY = 15.0


def ask_for_profile(folder: OwnRun, steps: int, *, all_ranks: bool) -> int:
    """Write the request, which rank 0 reads. Return how many profiles the run has until now.

    Raises UserError if nothing would read the request, ExternalError.
    """
    running_attempt(folder)
    if not folder.job_json.exists():
        todo = "use torch.profiler in the script, or `slurmddp debug stacks`"
        raise UserError(f"run {folder.id} runs your own script, whose steps slurmddp does not control", todo=todo)
    if folder.profile_request.exists():
        raise UserError(
            f"a profile of run {folder.id} was requested before, and has not begun",
            where=str(folder.profile_request),
            todo="wait until the run trains, or remove this file",
        )
    known = len(_profiles(folder))
    try:
        folder.held.write(
            folder.profile_request, json.dumps({"steps": steps, "ranks": "all" if all_ranks else "0"}) + "\n"
        )
    except OSError as error:
        raise UserError(f"{folder.profile_request} cannot be written: {error.strerror}") from None
    return known


def wait_for_profile(folder: OwnRun, known: int) -> tuple[Event, Profiled]:
    """Return the event of the profile after `known` others. If the run ends before: remove the request, and raise
    ExternalError.
    """
    ask_at = time.monotonic() + _ASK_EVERY
    try:
        while len(profiles := _profiles(folder)) == known:
            if time.monotonic() >= ask_at:
                facts, view = observe(folder)
                if not (state := judge(view, facts)).going and len(_profiles(folder)) == known:
                    raise ExternalError(f"run {folder.id} was over before the profile was written: {state.line}")
                ask_at = time.monotonic() + _ASK_EVERY
            time.sleep(_LOOK_EVERY)
        return profiles[-1]
    finally:
        folder.held.remove(folder.profile_request)


def _profiles(folder: RunFolder) -> list[tuple[Event, Profiled]]:
    return list(of(read_events(folder.events, folder.path).records, Profiled))


def profile(
    run: opt.Run = opt.LAST,
    steps: int = opt.value("N", "Steps to profile", default=5, min=1, max=1000),
    all_ranks: bool = opt.flag("--all-ranks", "Profile all ranks, not only rank 0"),
    as_json: opt.Json = False,
) -> None:
    """Profile some steps of a running job with torch.profiler, without a restart."""
    folder = find_own_run(run, os.environ, to="look into its job")
    known = ask_for_profile(folder, steps, all_ranks=all_ranks)
    opt.say(f"profiling {steps} steps; Ctrl-C withdraws the request if they have not begun")
    event, profiled = wait_for_profile(folder, known)
    if as_json:
        typer.echo(opt.json_text(event.write()))
    elif profiled.files:
        typer.echo(f"steps   {profiled.step} to {profiled.last}")
        for path in profiled.files:
            typer.echo(f"trace   {path}")
        opt.say("to see one: open it in https://ui.perfetto.dev, or in chrome://tracing")
    if profiled.error:
        raise ExternalError(f"torch.profiler failed: {profiled.error}")
