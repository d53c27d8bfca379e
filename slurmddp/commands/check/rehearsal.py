"""`slurmddp check --rehearse`: a script of the user's own runs undisturbed, is killed, is stopped, and starts again."""

from __future__ import annotations

import re
import shutil

from slurmddp.commands import options as opt
from slurmddp.commands.check import nodes
from slurmddp.commands.check.compare import Outcome, Start, first, halved, resumed, stopped
from slurmddp.commands.check.sandbox import START_SECONDS, RehearsalRun, Sandbox, on_this_machine, sandboxed, why
from slurmddp.errors import UserError
from slurmddp.job.resolve import Request
from slurmddp.launch.prepare import prepare
from slurmddp.records.events import newest
from slurmddp.records.job_events import RanksTerminated
from slurmddp.records.rank_events import Restarted
from slurmddp.records.rehearsal import KILL, STOP, Order, Verdict
from slurmddp.run import rehearsed, snapshot
from slurmddp.visible import one_line

#: Batches that an epoch has, and steps after the first save until the script is killed or asked to stop; and then, to
#: compare. Where it saves nothing: the step at which it is killed.
_BATCHES, _AFTER, _COMPARED, _UNSAVED = 8, 3, 5, 6
#: Seconds from the first step until the first save.
_SAVE = 45.0
#: Seconds, and the longest step four times, that a script has to exit when it is asked to stop.
_GRACE = 15.0


