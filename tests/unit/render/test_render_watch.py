"""What job.sh makes of an attempt that leads nowhere, on real bash: its functions, with a sleep in place of srun."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.helpers import SHELL, Desk

STUBS = """
set -uo pipefail
say() { echo "$*"; }
event() { :; }
alert() { :; }
alert_cause() { alert "$@"; }
best_cause() { echo "$1"; }
cause_text() { echo "$1"; }
plain() { head -n 1; }
json() { printf '"%s"' "$1"; }
marker() { echo "$run/marker"; }
scheduler=slurm
stop_lead=
cancel_grace=
attempt=0
slurm_state=RUNNING
consequence='Connection reset'
chosen=(node1 node2)
sleep 60 >/dev/null &
child=$!
"""
END = """
kill -0 "$child" 2>/dev/null && sleep 0.1 # a signal takes a moment
kill -0 "$child" 2>/dev/null && echo alive && kill "$child"
"""


class Stage:
    """A run folder with the logs of an attempt, and job.sh's functions that look at it."""

    def __init__(self, desk: Desk, own_script: str = "") -> None:
        self.run = desk.root / "run"
        self.logs = self.run / "logs"
        self.logs.mkdir(parents=True)
        self.own_script = own_script
        self.events = self.run / "events.jsonl"
        self.events.touch()

    def starts(self, node: str, count: int) -> None:
        """torchrun's folders of so many starts on a node."""
        for number in range(count):
            (self.logs / "torchrun" / node / "id_x" / f"attempt_{number}").mkdir(parents=True, exist_ok=True)

    def event(self, name: str, **facts: object) -> str:
        """A line of bash that adds an event of rank 0."""
        told = json.dumps({"event": name, "rank": 0, "node": "node1", **(facts or {"message": "x", "kind": "E"})})
        return f"echo '{told}' >>{self.events}"

    def bash(self, *lines: str) -> str:
        variables = f"run={self.run}; logs={self.logs}; own_script={self.own_script}; exec {{events}}<{self.events}"
        functions = [f"source {SHELL}/{name}.sh" for name in ("watch", "decide")]
        text = "\n".join([STUBS, variables, *functions, "new_attempt", *lines, END])
        done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=30)
        assert not done.stderr.replace("Terminated", "").strip().startswith("bash:"), done.stderr
        return done.stdout


@pytest.fixture
def stage(desk: Desk) -> Stage:
    return Stage(desk)


def test_ranks_that_do_not_start_again_end_the_attempt(stage: Stage) -> None:
    """The first start took 20 s; the next one may take 25 s."""
    began = ["unset SECONDS; SECONDS=0; new_attempt; SECONDS=20", stage.event("rank_started"), "read_events"]
    failed = ["SECONDS=100", stage.event("error"), "read_events; expect_restart"]
    assert stage.bash(*began, *failed, "SECONDS=144; expect_restart") == "alive\n"
    assert stage.bash(*began, *failed, "SECONDS=147; expect_restart").startswith(
        "terminating the attempt: the ranks did not restart within 45 s\n"
    )


def test_ranks_that_start_again_late_are_waited_for_as_long_the_next_time(stage: Stage) -> None:
    again = ["unset SECONDS; SECONDS=0; new_attempt; SECONDS=20", stage.event("rank_started"), "read_events"]
    again += [
        "SECONDS=100",
        stage.event("error"),
        "read_events",
        "SECONDS=124",
        stage.event("rank_started"),
        "read_events",
    ]
    assert stage.bash(*again, "SECONDS=300; expect_restart") == "alive\n"
    longer = ["SECONDS=400", stage.event("error"), "read_events; SECONDS=450; expect_restart"]
    assert stage.bash(*again, *longer) == "alive\n"


@pytest.mark.parametrize(("stopped", "bound"), [(1, 75), (2, 45)])
def test_ranks_of_an_own_script_that_do_not_start_again_end_the_attempt(desk: Desk, stopped: int, bound: int) -> None:
    """The script reports nothing; the agents report that its ranks are gone. Others may still save: 30 s more."""
    stage = Stage(desk, own_script="yes")
    began = ["unset SECONDS; SECONDS=0; new_attempt; SECONDS=20", stage.event("rank_started"), "read_events"]
    failed = ["SECONDS=90", stage.event("ranks_stopped"), "read_events; expect_restart", "SECONDS=100"]
    failed += [stage.event("ranks_stopped")] * (stopped - 1) + ["read_events; expect_restart"]
    since = 100 if stopped == 2 else 90
    assert stage.bash(*began, *failed, f"SECONDS={since + bound - 1}; expect_restart") == "alive\n"
    assert stage.bash(*began, *failed, f"SECONDS={since + bound + 2}; expect_restart").startswith(
        f"terminating the attempt: the ranks did not restart within {bound} s\n"
    )


