"""What is done about what is seen while ranks run: events and clocks are injected."""

from typing import Any

import pytest

from slurmddp.records import rank_events as ranks
from slurmddp.records.cause import CONSEQUENCE, EXIT, Cause
from slurmddp.records.events import Event
from slurmddp.records.job_events import RanksTerminated
from slurmddp.supervisor.brain import types as brain
from slurmddp.supervisor.brain.types import Alert, Around, Ledger, Marker, Moment, Settings
from slurmddp.supervisor.brain.watch import Watch

SETTINGS = Settings("/run")
OWN = SETTINGS._replace(own_script=True, breaker_from_zero=2)
STOPS_IN_PLACE = "terminating the attempt: "
RESET = "Connection reset by peer"
NOTHING_YET = Ledger()


def at(seconds: float) -> Moment:
    """A moment of a job that began at unix time 1000."""
    return Moment(seconds, 1000.0 + seconds)


class Stage:
    """A watch over an attempt on two nodes, and a clock."""

    def __init__(
        self, settings: Settings = SETTINGS, ledger: Ledger = NOTHING_YET, end_time: float | None = None
    ) -> None:
        self.now = 0.0
        self.watch = Watch(settings, ledger, end_time, at(0))
        self.watch.launched(at(0), 2, 4)
        self.around = Around()

    def see(self, seconds: float, *facts: Any, rank: int | None = 0, node: str = "node1") -> list[Any]:
        """Events of one rank at a time."""
        self.now = seconds
        event = [Event(one, 1000.0 + seconds, 0, "7", node, rank) for one in facts]
        return [action for one in event for action in self.watch.see(one, at(seconds))]

    def look(self, seconds: float, **around: Any) -> list[Any]:
        """Look around at a time."""
        self.now = seconds
        self.around = self.around._replace(**around)
        return self.watch.look(self.around, at(seconds))

    def looks(self, begin: int, end: int, **around: Any) -> list[Any]:
        """Look around every second. The second and what was done, where something was."""
        found = [(second, self.look(second, **around)) for second in range(begin, end)]
        return [(second, actions) for second, actions in found if actions]


def stopped(actions: list[Any]) -> str:
    """Why the attempt was terminated; empty if it was not."""
    if not any(isinstance(action, brain.Terminate) for action in actions):
        return ""
    return next(action.text for action in actions if isinstance(action, brain.Say)).replace(STOPS_IN_PLACE, "")


def alerts(actions: list[Any]) -> list[Alert]:
    return [action for action in actions if isinstance(action, Alert)]


STARTED = ranks.RankStarted(1.0)
STOPPED = ranks.RanksStopped()
BOOM = ranks.Error("ValueError", "boom")
LOST = ranks.Error("RuntimeError", RESET)


def killed(rank: int, signal: str | None, code: int | None = None) -> ranks.RankExited:
    return ranks.RankExited(rank, code, signal)


# --- ranks that do not start again


def test_ranks_that_do_not_start_again_end_the_attempt() -> None:
    """The first start took 20 s; the next one may take 45 s."""
    stage = Stage()
    stage.see(20, STARTED)
    stage.see(100, BOOM)
    assert stage.looks(100, 146) == []
    assert stopped(stage.look(146)) == "the ranks did not restart within 45 s"
    assert stage.watch.abandoned == "the ranks did not restart within 45 s"
    assert stage.looks(147, 192) == [] and stopped(stage.look(192)), "and again, if it is still there"


def test_ranks_that_start_again_late_are_waited_for_as_long_the_next_time() -> None:
    stage = Stage()
    stage.see(20, STARTED)
    stage.see(100, BOOM)
    stage.see(124, STARTED)
    assert stage.look(300) == []
    stage.see(400, BOOM)
    assert stage.look(453) == [] and stopped(stage.look(454)) == "the ranks did not restart within 53 s"


@pytest.mark.parametrize(("agents", "bound"), [(1, 75), (2, 45)])
def test_an_own_script_may_save_until_all_agents_have_stopped_its_ranks(agents: int, bound: int) -> None:
    stage = Stage(OWN)
    stage.see(20, STARTED)
    stage.see(90, STOPPED)
    since = 90
    if agents == 2:
        stage.see(100, STOPPED, node="node2")
        since = 100
    assert stage.look(since + bound) == []
    assert stopped(stage.look(since + bound + 1)) == f"the ranks did not restart within {bound} s"


def test_agents_of_the_start_before_are_not_counted_again() -> None:
    stage = Stage(OWN)
    stage.see(20, STARTED)
    stage.see(100, STOPPED, STOPPED, STARTED)
    assert stage.look(300) == []
    stage.see(300, STOPPED)
    assert stage.look(345) == [] and stage.look(375) == [] and stopped(stage.look(376))


