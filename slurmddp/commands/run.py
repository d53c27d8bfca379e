"""run: a job in the foreground, its logs followed; the run is cancelled when the following ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import typer

from slurmddp.api import look
from slurmddp.cluster.local import job_id_of
from slurmddp.commands import options as opt
from slurmddp.commands.terminal import Progress, write_line
from slurmddp.errors import UserError
from slurmddp.job.resolve import Request
from slurmddp.launch.cancel import ask_to_stop
from slurmddp.launch.prepare import Prepared, prepare
from slurmddp.launch.problems import refuse_problems
from slurmddp.launch.submit import continue_run, discard, job_warnings, make_run_folder, record
from slurmddp.launch.workdir import files_before, workdir_in
from slurmddp.records.job_events import CancelRequested, JobEnded
from slurmddp.run.cause import newest_cause
from slurmddp.run.evidence import evidence
from slurmddp.run.gate import OwnRun
from slurmddp.run.layout import RunFolder
from slurmddp.run.logs import Follower
from slurmddp.run.state import judge
from slurmddp.styled import labelled
from slurmddp.visible import one_line

#: Seconds between two looks at the logs.
_LOOK_EVERY = 0.2
#: Seconds that ranks have to save where nobody can press Ctrl-C a second time: the default of `timeouts.stop`.
_PATIENCE = 120.0
#: What the first, second and third Ctrl-C do.
_MESSAGES = (
    "run {} was asked to save and exit (Ctrl-C again: stop without waiting)",
    "stopping run {} (Ctrl-C again: kill it)",
    "killing run {}",
)


class Foreground:
    """Starts job.sh, follows its logs, and cancels the run if anything ends the following before the run has ended.

    While it is open, Ctrl-C, SIGHUP and SIGTERM raise nothing: they become requests to the run, whatever line of code
    they interrupt. Open it before the job starts. A signal that is ignored (nohup) stays ignored.
    """

    def __init__(self, folder: OwnRun) -> None:
        self.requests = 0
        self._folder = folder
        self._said = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._terminate = False
        self._deadline: float | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Foreground:
        for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._child is not None and self._child.poll() is None:
            self._cancel("the output was closed" if isinstance(error, BrokenPipeError) else repr(error))
        for signum, before in self._before.items():
            signal.signal(signum, before)
        if self.requests > 2 and self._child is not None and self._child.returncode == -signal.SIGKILL:
            self._record_kill()

    def start(self, command: Sequence[str], cwd: str) -> int:
        """Start the command, its output appended to the run's batch log. Returns its process id."""
        with self._folder.job_log.open("ab") as log:
            # A session of its own: the terminal's Ctrl-C reaches the ranks through the stop file only.
            self._child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=cwd, start_new_session=True
            )
        self._act()  # a signal may have come before there was a process
        return self._child.pid

    def follow(self, show: Callable[[bytes], None]) -> int:
        """Show the logs until the job has ended; its exit code, 128 + N if signal N ended it."""
        follower = Follower(self._folder)
        while (code := self._wait()) is None:
            for line in follower.new_lines():
                show(line)
        for line in follower.new_lines(to_the_end=True):
            show(line)
        return code if code >= 0 else 128 - code

    def _on_signal(self, signum: int, _frame: object) -> None:
        """Act at once: the code that was interrupted may be waiting for a reader of our output. `_wait` reports it."""
        if signum != signal.SIGTERM:
            self.requests += 1
        if signum == signal.SIGHUP:
            self._deadline = time.monotonic() + _PATIENCE
        self._terminate |= signum == signal.SIGTERM or self.requests == 2
        self._act()

    def _act(self) -> None:
        """Pass on to the run what was requested and not passed on yet. Never raises."""
        if self._child is None or self._child.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if self.requests > 2:
                os.killpg(self._child.pid, signal.SIGKILL)
            elif self._terminate:
                self._terminate = False
                self._child.terminate()
            elif self.requests == 1 and not self._folder.stop.exists():
                try:
                    ask_to_stop(self._folder)
                except OSError:  # such as a full disk: SIGTERM asks the ranks for the same
                    self.requests = 2
                    self._child.terminate()

    def _cancel(self, reason: str) -> None:
        """Cancel the run after the following failed: it saves and exits, and we wait for that."""
        self.requests = max(self.requests, 1)
        self._deadline = time.monotonic() + _PATIENCE
        self._said = self.requests
        self._tell(f"{reason}: cancelling run {self._folder.id}")
        self._act()
        while self._wait() is None:
            pass

    def _record_kill(self) -> None:
        """Write the end of the run for job.sh, which could not: else `status` would call the run lost."""
        self._folder.record(CancelRequested(now=True))
        self._folder.record(JobEnded(137, "KILL", "", "", "cancelled"))

    def _wait(self) -> int | None:
        """Wait a moment for the job: its exit code, or None while it runs."""
        assert self._child is not None
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._deadline, self._terminate = None, True
        self._act()  # again: job.sh removes a stop file that it finds when it begins
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._child.wait(timeout=_LOOK_EVERY)
        if self.requests > self._said:
            self._said = self.requests
            self._tell(_MESSAGES[min(self.requests, 3) - 1].format(self._folder.id))
        return code

    def _tell(self, text: str) -> None:
        with contextlib.suppress(OSError):  # stderr may be what nobody reads
            opt.say(text)


