"""The one verdict about a run, from what Slurm says and what the run left in its folder."""

from dataclasses import dataclass, field, replace

from slurmddp.cluster.base import JobView
from slurmddp.cluster.choose import scheduler_for
from slurmddp.cluster.reasons import is_held
from slurmddp.cluster.states import JobState
from slurmddp.records.marker import Marker
from slurmddp.records.stop import BY_HAND, CANCELLED
from slurmddp.records.submission import Submission
from slurmddp.run.evidence import Evidence, evidence
from slurmddp.run.layout import RunFolder
from slurmddp.run.unanswered import with_job

# Exit codes of `status` by state: 0 done, 1 ended otherwise (or never began), 3 still going.
EXIT_CODES = {
    "done": 0,
    "stopped": 1, "failed": 1, "timed out": 1, "node failure": 1, "cancelled": 1, "out of memory": 1,
    "lost": 1, "not submitted": 1,
    "pending": 3, "running": 3, "requeued": 3, "stopping": 3,
}  # fmt: skip

# States of a job whose run has another word.
_RUNS = {JobState.PREPARING: "pending", JobState.ENDING: "stopping", JobState.HELD: "requeued"}
_PLAIN_REASONS = ("NonZeroExitCode", "NodeDown")
_SIGKILL = 9
#: Details that continue the state's word; any other follows a colon.
_CONTINUES = ("by you", "on ", "before it", "while pending")


@dataclass(frozen=True)
class RunState:
    """The verdict.

    state: a key of EXIT_CODES; detail: one line for people, "" where there is nothing to add. step: that
    the newest attempt ended at; reached: the same for people, as `detail` may end with it.
    """

    state: str
    detail: str = ""
    step: int | None = field(default=None, compare=False)
    reached: str = field(default="", compare=False)

    @property
    def exit_code(self) -> int:
        """Return 0 for done, 3 for still going, and 1 for everything else."""
        return EXIT_CODES[self.state]

    @property
    def line(self) -> str:
        """The state and its detail: `cancelled by you, checkpoint saved`, `failed: exit code 1`."""
        return self._line(self.detail)

    @property
    def line_without_step(self) -> str:
        """The same without the step, where something else shows it."""
        return self._line(self.detail.removesuffix(self.reached).removesuffix(", "))

    def _line(self, detail: str) -> str:
        if not detail:
            return self.state
        return f"{self.state}{' ' if detail.startswith(_CONTINUES) else ': '}{detail}"

    @property
    def going(self) -> bool:
        """Return whether the run may still change by itself."""
        return self.exit_code == 3


def observe(folder: RunFolder) -> tuple[Evidence, JobView | None]:
    """Return what the run folder and the scheduler say. Raises UserError, OSError, ExternalError."""
    facts = with_job(folder, evidence(folder))
    view = _view(facts)
    if judge(view, facts).going:
        return facts, view
    again = evidence(folder)  # the run may have written its end after the first look, and before the scheduler's
    return again, view if again.job_id == facts.job_id else _view(again)  # or sbatch may have just answered


def _view(facts: Evidence) -> JobView | None:
    return scheduler_for(facts.job_id).job(facts.job_id) if facts.job_id else None


def judge(job: JobView | None, facts: Evidence, *, answered: bool = True) -> RunState:
    """Return the state of a run. Pure.

    job:      what the scheduler says of it now; None if it has forgotten the job, or was never given one.
    answered: False where the scheduler could not be asked: nothing is then concluded from its silence.

    Slurm's word wins while it knows the job. Three things are beyond it: a script that ended with 0, or with
    an error, after a clean stop (the marker tells), and a job that we only ran inside (`slurmddp run` in an
    allocation), which continues when our script has exited. Once Slurm has forgotten the job, the newest
    attempt's marker and its job_ended decide; a script that began and left no end is lost. A user's own
    script writes no marker: exit code 0 is done. A recorded cancel wins over whatever else ended the run.
    """
    step = facts.marker.step if facts.marker else None
    return replace(_judge(job, facts, answered), step=step, reached=_progress(facts.marker))