def test_nothing_is_expected_without_a_measure_or_once_the_attempt_is_over() -> None:
    first = Stage()
    first.see(10, BOOM)
    assert first.look(900) == []
    over = Stage()
    over.see(20, STARTED)
    over.see(30, BOOM)
    assert over.look(900, marker=Marker("failed")) == []


# --- starts that nobody counts


def test_starts_that_nobody_counts_end_the_attempt() -> None:
    """On node2 alone, say: its Python is broken. Of two, the second may be counted in a moment."""
    stage = Stage()
    assert stage.look(0, newest_start=1) == []
    assert stage.look(9, newest_start=2) == [], "there may be many nodes: every 10 s"
    assert stopped(stage.look(10)) == "2 starts failed, the last ones before the ranks ran any code"
    assert stage.watch.uncounted == 2 and stage.looks(11, 40) == [], "once is enough"


def test_starts_that_the_ranks_have_counted_do_not() -> None:
    stage = Stage()
    assert stage.look(0, newest_start=5, failures=5) == []
    assert stage.look(20, newest_start=6) == []
    assert stopped(stage.look(40, newest_start=7)).startswith("2 starts failed")
    stage.watch.new_attempt(at(50))
    assert stage.watch.uncounted == 0 and stage.look(60, newest_start=1, failures=0) == []


# --- causes


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 2, 0], [2, 3, 1, 0]])
def test_the_signal_that_killed_a_rank_is_the_cause(order: list[int]) -> None:
    """Before what other ranks see of it; not the signals with which torchrun ends the others, and no exit code."""
    stage = Stage()
    facts: list[Any] = [LOST, killed(2, "SIGTERM"), killed(3, "SIGKILL"), killed(1, None, 1)]
    for index in order:
        stage.see(5, facts[index], rank=0 if index == 0 else facts[index].rank, node="node2")
    noted = stage.watch.noted
    assert noted and noted.line() == "rank 3 on node2: killed by SIGKILL (out of memory?)"


def test_the_first_error_is_the_cause_and_what_a_rank_writes_is_about_that_rank() -> None:
    """A text may look like another rank's error."""
    stage = Stage()
    stage.see(5, LOST)
    assert stage.watch.noted and stage.watch.noted.kind == CONSEQUENCE
    stage.see(6, ranks.Error("ValueError", "[rank0]: KeyError on node9\nmore"), rank=3, node="node2")
    stage.see(7, ranks.Error("KeyError", "x"), rank=1)
    assert stage.watch.noted[:3] == ("ValueError: [rank0]: KeyError on node9", 3, "node2")
    stage.see(8, STARTED)
    assert stage.watch.noted is None


def test_what_died_before_our_program_is_for_the_logs() -> None:
    """All agents have stopped their ranks, and a start after that has failed: the noted error is an older one's."""
    stage = Stage()
    stage.see(5, BOOM)
    stage.see(6, killed(0, None, 1))
    assert stage.watch.noted is not None
    stage.see(7, STOPPED, STOPPED, killed(0, None, 1))
    assert stage.watch.noted is None


def test_the_newest_start_exited_whatever_signal_ended_the_one_before() -> None:
    """The logs of both starts are searched with it: a line with a signal may be of the first."""
    stage = Stage()
    stage.see(5, STARTED, killed(1, "SIGKILL"))
    assert stage.watch.exited is None
    assert stage.see(9, STARTED) == [] and stage.see(10, ranks.FirstStep(1, 1.0))
    stage.see(12, killed(1, None, 3), killed(0, None, 1))
    exited = stage.watch.exited
    assert exited and exited[:4] == ("exited with code 3", 1, "node1", EXIT) and stage.watch.noted is None
    assert stage.see(20, STARTED) == [brain.FindCause(exited)] and stage.watch.exited is None
    stage.see(30, STOPPED, STOPPED, killed(0, None, 4))
    assert stage.watch.exited and stage.watch.exited.text == "exited with code 4"
    stage.watch.new_attempt(at(50))
    assert stage.watch.exited is None


def test_a_hang_that_nobody_stopped_is_told_once_and_ends_nothing() -> None:
    stage = Stage(OWN)
    stage.see(20, STARTED)
    hang = ranks.HangReported("behind", (3,), ("node2",), "step", 9, 131.2, 120.0, "stacks")
    (alert,) = stage.see(40, hang)
    assert alert.cause.line() == "rank 3 on node2: hang: no progress for 131 s" and alert.kind == "hang"
    assert alert.next == "nothing is stopped; the stacks of the ranks are in the run folder"
    assert stage.see(50, hang) == [] and stage.look(900) == []
    stage.see(910, ranks.HangOver((3,), ("node2",)))
    assert stage.watch.noted is None


