"""What the supervisor does about what it sees while something runs on the nodes."""

from typing import Dict, Optional, Union

from slurmddp.causes import events as told
from slurmddp.causes.rules import is_consequence
from slurmddp.records import rank_events as ranks
from slurmddp.records.cause import AGENT, CONSEQUENCE, HANG, NOT_FOUND, UNKNOWN, Cause
from slurmddp.records.events import Event
from slurmddp.records.job_events import RanksTerminated
from slurmddp.records.text import first_line
from slurmddp.supervisor.brain import ledger as ledgers
from slurmddp.supervisor.brain.stragglers import Stragglers
from slurmddp.supervisor.brain.types import (
    CANCELLED_BY_USER,
    TIME_LIMIT,
    Actions,
    Alert,
    Around,
    AskEndTime,
    AskToStop,
    FindCause,
    Kill,
    Ledger,
    Moment,
    Say,
    Settings,
    Terminate,
    Write,
)

#: Seconds that the processes of an attempt get once a marker says that it is over. They may still write their last
#: checkpoint, and torchrun takes 30 s until it kills ranks, which a SIGTERM would begin anew. Where the breaker has
#: stopped the run, rank 0 has exited before it trained: nothing is to save.
_LEFTOVERS, _NOTHING_TO_SAVE = 45, 15
#: Seconds that torchrun gets to kill ranks that ignore SIGTERM.
_KILL_AFTER = 45
#: Seconds that torchrun waits for the ranks of each node to exit; an own script may save meanwhile.
_SAVES = 30
#: Kinds of causes for which the logs may know better.
_VAGUE = (UNKNOWN, NOT_FOUND, CONSEQUENCE)
#: Seconds between two looks at torchrun's folders of starts: there may be many nodes.
_STARTS_EVERY = 10
#: Exceptions of files and network, which may be gone at the next start.
_PASSING = ("OSError", "IOError", "TimeoutError", "PeerError", "ConnectionError", "BlockingIOError", "InterruptedError")