def _judge(job: JobView | None, facts: Evidence, answered: bool) -> RunState:
    if facts.submission is None and facts.started is None:
        return RunState("not submitted", "the run folder exists, but no job was submitted from it")
    if facts.submission is not None and facts.unanswered:
        return _without_answer(facts.submission, answered)
    inside = facts.submission is None or facts.submission.inside
    if job and not (inside and facts.ended):
        verdict = _by_slurm(job, facts)
    elif not answered and (facts.requeued or not facts.ended):
        return _unanswered(facts)
    else:
        verdict = _by_folder(facts)
    return _cancelled(verdict, facts) if facts.cancel_requested else verdict


def _without_answer(sent: Submission, answered: bool) -> RunState:
    silent = f"sbatch did not answer at {sent.time}" + (f" ({sent.failed})" if sent.failed else "")
    if answered:
        return RunState("not submitted", f"{silent}, and no job of this run is in the queue")
    return RunState("pending", f"{silent}, nor does Slurm now: the job may be in the queue")


def _cancelled(verdict: RunState, facts: Evidence) -> RunState:
    """Return the state of a run that the user has cancelled: a cancel ends it, whatever else happened to it."""
    if verdict.state == "requeued":
        return replace(verdict, detail=_join(verdict.detail, "cancelled by you: its next start exits at once"))
    if verdict.going or verdict.state in ("done", "cancelled", "not submitted"):
        return verdict
    how = "" if verdict.state in ("lost", "failed", "stopped") else verdict.state
    began = "" if facts.started else "before it started"
    return RunState("cancelled", _join("by you" if facts.started else "", how, began, _progress(facts.marker)))


def _by_slurm(job: JobView, facts: Evidence) -> RunState:
    marker = facts.marker
    ended = _exit_text(job.exit_code, job.signal)
    if job.state is JobState.PENDING:
        return _pending(job, facts)
    if job.state is JobState.FAILED and job.signal == _SIGKILL and facts.started:
        return _script_killed(facts)
    if job.state in (JobState.COMPLETED, JobState.FAILED, JobState.PREEMPTED):
        verdict = _by_marker(facts, "preempted" if job.state is JobState.PREEMPTED else "")
        if verdict is not None:
            return verdict
    if job.state is JobState.TIMED_OUT and (kept := _not_requeued(facts)) is not None:
        return kept
    if job.state is JobState.COMPLETED:
        return RunState("done", _progress(marker))
    if job.state is JobState.FAILED and facts.cancel_requested:
        return RunState("cancelled", _join(ended, _progress(marker)))
    if job.state is JobState.PREEMPTED and facts.ended and facts.ended.decision == "done":
        return RunState("done", _progress(marker))  # Slurm remembers a preemption of an earlier start
    if job.state is JobState.PREEMPTED:
        return RunState("cancelled", _join("preempted", _progress(marker)))
    if job.state is JobState.UNKNOWN:
        return RunState("lost", f"unknown Slurm state {job.word}: see squeue(1)")
    state = _RUNS.get(job.state, job.state.text)
    if state == "running":
        where = f"on {job.nodes}" if job.nodes else ""
        odd = "" if job.word == "RUNNING" else job.word.lower()
        if facts.stop is None:
            return RunState(state, _join(where, odd))
        why = f" ({facts.stop.reason})" if facts.stop.reason != BY_HAND else ""
        return RunState("stopping", _join(where, odd, f"asked to save and exit{why}"))
    if state == "requeued":
        todo = f"held: `scontrol release {facts.job_id.id}`" if job.state is JobState.HELD and facts.job_id else ""
        return RunState(state, _join(job.reason, todo))
    if state == "stopping":
        return RunState("requeued" if facts.requeued else state, "processes are exiting")
    if state == "pending":
        return RunState(state, "nodes are being prepared")
    # Other reasons repeat the state, or are left over from waiting (one cancelled in the queue keeps
    # BeginTime).
    reason = job.reason if state in ("failed", "node failure") and job.reason not in _PLAIN_REASONS else ""
    began = "" if facts.started else "before it started"
    return RunState(state, _join(ended if state == "failed" else "", reason, began, _progress(marker)))