def test_a_hang_that_ranks_end_begins_a_restart() -> None:
    stage = Stage()
    stage.see(20, STARTED)
    (alert,) = stage.see(100, ranks.Hang("silent", (1,), ("node1",), "step", 9, 60.9, 60.0))
    assert alert.next == "the ranks restart" and "no progress for 60 s" in alert.cause.text
    assert stopped(stage.look(146)) == "the ranks did not restart within 45 s"


# --- recovered, or begun again


def restarted(how: str, step: int | None = 1, before: int | None = 147) -> ranks.Restarted:
    lost = before if how == "from zero" else None
    return ranks.Restarted(how, step, before, before, lost, f"the script {how}\nsecond line")


def test_a_bundled_task_has_recovered_with_its_first_step() -> None:
    stage = Stage()
    assert stage.see(1, STARTED, ranks.FirstStep(1, 2.0)) == []
    stage.see(50, BOOM, rank=2, node="node2")
    assert stage.see(60, STARTED) == []
    (alert,) = stage.see(61, ranks.FirstStep(5, 2.0))
    assert (alert.kind, alert.cause.line(), alert.next) == (
        "recovered", "rank 2 on node2: ValueError: boom", "training continues",
    )  # fmt: skip
    assert stage.see(62, ranks.FirstStep(6, 2.0)) == []


@pytest.mark.parametrize("noted", [None, LOST])
def test_the_logs_are_asked_where_the_events_do_not_know_better(noted: ranks.Error | None) -> None:
    stage = Stage()
    stage.see(1, STARTED)
    if noted:
        stage.see(49, noted)
    (ask,) = stage.see(50, STARTED)
    assert isinstance(ask, brain.FindCause) and (ask.noted is None) == (noted is None)
    stage.watch.cause_is(Cause("killed by SIGSEGV", 1, "node1"))
    (alert,) = stage.see(51, ranks.FirstStep(1, 1.0))
    assert alert.cause.line() == "rank 1 on node1: killed by SIGSEGV"
    stage.watch.cause_is(Cause("too late"))
    assert stage.see(52, ranks.FirstStep(1, 1.0)) == []


@pytest.mark.parametrize(("how", "kind"), [("went on", "recovered"), ("from zero", "warning"), ("unknown", "warning")])
def test_of_an_own_script_only_what_went_on_has_recovered(how: str, kind: str) -> None:
    stage = Stage(OWN)
    stage.watch.failed(Cause("why", 1, "n2"))
    assert stage.see(5, ranks.FirstStep(1, 1.0)) == []
    (alert,) = stage.see(6, restarted(how))
    assert alert.kind == kind and alert.cause[:3] == ("why", 1, "n2")
    if kind == "warning":
        assert alert.text == f"the script {how}; before that: rank 1 on n2: why"
        assert alert.next == "nothing is stopped"


def test_a_start_from_an_unknown_step_is_told_after_a_failure_only() -> None:
    stage = Stage(OWN)
    assert stage.see(5, restarted("unknown")) == []
    (alert,) = stage.see(6, restarted("from zero"))
    assert alert.text == "the script from zero" and alert.cause.rank is None


def test_starts_from_zero_are_counted_over_all_jobs_and_the_third_one_ends_the_run() -> None:
    first = Stage(OWN)
    assert not stopped(first.see(5, restarted("from zero")))
    second = Stage(OWN, first.watch.ledger)
    assert not stopped(second.see(5, restarted("from zero"), restarted("unknown"), restarted("from zero", before=None)))
    assert stopped(second.see(6, restarted("from zero"))).startswith("the script began at step 1 again in 3 starts")
    assert second.watch.hopeless == second.watch.abandoned != ""
    second.see(7, restarted("went on", step=148))
    assert second.watch.ledger.from_zero == 0 and second.watch.ledger.went_on is True


def test_starts_from_zero_are_not_counted_where_nobody_wants_it() -> None:
    stage = Stage(OWN._replace(breaker_from_zero=None))
    assert not any(stopped(stage.see(second, restarted("from zero"))) for second in range(9))


# --- the same exception on all ranks


def fail(stage: Stage, second: float, kind: str, message: str, count: int = 4) -> list[Any]:
    facts = ranks.Error(kind, message)
    return [action for rank in range(count) for action in stage.see(second, facts, rank=rank)]