def test_ranks_of_an_own_script_that_start_again_go_on(desk: Desk) -> None:
    """The agents of the start before are not counted again."""
    stage = Stage(desk, own_script="yes")
    stopped, started = stage.event("ranks_stopped"), stage.event("rank_started")
    again = ["unset SECONDS; SECONDS=0; new_attempt; SECONDS=20", started]
    again += ["SECONDS=100", stopped, stopped, started, "read_events"]
    assert stage.bash(*again, "SECONDS=300; expect_restart") == "alive\n"
    assert stage.bash(*again, stopped, "read_events", "SECONDS=145; expect_restart") == "alive\n"


@pytest.mark.parametrize("what", ["no start yet", "marker"])
def test_nothing_is_expected_where_there_is_no_measure_or_the_attempt_is_over(stage: Stage, what: str) -> None:
    started = [stage.event("rank_started")] if what == "marker" else []
    lines = [*started, stage.event("error"), "read_events", f"[[ '{what}' != marker ]] || touch {stage.run}/marker"]
    assert stage.bash(*lines, "SECONDS=900; expect_restart") == "alive\n"


def test_starts_that_nobody_counts_end_the_attempt(stage: Stage) -> None:
    """On node2 alone, say: its Python is broken. Of two, the second may be counted in a moment."""
    stage.starts("node1", 1)
    stage.starts("node2", 2)
    assert stage.bash("count_starts") == "alive\n"
    stage.starts("node2", 3)
    assert stage.bash("count_starts").startswith("terminating the attempt: 2 starts failed")


def test_starts_that_the_breaker_has_counted_do_not(stage: Stage) -> None:
    stage.starts("node1", 6)
    (stage.run / "failures").write_text("0 10\n0 20\n0 30\n0 40\n0 50\n")
    folder = stage.logs / "torchrun" / "node1" / "id_x"
    lines = ["count_starts", f"mkdir {folder}/attempt_6; SECONDS=20; count_starts"]
    assert stage.bash(*lines) == "alive\n"
    (folder / "attempt_6").rmdir()
    lines += [f"mkdir {folder}/attempt_7; SECONDS=40; count_starts"]
    assert stage.bash(*lines).startswith("terminating the attempt: 2 starts failed")


@pytest.mark.parametrize(("signalled", "verdict"), [(0, "fault"), (1, "fault"), (2, "asked")])
def test_a_sigterm_that_reached_all_agents_was_asked_for(stage: Stage, signalled: int, verdict: str) -> None:
    for number in (1, 2):
        said = (
            "W1122 api.py:1028] Received 15 death signal, shutting down workers\n"
            if number <= signalled
            else "step 1\n"
        )
        Path(stage.logs, f"node{number}.log").write_text(said)
    assert stage.bash("nobody_asked && echo fault || echo asked", 'kill "$child"; wait "$child"').split()[0] == verdict


def test_a_hang_that_nobody_stopped_is_told_once_and_ends_nothing(stage: Stage) -> None:
    tell = 'alert() { echo "$1: $3; $4"; }; unescaped() { cat; }'
    began = [tell, "unset SECONDS; SECONDS=0; new_attempt; SECONDS=20", stage.event("rank_started"), "read_events"]
    hang = {"event": "hang_reported", "rank": 0, "ranks": [3], "nodes": ["node2"], "waited": 131.2}
    told = [f"echo '{json.dumps(hang)}' >>{stage.events}", 'read_events; SECONDS=900; expect_restart; echo "$noted"']
    over = [stage.event("hang_over"), 'read_events; echo "<$noted>"']
    assert stage.bash(*began, *told, *over).splitlines() == [
        "hang: 3 node2 hang: no progress for 131 s; nothing is stopped; the stacks of the ranks are in the run folder",
        "3 node2 hang: no progress for 131 s",
        "<>",
        "alive",
    ]


def straggler(stage: Stage, what: str, host: str) -> str:
    return stage.event(what, host=host, slow_rank=9, part="compute", factor=1.83, seconds_a_step=0.4)