def run_foreground(prepared: Prepared, *, quiet: bool) -> tuple[int, RunFolder]:
    """Run job.sh as a child and follow its logs to its end. Whatever ends the following cancels the run.

    Returns the exit code of `status` if the run was cancelled, else that of job.sh; and the run.
    Raises UserError where a Slurm site's job is asked for outside of any allocation.
    """
    plan = prepared.plan
    outer = os.environ.get("SLURM_JOB_ID")
    if plan.site.queues and outer is None:
        todo = f"first run salloc --nodes={plan.nodes.max}; or use `slurmddp submit`, or --site local"
        raise UserError("this shell is not in a Slurm allocation", todo=todo)
    refuse_problems(prepared)
    files = files_before(prepared)
    warnings = job_warnings(prepared, files)
    with Progress() as progress:
        folder = make_run_folder(prepared, warnings, files=files, tell=progress.tell)
    try:
        warnings += continue_run(prepared, folder)
    except UserError:
        discard(folder)
        raise
    command = ("bash", str(folder.job_sh), str(folder.path))
    with Foreground(folder) as job:
        pid = job.start(command, plan.runs_root)
        if plan.site.queues and outer is not None:
            record(folder, outer, "allocation", command, warnings)
        else:
            record(folder, str(job_id_of(pid)), "local", command, warnings)
        for warning in warnings:
            opt.say(labelled("warning", warning))
        opt.say(f"site    {plan.site.name} ({prepared.resolved.site_from})\n{_where(prepared, outer)}")
        if plan.program.own:
            opt.say(f"in      {workdir_in(plan, folder.path)}")
        opt.say(f"run     {folder.id}\nfolder  {folder.path}")
        code = job.follow((lambda line: None) if quiet else write_line)
    if code == 0 or job.requests:
        return judge(None, evidence(folder)).exit_code, folder
    # After torchrun's long traceback: why it failed, and which command shows more.
    if (cause := newest_cause(folder)) is not None:
        opt.say(f"failed: {one_line(cause.line_with_log())}")
    opt.say(f"more: slurmddp status {folder.id}")
    return code, folder


def _where(prepared: Prepared, outer: str | None) -> str:
    """Return on what the job runs: the nodes of this shell's Slurm job, or this machine."""
    plan = prepared.plan
    gpus, ranks = plan.layout.gpus_per_node, plan.nodes.ranks_per_node
    each = f", {ranks} rank{'s' * (ranks > 1)}" if ranks else ""
    each += f" on {gpus} GPU{'s' * (gpus > 1)}" if gpus else " on the cores"
    if plan.site.queues:
        count = plan.nodes.max
        return f"uses    the allocation of Slurm job {outer}: {count} node{'s' * (count > 1)}{each} per node"
    beside = f"; Slurm job {outer}, in which this shell is, has nodes that it does not use" if outer else ""
    return f"uses    this machine{each}{beside}"


@opt.job_command(without=opt.OF_SUBMISSION)
def run(
    request: Request,
    resume: opt.Resume = None,
    ranks: int | None = opt.value("N", "Ranks per node  [default: one per GPU]", min=1, max=1024),
    quiet: bool = opt.flag("--quiet", "Do not show the output of the ranks"),
    as_json: bool = opt.flag("--json", "At the end, print the status as JSON on stdout; implies --quiet"),
) -> None:
    """Run a job now, inside an allocation (salloc, a batch job) or on this machine. Ctrl-C cancels it."""
    if ranks is not None:
        request = request.adding(("resources.ranks_per_node", str(ranks), "--ranks"))
    prepared = prepare(replace(request, resume=resume, inside=True))
    opt.show_notes(prepared)

    try:
        code, folder = run_foreground(prepared, quiet=quiet or as_json)
        if as_json:
            typer.echo(opt.json_text({**look(folder).as_dict(), "exit_code": code}))
    except BrokenPipeError:
        opt.drop_output()
        code = 1  # cancelled, as `status` reports it
    raise typer.Exit(code)