@pytest.mark.parametrize("over", ["in place", "attempts", "jobs"])
def test_the_same_exception_on_all_ranks_before_the_first_step_of_two_starts_is_the_last(over: str) -> None:
    stage = Stage()
    assert fail(stage, 5, "RuntimeError", "shapes differ") == []
    if over == "in place":
        stage.see(6, STARTED)
    elif over == "attempts":
        stage.watch.new_attempt(at(6))
        stage.watch.launched(at(7), 2, 4)
    else:
        stage = Stage(ledger=stage.watch.ledger)
    actions = fail(stage, 8, "RuntimeError", "shapes differ")
    assert stopped(actions) == "all ranks failed this way before the first step of two starts"
    assert stage.watch.hopeless


@pytest.mark.parametrize(
    ("kind", "message", "count", "between"),
    [
        ("RuntimeError", "another one", 4, None),
        ("RuntimeError", "shapes differ", 3, None),
        ("RuntimeError", "shapes differ", 4, ranks.FirstStep(1, 1.0)),
    ],
    ids=["another one", "not all ranks", "a step between"],
)
def test_other_exceptions_have_another_start(kind: str, message: str, count: int, between: Any) -> None:
    stage = Stage()
    fail(stage, 5, "RuntimeError", "shapes differ")
    stage.see(6, STARTED, *([between] if between else []))
    assert not stopped(fail(stage, 8, kind, message, count))


@pytest.mark.parametrize("facts", [LOST, ranks.Error("OSError", "stale file handle"), ranks.Error("TimeoutError", "x")])
def test_exceptions_of_files_and_network_have_another_start(facts: ranks.Error) -> None:
    stage = Stage()
    for second in (5, 8):
        assert not stopped(fail(stage, second, facts.kind, facts.message))
        stage.see(second + 1, STARTED)


def test_how_many_ranks_there_are_is_told_by_them() -> None:
    stage = Stage()
    stage.watch.launched(at(0), 2)
    assert fail(stage, 1, "RuntimeError", "x") == fail(stage, 2, "RuntimeError", "x") == []
    stage.see(3, STARTED, ranks.Started(4, 2, "", "", "", "", None))
    fail(stage, 4, "RuntimeError", "x")
    stage.see(5, STARTED)
    assert stopped(fail(stage, 6, "RuntimeError", "x"))


# --- stragglers


def slow(begins: bool, host: str) -> Any:
    kind = ranks.StragglerBegins if begins else ranks.StragglerEnds
    return kind(host, 9, "compute", 1.83, 0.4)


def test_a_node_that_stays_slow_is_told_once() -> None:
    stage = Stage()
    stage.see(0, slow(True, "n7"), slow(True, "n8"))
    assert stage.look(200) == []
    stage.see(200, slow(False, "n8"))
    (alert,) = stage.look(310)
    assert alert.cause.line() == "rank 9 on n7: straggler: compute takes 1.83 times as long as elsewhere"
    assert (alert.kind, alert.next) == ("straggler", "training continues, at the speed of this node")
    stage.see(400, slow(True, "n8"))
    assert stage.look(690) == []
    stage.see(691, slow(False, "n7"), slow(True, "n7"))
    assert [alert.cause.node for alert in alerts(stage.look(1500))] == ["n8"]
    assert stage.look(3000) == []


def test_a_start_of_the_ranks_forgets_who_was_slow() -> None:
    stage = Stage()
    stage.see(0, slow(True, "n7"))
    stage.see(9, STARTED)
    assert stage.look(900) == []


def test_ranks_that_do_not_work_together_are_told_once_per_job() -> None:
    stage = Stage(OWN)
    alone = ranks.NoProcessGroup(4, 'each of the 4 ranks "trains" rank 9 on n7: x')
    (alert,) = stage.see(1, alone, alone)
    assert alert.text == alone.text and (alert.cause.rank, alert.cause.node) == (None, "")
    stage.watch.new_attempt(at(2))
    assert stage.see(3, alone) == []


# --- the clock


def test_ranks_are_asked_to_save_before_the_time_limit_however_long_a_save_takes_by_now() -> None:
    stage = Stage(SETTINGS._replace(stop_lead=120), end_time=2000.0)
    assert stage.look(880) == []
    (ask,) = stage.look(881)
    assert isinstance(ask, brain.AskEndTime)
    assert stage.watch.end_time_is(2500.0, at(881)) == [], "an operator gave it more time"
    assert stage.look(1300) == []
    stage.see(1300, ranks.CheckpointSaved(5, 100.9, 0.1, 1, "x"))
    assert stage.look(1269) == [] and stage.look(1271) == [brain.AskEndTime()]
    assert stage.watch.end_time_is(None, at(1271)) == [brain.AskToStop("time limit")], "Slurm does not answer"
    assert stage.look(1400, stop="time limit") == []