class Watch:
    """Over all attempts of a job.

    ledger: its part of the brain; what comes of it is to be kept. Public, for the end of an attempt: `noted` (what the
    ranks of the newest start said of their end), `exited` (the exit code of one of them, which says less), `abandoned`
    (why the attempt was terminated), `hopeless` (why no further start is of use), `uncounted` (starts that failed and
    that the ranks have not counted).
    """

    def __init__(self, settings: Settings, ledger: Ledger, end_time: Optional[float], now: Moment) -> None:
        """end_time: the job's time limit, unix seconds; None if it is not known."""
        self._settings = settings
        self.ledger = ledger
        self._end_time = end_time
        self._starts = 0  # of the ranks, in this job
        self._recovering: Optional[Cause] = None  # why the ranks had to start again; None once they train
        self._warned_alone = False
        self._hours_used = False
        self._longest_save = 0
        self._kept = ""  # the newest copy of a save of the user's own script
        self._longest_start = 0  # seconds from the launch, or from a failure, to the ranks' start
        self._cancelled_since: Optional[float] = None
        self._overdue: Optional[float] = None  # when ranks that did not exit got SIGTERM
        self.new_attempt(now)

    def new_attempt(self, now: Moment) -> None:
        """Begin an attempt: its nodes may be checked first."""
        self.noted: Optional[Cause] = None
        self.exited: Optional[Cause] = None
        self.stranger: Optional[Cause] = None  # what the first agent said that got a message of somebody else
        self.abandoned = ""
        self.hopeless = ""
        self.uncounted = 0
        self._counted = 0  # starts that failed and that the ranks have counted
        self._restarts_then = 0  # restarts in place when they counted the newest
        self._look_again = now.seconds
        self._marker_seen: Optional[float] = None
        self._leftovers_bound = _LEFTOVERS
        self._stragglers = Stragglers()
        self.launched(now, 0)

    def launched(self, now: Moment, nodes: int, world: Optional[int] = None) -> None:
        """The ranks are started on so many nodes. world: how many ranks; None if that is not known."""
        self._nodes, self._world = nodes, world
        self._starting_since = now.seconds
        self._start_failed = False  # whether the ranks of this attempt have failed, and did not start again yet
        self._agents_waiting = 0  # nodes whose agents have stopped their ranks since then
        self._stepped = False  # whether this start has made a step
        self._errors: Dict[int, str] = {}  # of this start, by rank

    def failed(self, cause: Cause) -> None:
        """An attempt has failed of this, and another one follows."""
        self._recovering = cause

    # --- events

    def see(self, event: Event, now: Moment) -> Actions:
        """Take an event of the ranks or their agents: each that matters has a method of its name."""
        handler = getattr(self, "on_" + event.name, None)
        return (handler(event, event.facts, now) if handler else None) or []

    def on_rank_started(self, event: Event, facts: ranks.RankStarted, now: Moment) -> Actions:
        self._starts += 1
        self._longest_start = max(self._longest_start, int(now.seconds - self._starting_since))
        actions: Actions = []
        if self._starts > 1 and self._recovering is None:
            self._recovering = self.noted or Cause("unknown", kind=NOT_FOUND)
            if self._recovering.kind in _VAGUE:
                actions = [FindCause(self.noted or self.exited)]
        self._start_failed, self._agents_waiting, self._stepped, self._errors = False, 0, False, {}
        self._stragglers = Stragglers()
        self.noted = self.exited = None
        return actions

    def cause_is(self, cause: Optional[Cause]) -> None:
        """Take the answer to FindCause."""
        if cause is not None and self._recovering is not None and self._recovering.kind in _VAGUE:
            self._recovering = cause

    def on_forged(self, event: Event, facts: ranks.Forged, now: Moment) -> None:
        self.stranger = self.stranger or Cause(first_line(facts.text), None, event.node or "", AGENT, event.time)

    def on_started(self, event: Event, facts: ranks.Started, now: Moment) -> None:
        self._world = facts.world or self._world

    def on_error(self, event: Event, facts: ranks.Error, now: Moment) -> Actions:
        self._fails(now)
        rank, node = event.rank, event.node or ""
        self._note(told.raised(rank, node, facts.kind or "error", facts.message, event.time))
        return self._same_everywhere(rank, facts)

    def _same_everywhere(self, rank: Optional[int], facts: ranks.Error) -> Actions:
        """The same exception on all ranks before the first step of two starts is the same in a third one."""
        text = "{}: {}".format(facts.kind, facts.message)
        passing = facts.kind.endswith(_PASSING) or is_consequence(text)
        if rank is None or self._stepped or passing:
            return []
        self._errors[rank] = text
        if not self._world or len(self._errors) < self._world or len(set(self._errors.values())) > 1:
            return []
        again = self.ledger.last_error == text
        self.ledger = self.ledger._replace(last_error=text)
        return self._give_up("all ranks failed this way before the first step of two starts") if again else []

    def on_hang(self, event: Event, facts: Union[ranks.Hang, ranks.HangReported], now: Moment) -> Actions:
        following = "the ranks restart"
        if isinstance(facts, ranks.Hang):
            self._fails(now)
        else:  # of an own script, which nobody stopped
            following = "nothing is stopped; the stacks of the ranks are in the run folder"
        waited = "" if facts.waited is None else " for {} s".format(int(facts.waited))
        cause = told.hung(facts.ranks, facts.nodes, "no progress" + waited, event.time)
        actions: Actions = [Alert("hang", "running", cause, following)] if self.noted is None else []
        self._note(cause)
        return actions

    on_hang_reported = on_hang

    def on_hang_over(self, event: Event, facts: ranks.HangOver, now: Moment) -> None:
        if self.noted is not None and self.noted.kind == HANG:
            self.noted = None

    def on_rank_exited(self, event: Event, facts: ranks.RankExited, now: Moment) -> None:
        if facts.exit_code is None:
            cause = told.killed(facts.rank, event.node or "", facts.signal, event.time)
            if cause is not None:  # else a cleanup, or what the log says more about
                self._note(cause)
            return
        if self._agents_waiting >= self._nodes:
            self.noted = self.exited = None  # of a start after that one, which died before our program
        self.exited = self.exited or told.exited(facts.rank, event.node or "", None, facts.exit_code, event.time)

    def on_ranks_stopped(self, event: Event, facts: ranks.RanksStopped, now: Moment) -> None:
        """By the agent of each node; of ranks that are killed, nobody else tells."""
        self._agents_waiting += 1
        if self._agents_waiting == self._nodes:
            self._start_failed = False  # the time counts from here on
        self._fails(now)

    def _fails(self, now: Moment) -> None:
        if not self._start_failed:
            self._starting_since = now.seconds
        self._start_failed = True

    def _note(self, cause: Cause) -> None:
        """The first error of a start is the cause, and a lost connection is what others see of it."""
        if self.noted is None or self.noted.kind == CONSEQUENCE:
            self.noted = cause

    def on_straggler_begins(
        self, event: Event, facts: Union[ranks.StragglerBegins, ranks.StragglerEnds], now: Moment
    ) -> None:
        self._stragglers.see(facts, now.seconds)

    on_straggler_ends = on_straggler_begins

    def on_no_process_group(self, event: Event, facts: ranks.NoProcessGroup, now: Moment) -> Actions:
        actions = [] if self._warned_alone else self._warn(facts.text, None)
        self._warned_alone = True
        return actions

    def on_checkpoint_saved(self, event: Event, facts: ranks.CheckpointSaved, now: Moment) -> None:
        self._longest_save = max(self._longest_save, int(facts.seconds or 0))

    def on_first_step(self, event: Event, facts: ranks.FirstStep, now: Moment) -> Actions:
        self._stepped = True
        self.ledger = self.ledger._replace(last_error="")
        return [] if self._settings.own_script else self._has_recovered()

    def on_restarted(self, event: Event, facts: ranks.Restarted, now: Moment) -> Actions:
        """Only what went on has recovered. A start from an unknown step is worth a message after a failure only."""
        self.ledger = ledgers.note_restart(self.ledger, facts)
        if facts.how == "went on":
            return self._has_recovered()
        actions: Actions = []
        if self._recovering is not None or facts.how == "from zero":
            kept = "; what it had saved before is kept in " + self._kept if self._kept else ""
            actions = self._warn(facts.text + kept * (facts.how == "from zero"), self._recovering)
        self._recovering = None
        most = self._settings.breaker_from_zero
        if facts.how == "from zero" and most is not None and self.ledger.from_zero > most:
            reason = "the script began at step 1 again in {} starts that followed another one (at most {} may)"
            return actions + self._give_up(reason.format(self.ledger.from_zero, most))
        return actions

    def on_keeping_save(self, event: Event, facts: ranks.KeepingSave, now: Moment) -> None:
        """The ranks start when the copy is there, or its time is over."""
        self._starting_since = now.seconds + (facts.seconds or 0)

    def on_save_kept(self, event: Event, facts: ranks.SaveKept, now: Moment) -> Actions:
        self._starting_since = now.seconds
        self._kept = facts.kept or self._kept
        if not facts.kept:
            return [Say("the script may write over {}, which was not kept: {}".format(facts.path, facts.why))]
        return [Say("the script may write over {}: a copy is kept in {}".format(facts.path, facts.kept))]

    def _has_recovered(self) -> Actions:
        cause, self._recovering = self._recovering, None
        return [] if cause is None else [Alert("recovered", "running", cause, "training continues")]

    def _warn(self, text: str, before: Optional[Cause]) -> Actions:
        """Send the text of an event, which its writer made for people, and why it came to that."""
        first = text.split("\n")[0]
        if not first:
            return []
        cause = before or Cause(first)
        first += "" if before is None else "; before that: " + before.line()
        return [Alert("warning", "running", cause, "nothing is stopped", first)]

    # --- looks around

    def is_seldom(self, now: Moment) -> bool:
        """Return whether the next look takes up what does not hurry: torchrun's folders of starts, srun's errors."""
        return now.seconds >= self._look_again

    def look(self, around: Around, now: Moment) -> Actions:
        """Look around, every 2 s, after the new events were handed in."""
        return [
            *self._stragglers.look(now.seconds),
            *self._see_unreached(around),
            *self._expect_restart(around, now),
            *self._count_starts(around, now),
            *self._watch_hours(around),
            *self._watch_clock(around, now),
            *self._enforce_stop(around, now),
            *self._end_leftovers(around, now),
        ]

    def _give_up(self, reason: str) -> Actions:
        self.hopeless = self.hopeless or reason
        return self._abandon(reason)

    def _abandon(self, reason: str) -> Actions:
        """Stop an attempt that cannot succeed: torchrun itself would wait for minutes."""
        self.abandoned = self.abandoned or reason
        return [Say("terminating the attempt: " + reason), Terminate()]

    def _see_unreached(self, around: Around) -> Actions:
        """Where Slurm cannot start a task, srun may wait for the others for ten minutes."""
        if not (self._nodes and around.unreached) or self.abandoned:
            return []
        return self._abandon("Slurm could not start the ranks on {}: {}".format(*around.unreached[0]))

    def _expect_restart(self, around: Around, now: Moment) -> Actions:
        """After a failure, the ranks start again, unless their agents do not find each other: if nodes have lost their
        connection, agents wait for minutes. The next attempt begins with a check of the nodes.
        """
        bound = 2 * self._longest_start + 5  # nodes and file systems may have become busier since
        if self._settings.own_script and self._agents_waiting < self._nodes:
            bound += _SAVES
        late = self._starts > 0 and now.seconds - self._starting_since > bound
        if not (self._start_failed and late) or around.marker is not None:
            return []
        self._starting_since = now.seconds  # again, if it is still there then
        return self._abandon("the ranks did not restart within {} s".format(bound))

    def _count_starts(self, around: Around, now: Moment) -> Actions:
        """Starts that fail before our own program runs, such as one whose code is gone, are not in the breaker's list.
        torchrun makes a folder for each start of a node's ranks.
        """
        if not self.is_seldom(now):
            return []
        self._look_again = now.seconds + _STARTS_EVERY
        if around.newest_start is not None:
            self.uncounted = max(self.uncounted, around.newest_start - self._restarts_then)
        if around.failures != self._counted:
            self._counted = around.failures
            self._restarts_then += self.uncounted
            self.uncounted = 0
        elif self.uncounted > 1 and not self.abandoned and around.marker is None:  # the newest may be counted soon
            text = "{} starts failed, the last ones before the ranks ran any code"
            return self._abandon(text.format(self.uncounted))
        return []

    def _watch_hours(self, around: Around) -> Actions:
        if self._hours_used or around.stop is not None:
            return []
        self._hours_used = ledgers.hours_are_used(self._settings, around.gpu_seconds)
        return [AskToStop(ledgers.hours_text(self._settings, around.gpu_seconds))] if self._hours_used else []

    def _watch_clock(self, around: Around, now: Moment) -> Actions:
        """Ask the ranks early enough to save once more, however long a save takes by now."""
        return [AskEndTime()] if around.stop is None and self._is_late(now) else []

    def end_time_is(self, end_time: Optional[float], now: Moment) -> Actions:
        """Take the answer to AskEndTime: an operator may have given the job more time. None: Slurm did not answer."""
        self._end_time = self._end_time if end_time is None else end_time
        return [AskToStop(TIME_LIMIT)] if self._is_late(now) else []

    def _is_late(self, now: Moment) -> bool:
        if self._settings.stop_lead is None or self._end_time is None:
            return False
        return self._end_time - now.unix < max(self._settings.stop_lead, 2 * self._longest_save + 30)

    def _enforce_stop(self, around: Around, now: Moment) -> Actions:
        """An own script may not look at the stop file. After a cancel, or once its GPU hours are used, it gets a grace
        time, then SIGTERM; torchrun kills its ranks 30 s later. What is left after that is killed.
        """
        grace = self._settings.cancel_grace
        cancelled = around.stop == CANCELLED_BY_USER
        if grace is None or not (cancelled or (self._hours_used and around.stop is not None)):
            return []
        if self._cancelled_since is None:
            self._cancelled_since = now.seconds
        if now.seconds - self._cancelled_since < grace:
            return []
        if self._overdue is None:
            self._overdue = now.seconds
            trigger = "the cancel" if cancelled else "the request to stop"
            text = "the ranks did not exit within {} s after {}: terminating them".format(grace, trigger)
            return [Say(text), Write(RanksTerminated(str(around.stop), grace)), Terminate()]
        if now.seconds - self._overdue >= _KILL_AFTER:
            self._overdue = now.seconds
            return [Say("the ranks ignore SIGTERM: killing them"), Kill()]
        return []

    def _end_leftovers(self, around: Around, now: Moment) -> Actions:
        """A marker says that this attempt is over: ranks that do not see it are ended."""
        if self._marker_seen is None:
            if around.marker is not None:
                self._marker_seen = now.seconds
                nothing = around.marker.state == "no progress"
                self._leftovers_bound = _NOTHING_TO_SAVE if nothing else _LEFTOVERS
        elif now.seconds - self._marker_seen > self._leftovers_bound:
            self._marker_seen, self._leftovers_bound = now.seconds, _LEFTOVERS
            return [Say("the attempt is over, but its processes still run: terminating them"), Terminate()]
        return []