def _script_killed(facts: Evidence) -> RunState:
    """job.sh was killed, so Slurm ended the job. Its SIGTERM made the ranks save, and leave a marker."""
    if facts.cancel_requested:
        return RunState("cancelled", _progress(facts.marker))
    if facts.marker is not None and facts.marker.state == "done":
        return RunState("done", _progress(facts.marker))
    where = f" on {facts.started.node}" if facts.started and facts.started.node else ""
    what = f"job.sh was killed by SIGKILL{where} (out of memory?)"
    return RunState("failed", _join(what, _progress(facts.marker)))


def _pending(job: JobView, facts: Evidence) -> RunState:
    again = bool(job.restarts) or facts.started is not None
    since = f"from {job.start}" if job.reason == "BeginTime" and job.start else ""
    expected = f"expected to start {job.start}" if job.start and not since and not is_held(job.reason) else ""
    waits = _join(_join(job.reason, since, by=" "), expected)
    if not again:
        return RunState("pending", waits)
    reached = _progress(facts.marker)
    why = (facts.requeued and facts.requeued.reason) or (facts.marker.reason if facts.marker else "")
    return RunState("requeued", _join(waits, _join("after", why, by=" ") if why else "", reached))


def _by_marker(facts: Evidence, why: str = "") -> RunState | None:
    """Return the state if the script or the ranks recorded that they stopped on purpose, else None."""
    marker, told = facts.marker, facts.attempt_ended
    if marker is not None and marker.state == "no progress":
        return RunState("failed", marker.reason or _join("no progress", _progress(marker)))
    if marker is not None and marker.state == "stopped":
        return _stopped(marker, why)
    if marker is None and told and told.decision == "stopped":  # a script of the user's own
        if facts.cancel_requested or told.ended_by == "cancelled":
            return RunState("cancelled", _join("by you", _how_it_exited(facts)))
        return RunState("stopped", _join(why, told.cause))
    return None


def _not_requeued(facts: Evidence) -> RunState | None:
    """Return the state of a run whose job.sh saw no use in another job, else None."""
    told = facts.attempt_ended
    return RunState("stopped", told.cause) if told and told.not_requeued else None


def _how_it_exited(facts: Evidence) -> str:
    """How an own script exited after a cancel."""
    if (killed := facts.ranks_terminated) is not None:
        return f"its ranks did not exit within {killed.waited} s, so job.sh terminated them"
    code = facts.attempt_ended.exit_code if facts.attempt_ended else None
    return "exited cleanly" if code == 0 else f"exit code {code}"


def _unanswered(facts: Evidence) -> RunState:
    if facts.requeued:
        return RunState("requeued", "Slurm did not answer; job.sh had requeued the job")
    if facts.started is None:
        return RunState("pending", "Slurm did not answer; the run folder shows no start yet")
    attempt = "the job" if facts.attempt is None else f"attempt {facts.attempt}"
    return RunState("running", f"Slurm did not answer; {attempt} has started and not reported its exit")