class Rehearsal:
    """The starts of one script, and what follows from them."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.code_hash, self._failed = "", ""
        self._sandbox = sandbox
        self._batches: int | None = _BATCHES

    def outcomes(self) -> tuple[Outcome, Outcome, Outcome]:
        """Return what became of the script after a kill, when it was asked to stop, and on half the ranks.

        Raises UserError.
        """
        undisturbed = self._undisturbed(_BATCHES)
        if undisturbed.saves_at_end_only and undisturbed.end is not None:
            undisturbed = self._undisturbed(None)
        kill = self._kill(undisturbed)
        if self._failed and undisturbed.saves_at_end_only:
            kill = kill._replace(not_compared=(*kill.not_compared, self._failed))
        if kill.resumes is False and not kill.failed and not undisturbed.saves_at_end_only:
            kill = self._after_other_saves(undisturbed, kill)
        if kill.differs and self._batches is not None:
            kill = self._confirmed(kill)
        return kill, *self._stop(undisturbed, resumes=kill.resumes is not False)

    def _undisturbed(self, batches: int | None, *, longer: bool = False) -> Start:
        """longer: not only until it has saved."""
        self._batches = batches
        epochs = f"{batches} batches per epoch" if batches else "all batches"
        opt.say(f"  undisturbed{', for longer' * longer}, {epochs}")
        run = RehearsalRun(self._sandbox, f"undisturbed-{'longer-' * longer}{batches or 'all'}", Order(batches))
        code = run.start(lambda starts: (_has_enough(starts) and not longer) or len(starts) > 1, _SAVE)
        starts = run.starts()
        start, self.code_hash = first(starts), snapshot.code_hash(run.folder.code)
        start.end = None if code is None else start.steps
        if bool(code) or len(starts) > 1:
            cause = why(run.folder)
            if start.steps and batches is not None:
                self._failed = f"epochs of {batches} batches: it failed after step {start.steps}: {cause}"
                opt.say(f"  failed after step {start.steps}, perhaps because of the shorter epochs: {cause}")
                return self._undisturbed(None)
            when = f"after step {start.steps}" if start.steps else "before its first step"
            raise UserError(f"the script failed {when}, without a kill: {cause}", todo=self._todo(cause, start))
        if not start.steps:
            how, todo = "exited", "a rehearsal compares steps: give it arguments with which it trains"
            if code is None:
                how, todo = f"ran for {START_SECONDS:.0f} s", "rehearse it with less data, or prepare them before"
            raise UserError(f"the script {how} without a step of a torch optimizer: see {run.folder.logs}", todo=todo)
        return start

    def _todo(self, cause: str, start: Start) -> str | None:
        saves = self._sandbox.saves_left_out
        if "Read-only file system" in cause:
            return "have it write below its working directory, $SLURMDDP_RUN or /tmp: all else is read-only here"
        if re.search("cuda|nvidia|nccl", cause, re.IGNORECASE) and not self._sandbox.plan.layout.gpus_per_node:
            return "rehearse it on a GPU node, or with arguments for a CPU: this machine has no GPU"
        if saves and not start.steps:
            return f"it ran without your saves: name one that it needs, such as {min(saves)}, in an argument"
        return None

    def _confirmed(self, kill: Outcome) -> Outcome:
        """Return what a kill does without shorter epochs: these could be why it went on differently."""
        batches, undisturbed = self._batches, self._undisturbed(None)
        if not undisturbed.saves_at_end_only:
            kill = self._kill(undisturbed)
        else:
            text = f"epochs of more than {batches} batches: no save within {_SAVE:.0f} s"
            kill = kill._replace(not_compared=(*kill.not_compared, text))
        self._batches = batches
        return kill

    def _after_other_saves(self, undisturbed: Start, kill: Outcome) -> Outcome:
        """Return what a kill does once it has saved all that it saves: the first save may be of the model alone."""
        longer = self._undisturbed(self._batches, longer=True)
        last = max(longer.first_saves.values(), default=0)
        if (undisturbed.first_save or 0) + _AFTER < last < longer.steps:
            return self._kill(longer, last)
        return kill

    def _kill(self, undisturbed: Start, save: int | None = None) -> Outcome:
        order = self._order(KILL, undisturbed, save)
        opt.say("  killed after a save" if order.at is None else f"  killed after step {order.at}")
        run = RehearsalRun(self._sandbox, f"kill-{order.at or 'save'}-{self._batches or 'all'}", order)
        code = run.start(lambda starts: len(starts) > 1 and starts[1].steps >= order.after + _COMPARED, 4 * _SAVE)
        starts = run.starts()
        if not starts or starts[0].acted is None:
            raise UserError(f"the script was not killed: {why(run.folder)}")
        again = first(starts[1:])
        if code and not again.states:
            text = f"Killed after step {starts[0].acted}, it failed when it was started again: {why(run.folder)}"
            return Outcome(False, text, failed=True)
        seen = newest(run.events(), Restarted)
        return resumed(undisturbed, starts[0], again, seen.how if seen else "")

    def _stop(self, undisturbed: Start, *, resumes: bool) -> tuple[Outcome, Outcome]:
        """Return what it did when it was asked to stop, and then on half the ranks. resumes: whether to try these."""
        opt.say("  asked to stop, then started again on fewer ranks")
        grace = _GRACE + 4 * undisturbed.step_seconds
        run = RehearsalRun(self._sandbox, "stop", self._order(STOP, undisturbed), grace)
        run.start(lambda starts: False, 2 * _SAVE + grace)
        before = run.starts()
        terminated = newest(run.events(), RanksTerminated) is not None
        again, half = None, Outcome(None, "Then started on fewer ranks: not tried.")
        if resumes:
            ranks = max(1, self._sandbox.ranks // 2)
            run.again(ranks)
            run.start(lambda starts: bool(starts) and starts[0].steps >= 2, _SAVE)
            again = first(run.starts()[len(before) :])
            half = halved(first(before), again, ranks, why(run.folder))
        return stopped(first(before), again, terminated=terminated, end=undisturbed.end), half

    def _order(self, act: str, undisturbed: Start, save: int | None = None) -> Order:
        """save: the steps done at the save after which it acts; None: the first one."""
        save = undisturbed.first_save if save is None else save
        if save is None or save >= undisturbed.steps:
            return Order(self._batches, act, at=min(_UNSAVED, max(1, undisturbed.steps - 1)))
        after = max(1, min(_AFTER, undisturbed.steps - save - 1))
        return Order(self._batches, act, after, None if save == undisturbed.first_save else save + after)


def _has_enough(starts: list[Start]) -> bool:
    saved = starts[0].first_save if starts else None
    return saved is not None and starts[0].steps >= saved + _AFTER + _COMPARED


def rehearse(request: Request, *, as_json: bool) -> set[str]:
    """Rehearse a script of the user's own on this machine, and keep the verdict as evidence; a bundled task as a job.

    Return the severities.
    """
    here = on_this_machine(request)
    if not prepare(here, strict=False).plan.program.own:
        return nodes.rehearse(request, as_json=as_json)
    with sandboxed(here) as sandbox:
        opt.say(f"rehearse {sandbox.plan.job.name} with {sandbox.ranks} ranks on this machine, in {sandbox.root}")
        rehearsal = Rehearsal(sandbox)
        outcomes = rehearsal.outcomes()
    kill = outcomes[0]
    verdict = Verdict(kill.resumes, tuple(each.text for each in outcomes))
    rehearsed.keep(rehearsal.code_hash, sandbox.plan, verdict)
    missing = list(dict.fromkeys(text for each in outcomes for text in each.not_compared))
    clean = all(each.resumes for each in outcomes) and not (kill.differs or missing)
    if clean:  # nobody needs its logs
        shutil.rmtree(sandbox.root, ignore_errors=True)
    folder = str(sandbox.root) if sandbox.root.exists() else None
    answer = {"schema": 1, **verdict._asdict(), "not_compared": missing, "folder": folder}
    lines = [*verdict.sentences, *(f"not compared: {text}" for text in missing)]
    opt.show(as_json, answer, [one_line(line) for line in lines])
    return {"error"} if kill.resumes is False else set() if kill.resumes and not kill.differs else {"warning"}