def test_without_a_lead_or_a_limit_nobody_is_asked() -> None:
    assert Stage(end_time=2000.0).look(5000) == []
    assert Stage(SETTINGS._replace(stop_lead=120)).look(5000) == []


def test_the_gpu_hours_of_all_starts_end_the_run() -> None:
    stage = Stage(SETTINGS._replace(max_gpu_hours=2, cancel_grace=10))
    assert stage.look(1, gpu_seconds=7199) == []
    (ask,) = stage.look(2, gpu_seconds=7200)
    assert ask.reason == "the run has used 2.0 GPU hours, and recovery.max_gpu_hours is 2"
    found = stage.looks(3, 100, stop=ask.reason)
    assert [(second, type(actions[-1])) for second, actions in found] == [(13, brain.Terminate), (58, brain.Kill)]
    assert "after the request to stop" in found[0][1][0].text


# --- saves that are copied before the ranks start again


def test_a_copy_takes_its_time_and_is_named_where_the_script_began_again() -> None:
    stage = Stage(OWN)
    stage.see(3, ranks.RankStarted(1.0))
    stage.see(10, ranks.RanksStopped())
    stage.see(10, ranks.RanksStopped(), node="node2")
    assert stage.see(11, ranks.KeepingSave("/out/last.pt", 9, 60.0)) == []
    assert stage.looks(12, 71) == [], "the copy may take 60 s"
    (said,) = stage.see(71, ranks.SaveKept("/out/last.pt", "/run/kept/001-last.pt", 9, ""))
    assert said.text == "the script may write over /out/last.pt: a copy is kept in /run/kept/001-last.pt"
    assert stage.looks(72, 82) == [] and stopped(stage.look(83))
    (said,) = stage.see(84, ranks.SaveKept("/out/b.pt", "", 9, "disk full"))
    assert said.text == "the script may write over /out/b.pt, which was not kept: disk full"
    (alert,) = stage.see(85, ranks.Restarted("from zero", 1, 9, 9, 9, "again from step 1"))
    assert alert.text.startswith("again from step 1; what it had saved before is kept in /run/kept/001-last.pt")


def test_a_node_on_which_slurm_can_start_nothing_ends_the_attempt_at_once() -> None:
    stage = Stage()
    nodes = (("node2", "Communication connection failure"),)
    assert stopped(stage.look(2, unreached=nodes)) == (
        "Slurm could not start the ranks on node2: Communication connection failure"
    )
    assert stage.look(4) == [], "once"
    stage.watch.new_attempt(at(5))
    assert stage.look(6) == [], "the preflight sees it by itself"


# --- what is left


def test_a_cancel_that_the_script_does_not_heed_is_enforced() -> None:
    stage = Stage(OWN._replace(cancel_grace=5))
    assert stage.looks(0, 20, stop="time limit") == []
    found = stage.looks(20, 120, stop="cancelled by the user")
    assert [second for second, _ in found] == [25, 70, 115]
    say, write, end = found[0][1]
    assert say.text == "the ranks did not exit within 5 s after the cancel: terminating them"
    assert write.event == RanksTerminated("cancelled by the user", 5) and end == brain.Terminate()
    assert found[1][1] == [brain.Say("the ranks ignore SIGTERM: killing them"), brain.Kill()]
    assert Stage().looks(0, 200, stop="cancelled by the user") == []


@pytest.mark.parametrize(("state", "first"), [("done", 46), ("stopped", 46), ("failed", 46), ("no progress", 16)])
def test_what_is_left_of_an_attempt_that_is_over_is_ended(state: str, first: int) -> None:
    """Sooner where nothing is to save; never a second time while torchrun ends its ranks."""
    stage = Stage()
    found = stage.looks(0, 111, marker=Marker(state))
    assert [second for second, _ in found] == list(range(first, 111, 46))
    assert stopped(found[0][1]) == "the attempt is over, but its processes still run: terminating them"
    assert stage.watch.abandoned == "", "it was over"


def test_the_first_agent_that_got_a_message_of_somebody_else_is_known() -> None:
    stage = Stage()
    assert stage.watch.stranger is None
    stage.see(20, ranks.Forged("somebody else changed the state of rendezvous 7\nmore"), node="node2")
    stage.see(21, ranks.Forged("somebody else wrote a"), node="node1")
    told = stage.watch.stranger
    assert told is not None and told.line() == "node2: somebody else changed the state of rendezvous 7"
    stage.watch.new_attempt(Moment(30, 30))
    assert stage.watch.stranger is None