def _by_folder(facts: Evidence) -> RunState:
    marker, ended = facts.marker, facts.ended
    on_purpose = _by_marker(facts)
    finished = marker is not None and marker.state == "done"
    if ended is None:
        if finished:
            return RunState("done", _join(_progress(marker), "job.sh did not record its exit"))
        if facts.cancel_requested and facts.started is None:
            return RunState("cancelled", "before it started")
        if marker is not None and marker.state == "stopped" and marker.terminated:
            return _script_killed(facts)  # else it would have written its end, too
        return on_purpose or _lost(facts)
    code, signal, state = ended.exit_code, ended.signal, JobState.of(ended.slurm_state)
    if signal == "KILL" and not facts.requeued:  # the guard wrote it
        return _script_killed(facts)
    if state is JobState.ENDING and signal:
        # What a trap sees of its own job at scancel (tried on 24.11.5) and at the time limit: only the reason
        # tells which of them it was.
        state = JobState.TIMED_OUT if ended.slurm_reason == "TimeLimit" else JobState.CANCELLED
    if facts.requeued or state in (JobState.PENDING, JobState.REQUEUED, JobState.HELD):
        if facts.cancel_requested:
            return RunState("cancelled", _join("while pending", _progress(marker)))
        return RunState("lost", f"it was requeued, but {_forgot(facts)}")
    if state is JobState.TIMED_OUT and (kept := _not_requeued(facts)) is not None:
        return kept
    if state in (JobState.TIMED_OUT, JobState.NODE_FAILED, JobState.CANCELLED, JobState.OUT_OF_MEMORY):
        return RunState(state.text, _progress(marker))
    preempted = "preempted" if state is JobState.PREEMPTED else ""
    if on_purpose is not None:
        return _by_marker(facts, preempted) or on_purpose
    if code == 0:
        return RunState("done", _progress(marker))
    if preempted or signal.removeprefix("SIG") in ("TERM", "INT", "HUP"):
        why = preempted or f"killed by SIG{signal.removeprefix('SIG')}"
        return RunState("cancelled", _join(why, _progress(marker)))
    return RunState("failed", _join(f"exit code {code}" if code is not None else "", signal, _progress(marker)))


def _lost(facts: Evidence) -> RunState:
    if facts.started is None:
        return RunState("lost", f"{_forgot(facts)}, and it never started (cancelled while pending?)")
    where = f" on {facts.started.node}" if facts.started.node else ""
    # Slurm kills what has not exited some seconds after its SIGTERM (KillWait): on a busy node that includes job.sh.
    why = "the node failed or job.sh was killed"
    if facts.stop is not None and facts.stop.signal:
        why = f"job.sh got {facts.stop.reason} (time limit, preemption or scancel), then {why}"
    elif facts.stop is not None:
        why = f"it was asked to stop ({facts.stop.reason}), then {why}"
    return RunState(
        "lost",
        f"it started{where} and recorded no exit, and {_forgot(facts)}: {why}. "
        "See logs/job.log, then submit again with --resume",
    )


def _forgot(facts: Evidence) -> str:
    sent = facts.submission
    if sent and sent.local:
        return f"process {sent.job_id} does not run on this machine (started on {sent.host or 'another'})"
    return f"Slurm no longer knows job {sent.job_id}" if sent and sent.job_id else "Slurm no longer knows the job"


def _stopped(marker: Marker, why: str = "") -> RunState:
    if marker.reason == CANCELLED:
        return RunState("cancelled", _join("by you, checkpoint saved", _progress(marker)))
    return RunState("stopped", _join(why, marker.reason, _progress(marker)))


def _progress(marker: Marker | None) -> str:
    """`step 500 of 1000`, as far as the marker tells."""
    if marker is None or marker.step is None:
        return ""
    of = f" of {marker.steps}" if marker.steps is not None else ""
    return f"step {marker.step}{of}"


def _exit_text(code: int | None, signal: int | None) -> str:
    return f"signal {signal}" if signal else f"exit code {code}" if code is not None else ""


def _join(*parts: str, by: str = ", ") -> str:
    return by.join(part for part in parts if part)


_AFTER = {
    "done": ("report {}", "checkpoint list {}"),
    "cancelled": ("resume {}", "report {}"),
    "stopped": ("resume {}", "report {}"),
}
_GOING = ("status {}", "logs {} --follow", "cancel {}")
_FAILED = ("doctor {}", "logs {} --tail 100", "resume {}", "debug bundle {}")
_GOES_ON = EXIT_CODES["running"]


def next_commands(run_id: str, state: str) -> list[str]:
    """Return them, the most useful first. state: a key of EXIT_CODES."""
    words = _GOING if EXIT_CODES[state] == _GOES_ON else _AFTER.get(state, _FAILED)
    return [f"slurmddp {each.format(run_id)}" for each in words]