def test_a_node_that_stays_slow_is_told_once(stage: Stage) -> None:
    told = ['alert() { echo "alert $SECONDS: $*"; }', "unset SECONDS; SECONDS=0", "new_attempt"]
    look = "read_events; name_stragglers"
    begins = [straggler(stage, "straggler_begins", host) for host in ("n7", "n8")]
    ends, again = straggler(stage, "straggler_ends", "n8"), straggler(stage, "straggler_begins", "n8")
    lines = [*told, *begins, look, "SECONDS=200", ends, look, "SECONDS=310", look, "SECONDS=400", again, look]
    said = stage.bash(*lines, "SECONDS=690", look, straggler(stage, "straggler_ends", "n7"), begins[0], look,
                      "SECONDS=1500", look).splitlines()  # fmt: skip
    text = (
        "9 n{} straggler: compute takes 1.83 times as long as elsewhere training continues, at the speed of this node"
    )
    assert said[:-1] == [
        f"alert 310: straggler running {text.format(7)}",
        f"alert 1500: straggler running {text.format(8)}",
    ]


def test_a_start_of_the_ranks_forgets_who_was_slow(stage: Stage) -> None:
    begins = straggler(stage, "straggler_begins", "n7")
    lines = [
        'alert() { echo "alert $*"; }',
        "unset SECONDS; SECONDS=0; new_attempt",
        begins,
        "read_events",
        "SECONDS=9",
    ]
    lines += [stage.event("rank_started"), "read_events", "SECONDS=900", "read_events; name_stragglers"]
    assert "alert" not in stage.bash(*lines)


@pytest.mark.parametrize(
    ("own", "event", "alert"),
    [
        ("", {"event": "first_step"}, "recovered running 1 n2 why training continues"),
        ("yes", {"event": "first_step"}, None),
        ("yes", {"event": "restarted", "how": "went on"}, "recovered running 1 n2 why training continues"),
        (
            "yes",
            {"event": "restarted", "how": "from zero"},
            "warning running 147 steps; before that: 1 n2 why nothing is stopped 1 n2",
        ),
        (
            "yes",
            {"event": "restarted", "how": "unknown"},
            "warning running 147 steps; before that: 1 n2 why nothing is stopped 1 n2",
        ),
    ],
)
def test_recovered_is_what_went_on(desk: Desk, own: str, event: dict[str, str], alert: str | None) -> None:
    """Of a script of one's own, only its observer can tell. Each start is told once."""
    stage = Stage(desk, own_script=own)
    line = stage.event(event["event"], **{key: event[key] for key in event if key != "event"}, step=1, text="147 steps")
    lines = ['alert() { echo "alert $*"; }', "unescaped() { cat; }", "recovering='1 n2 why'", line, "read_events"]
    said = [told for told in stage.bash(*lines).splitlines() if told.startswith("alert")]
    assert said == ([f"alert {alert}"] if alert else [])


def test_a_start_from_an_unknown_step_is_told_after_a_failure_only(desk: Desk) -> None:
    stage = Stage(desk, own_script="yes")
    unknown, zero = (stage.event("restarted", how=how, text=f"it is {how}") for how in ("unknown", "from zero"))
    lines = ['alert() { echo "alert $*"; }', "unescaped() { cat; }", unknown, zero, "read_events"]
    assert stage.bash(*lines).splitlines()[:-1] == ["alert warning running it is from zero nothing is stopped"]


ASKED = "when the script had been asked to save and exit"


@pytest.mark.parametrize(
    ("events", "code", "cause"),
    [
        (["SIGKILL"], 137, f"0 node1 killed by SIGKILL (out of memory?), {ASKED} (time limit); nothing saved|"),
        (["SIGKILL"], 0, "- - time limit; nothing saved|time limit"),
        (["SIGTERM"], 143, "- - time limit; nothing saved|time limit"),
        ([], 1, "- - time limit; nothing saved|time limit"),
    ],
)  # fmt: skip
def test_a_rank_that_dies_while_it_is_asked_to_save_is_the_cause(
    stage: Stage, events: list[str], code: int, cause: str
) -> None:
    lines = ["unescaped() { cat; }", *(stage.event("rank_exited", signal=each) for each in events), "read_events"]
    lines += [
        "kept='nothing saved'; state=; outside=",
        "goes_on() { return 1; }",
        f"decide_after_stop 'time limit' {code}",
    ]
    assert stage.bash(*lines, 'echo "$decision|$cause|$outside"').splitlines()[0] == f"stopped|{cause}"


def test_ranks_that_do_not_work_together_are_told_once_per_job(stage: Stage) -> None:
    event = stage.event("no_process_group", world=4, text='each of the 4 ranks \\"trains\\" rank 9 on n7: x')
    lines = ['alert() { printf "[%s]" alert "$@"; }', "unescaped() { cat; }", event, event, "read_events"]
    said = stage.bash(*lines).splitlines()[0]
    assert said.startswith("[alert][warning][running][each of the 4 ranks")
    assert said.endswith("[nothing is stopped]alive")
    assert said.count("[alert]") == 1, "and its prose gives no rank and no node"
