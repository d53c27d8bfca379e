"""The whole job.sh and its supervisor, with stand-ins for srun and scontrol: what interrupts them at any moment, what
they decide.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

import pytest

from slurmddp.records.stop import CANCELLED, StopRequest
from slurmddp.render.scripts import job_script, node_script
from tests.helpers import GPU_SITE, LM_JOB, SHELL, Desk, change_code, make_code, on_disk

#: The ranks: they run until the stop file appears or SIGTERM comes, for 20 s at most. The other steps succeed at once.
SRUN = """#!/bin/bash
[[ "$*" != *"slurmddp.zip guard"* ]] || exit 0
step=${SLURMDDP_STEP:-train}
[[ -z "${SLURMDDP_SWEEP:-}" ]] || step=sweep
trap 'echo TERM >>"$SLURMDDP_RUN/steps"; exit 1' TERM  # before the word "train": a SIGTERM just behind it counts
echo "$step" >>"$SLURMDDP_RUN/steps"
[[ "$step" != preflight ]] || echo '{"nodes": {"node1": []}}' >"$SLURMDDP_LOGS/preflight/verdict.json"
[[ "$step" == train ]] || exit 0
for ((i = 0; i < 200; i++)); do
  [[ ! -e "$SLURMDDP_RUN/stop" ]] || { echo saved >>"$SLURMDDP_RUN/steps"; exit 0; }
  sleep 0.1
done
echo late >>"$SLURMDDP_RUN/steps"
"""
#: As python.sh of the run's code, but for the cleanup on this machine.
STARTER = f"""#!/bin/bash
if [[ "$3" != sweep ]]; then
{(SHELL / "python.sh").read_text()}
fi
{SRUN}"""
SCONTROL = """#!/bin/bash
case $2 in
  hostnames) echo node1 ;;
  *) echo 'JobId=7 JobState=RUNNING Reason=None Restarts=0 NodeList=node1' ;;
esac
"""
#: Does something once, as soon as a condition holds, between two lines of the supervisor, or of its child process that
#: touches the run folder: the moment is exact. Both may come there at the same time: the folder decides.
INJECT = """\
import os, subprocess, sys
begun, job = 0, str(os.getppid())
def read(name):
    try:
        with open({run!r} + "/" + name) as file:
            return file.read()
    except OSError:
        return ""
def inject(frame, event, _):
    global begun
    if "/supervisor/" not in frame.f_code.co_filename:
        return None
    if event != "line" or os.path.exists({run!r} + "/injected"):
        return inject
    try:
        if not ({when}):
            return inject
        os.mkdir({run!r} + "/injecting")
    except OSError:
        return inject
    with open({run!r} + "/injected", "w") as file:
        file.write(read("steps"))
    subprocess.run(["bash", "-c", {what!r}.replace("$$", job)])
    return inject
def count(holds):
    global begun
    begun += bool(holds)
    return begun if holds else 0
sys.settrace(inject)
"""


def started(more: str) -> str:
    """So many lines of the supervisor after job_started: more, such as `> 3`."""
    return f"count(os.path.getsize({{run!r}} + '/events.jsonl') > 0) {more}"


def asks(why: str) -> str:
    """A command that writes the stop file at once: the supervisor may look between any two moments."""
    return f"echo '{{{StopRequest(why).text().strip()}}}' >'{{run}}/stop.part'; mv '{{run}}/stop.part' '{{run}}/stop'"


#: What `slurmddp cancel` does.
CANCEL = asks(CANCELLED)
LIMIT = asks("time limit")

#: A stand-in for the sender of alerts: it runs sender.sh in the run folder, if a test has written one.
SENDER = """\
import os, subprocess
BUDGET = 30.0
class Notifier:
    def __init__(self, settings):
        self.run = settings.run
    def open(self):
        pass
    def send(self, alert, seconds):
        if os.path.exists(self.run + "/sender.sh"):
            rank = "-" if alert.rank is None else str(alert.rank)
            words = [alert.kind, alert.state, alert.cause, alert.next, rank, alert.node or "-"]
            subprocess.run(["bash", self.run + "/sender.sh", *words])
    def poll(self):
        return []
    def unstored(self):
        return []

    def settle(self, seconds):
        return []
def main(words):
    kind, state, cause, following = words[1:5]
    settings = type("Settings", (), {"run": words[0]})
    facts = {"kind": kind, "state": state, "cause": cause, "next": following, "rank": None, "node": ""}
    alert = type("Alert", (), facts)
    Notifier(settings).send(alert, 30)
    return 0
"""
STARTED = "'train' in read('steps')"


@dataclass
class Job:
    """One run folder, and how job.sh went in it."""

    desk: Desk
    text: str
    scontrol: str = ""  # a stand-in, where the site has one
    count: int = 0
    node: str = SRUN  # what the local site starts as node.sh

    def begin(self) -> None:
        """A new run folder."""
        self.count += 1
        self.run = self.desk.root / f"run{self.count}"
        (self.run / "logs").mkdir(parents=True)
        make_code(self.run)
        change_code(self.run, "supervisor/notify.py", lambda _: SENDER)
        for name, text in (("job.sh", self.text), ("node.sh", self.node), ("code/python.sh", STARTER)):
            (self.run / name).write_text(text)

    def finish(self, **variables: str) -> None:
        """Run job.sh."""
        environment = {**self.desk.environment, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", **variables}
        environment["SLURMD_NODENAME"] = "node1"
        words = ["bash", str(self.run / "job.sh"), str(self.run)]
        if self.scontrol:
            self.desk.program("scontrol", self.scontrol)
        self.done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=60)
        if self.scontrol:  # else what job.sh leaves behind for a requeued job would ask for three minutes
            self.desk.program("scontrol", self.scontrol.replace("RUNNING", "COMPLETED"))

    def go(self, when: str, what: str, *, before: str = "", prepare: str = "") -> list[str]:
        """Run job.sh with something injected: the steps that it started. before: the stop file of an earlier job.
        prepare: a line of Python that changes the supervisor.
        """
        self.begin()
        if before:
            (self.run / "stop").write_text(StopRequest(before).text())
        run, what = str(self.run), what.format(run=self.run)
        imported = '"slurmddp.supervisor." + module)\n'
        inject = INJECT.format(run=run, when=when.format(run=run), what=what)

        def changed(text: str) -> str:
            assert imported in text
            return inject + text.replace(imported, f"{imported}        {prepare}\n")

        change_code(self.run, "supervisor/__main__.py", changed)
        self.finish()
        assert (self.run / "injected").exists(), self.done.stdout + self.done.stderr
        steps = self.run / "steps"
        return steps.read_text().splitlines() if steps.exists() else []

    @property
    def events(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in (self.run / "events.jsonl").read_text().splitlines()]

    @property
    def end(self) -> tuple[object, object]:
        """How the last attempt ended: decision and cause."""
        (ended,) = (row for row in self.events if row["event"] == "attempt_ended")
        return ended["decision"], ended["cause"]


@pytest.fixture
def job(desk: Desk) -> Job:
    desk.program("srun", SRUN)
    return Job(desk, job_script(desk.plan(LM_JOB)), SCONTROL)


@pytest.fixture
def here(desk: Desk) -> Job:
    return Job(desk, job_script(desk.plan(LM_JOB.replace("gpus", "here"))))


@pytest.mark.parametrize(
    "later", [0, 6, 15, 24, *(pytest.param(n, marks=pytest.mark.long) for n in (3, 9, 12, 18, 21, 27))]
)
def test_a_cancel_of_a_job_that_has_just_begun_is_kept(job: Job, later: int) -> None:
    """`slurmddp cancel` asks by the stop file as soon as there is a job_started; an older stop file goes."""
    assert "late" not in job.go(started(f"> {later}"), CANCEL, before="time limit")
    assert job.end == ("stopped", "cancelled by the user")
    assert (job.run / "stop").read_text() == StopRequest(CANCELLED).text()


@pytest.mark.parametrize("command", range(1, 16, 2))
def test_a_cancel_while_an_older_stop_file_is_taken_away(job: Job, command: int) -> None:
    """Of a job that Slurm has started again: its earlier start has said job_started."""
    taken = f"count(begun or frame.f_code.co_name == 'forget_stop') == {command}"
    assert "train" not in job.go(taken, CANCEL, before="time limit")
    assert job.end == ("stopped", "cancelled by the user")


def test_the_stop_file_of_an_earlier_job_is_not_for_this_one(job: Job) -> None:
    assert job.go(STARTED, CANCEL, before="time limit") == [
        "preflight",
        "train",
        "saved",
        "sweep",
    ]


@pytest.mark.parametrize(
    ("site", "state", "sweeps"), [("here", "", 1), ("gpus", "RUNNING", 1), ("gpus", "COMPLETING", 0)]
)
def test_what_a_signal_leaves_is_cleaned_up_where_something_may_still_start(
    request: pytest.FixtureRequest, site: str, state: str, sweeps: int
) -> None:
    """Slurm takes no further step in a job that it ends, and kills what is left of it."""
    job: Job = request.getfixturevalue("job" if site == "gpus" else "here")
    job.scontrol = job.scontrol and job.scontrol.replace("RUNNING", state)
    steps = job.go(STARTED, "kill -TERM $$")
    assert "TERM" in steps and steps.count("sweep") == sweeps
    assert job.end[0] == "cancelled"


ASKS = {
    "stop": (LIMIT, ("requeue", "time limit")),
    "cancel": (CANCEL, ("stopped", "cancelled by the user")),
    "SIGTERM": ("kill -TERM $$", ("cancelled", "cancelled")),
}


@pytest.mark.parametrize("site", ["gpus", "here"])
@pytest.mark.parametrize("asked", ASKS)
def test_what_is_asked_to_stop_early_does_not_start_its_ranks(
    request: pytest.FixtureRequest, site: str, asked: str
) -> None:
    """At moments from job_started on, through the preflight; where the ranks' step is just being started, it ends."""
    job: Job = request.getfixturevalue("job" if site == "gpus" else "here")
    what, (decision, cause) = ASKS[asked]
    early = 0
    for command in range(3, 400, 31):
        steps = job.go(started(f"== {command}"), what)
        if "train" in (job.run / "injected").read_text().split():
            break
        early += "train" not in steps
        assert "train" not in steps or {"saved", "TERM"} & set(steps[steps.index("train") :]), (command, steps)
        assert job.end == ("stopped" if site == "here" and decision == "requeue" else decision, cause), command
        assert "late" not in steps
    assert early >= (3 if site == "gpus" else 1)


PARTS = ["supervisor/brain/watch.py", "causes/cause.rules", "supervisor/release.py", "a half"]


@pytest.mark.parametrize("gone", ["", *PARTS])
def test_a_run_folder_without_the_functions_fails_with_a_message_and_an_alert(job: Job, gone: str) -> None:
    """All of them, or one: a purge of the file system deletes what nobody has read for long."""
    job.begin()
    archive = job.run / "code" / "slurmddp.zip"
    if gone in ("", "a half"):
        archive.unlink() if not gone else os.truncate(archive, 300_000)
    else:
        change_code(job.run, gone, None)
    (job.run / "sender.sh").write_text('printf "%s|" "$@" >"${0%/*}/told"\n')
    job.finish()
    assert job.done.returncode == 1
    said = f"job.sh: the run's copy of the code is {'incomplete' if gone else 'gone'}, {job.run}/code: was the"
    assert said in job.done.stderr
    if gone in PARTS[:-1]:  # else its sender is gone, too: see test_last_alert.py
        assert (job.run / "told").read_text().startswith("failed|failed|the run's copy of the code is ")
    assert not (job.run / "events.jsonl").exists() and not (job.run / "steps").exists()


def test_an_old_bash_is_refused(job: Job) -> None:
    """BASH_VERSINFO is read-only, so the comparison is what the test changes."""
    assert job.text.count(">= 404))") == 1
    job.text = job.text.replace(">= 404))", ">= 9904))")
    job.begin()
    job.finish()
    assert job.done.returncode == 1 and "is too old: 4.4 or newer is needed" in job.done.stderr


def test_sigterm_during_the_preflight(job: Job) -> None:
    """The preflight itself gets it, and nothing is started after it."""
    hold = SRUN.replace('[[ "$step" == train ]] || exit 0', "")
    job.desk.program("srun", hold)
    steps = job.go("read('steps')", "kill -TERM $$")
    assert steps in (["preflight", "TERM"], ["preflight", "saved"])
    assert job.end == ("cancelled", "cancelled")


@pytest.mark.parametrize("site", ["gpus", "here"])
def test_when_job_sh_is_killed_the_guard_alone_acts_and_without_one_the_ranks_are_ended(
    request: pytest.FixtureRequest, site: str
) -> None:
    """Slurm ends the step at once: what follows from that is no failure of the ranks."""
    job: Job = request.getfixturevalue("job" if site == "gpus" else "here")
    steps = job.go(STARTED, "kill -KILL $$")
    assert job.done.returncode == -9
    names = [row["event"] for row in job.events]
    if site == "gpus":
        assert names[-1] == "attempt_started"
    else:
        assert steps[-2:] == ["TERM", "sweep"] and names[-1] == "job_ended" and names.count("attempt_started") == 1
        assert job.events[-1]["decision"] == "failed"
        assert job.end == ("failed", "job.sh was killed by SIGKILL (out of memory?)")


@pytest.mark.parametrize("where", ["settle", "_end"])
def test_a_signal_after_the_outcome_is_known_changes_nothing(here: Job, where: str) -> None:
    """Slurm sends SIGTERM to what is left of a job, and a user may cancel in the last second."""
    here.node = "#!/bin/bash\nexit 0\n"
    after = "'\"decision\": \"done\"' in read('events.jsonl')"
    here.go(f"frame.f_code.co_name == '{where}' and {after}", "kill -TERM $$; sleep 0.5")
    assert here.done.returncode == 0 and here.events[-1]["decision"] == "done" and here.end[0] == "done"
    assert not (here.run / "stop").exists()


#: An own script that looks at no stop file, and one that ignores SIGTERM, too.
IGNORES = SRUN.replace('[[ ! -e "$SLURMDDP_RUN/stop" ]] || {', "false && {").replace("i < 200", "i < 400")
SCRIPT_JOB = """
name: own
site: gpus
resources: {nodes: 1}
train: {script: own.py}
timeouts: {stop: 2}
"""


@pytest.fixture
def own(desk: Desk) -> Job:
    desk.write("own.py")
    desk.program("srun", IGNORES)
    return Job(desk, job_script(desk.plan(SCRIPT_JOB)), SCONTROL)


def test_a_cancel_of_a_script_that_does_not_look_ends_with_sigterm(own: Job) -> None:
    assert own.go(STARTED, CANCEL)[:3] == ["preflight", "train", "TERM"]
    assert own.end == ("stopped", "cancelled by the user")
    (told,) = (row for row in own.events if row["event"] == "ranks_terminated")
    assert told["waited"] == 2 and own.events[0]["cancel_grace"] == 2


def test_a_script_that_ignores_sigterm_is_killed(own: Job) -> None:
    """The supervisor leaves torchrun 45 s to kill its ranks; 3 here."""
    own.desk.program("srun", IGNORES.replace("; exit 1' TERM", "' TERM"))
    steps = own.go(STARTED, CANCEL, prepare="import slurmddp.supervisor.brain.watch as w; w._KILL_AFTER = 3")
    assert steps[:3] == ["preflight", "train", "TERM"] and "late" not in steps, own.done.stdout
    assert "the ranks ignore SIGTERM: killing them" in own.done.stdout
    (ended,) = (row for row in own.events if row["event"] == "attempt_ended")
    assert (ended["decision"], ended["cause"], ended["exit_code"]) == ("stopped", "cancelled by the user", 137)
    assert not any(row["event"] == "requeued" for row in own.events)


#: Slurm ends the job meanwhile, for a reason for which job.sh requeues jobs.
TIMEOUT = SCONTROL.replace("RUNNING Reason=None", "COMPLETING Reason=TimeLimit").replace(
    "*)", """requeue*) echo requeue >>"$HOME/requeued" ;;\n  *)"""
)


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_cancelled_run_is_not_requeued_at_its_time_limit(desk: Desk, job: Job, cancelled: bool) -> None:
    desk.program("srun", IGNORES)
    desk.program("scancel", '#!/bin/sh\necho "$@" >>"$HOME/withdrawn"\n')
    job.scontrol = TIMEOUT
    job.go(STARTED, (CANCEL + "; " if cancelled else "") + "kill -TERM $$")
    events = [row["event"] for row in job.events]
    assert ("requeued" in events, (desk.home / "withdrawn").exists()) == (not cancelled, cancelled)
    assert job.events[-1]["decision"] == ("cancelled" if cancelled else "requeue")


#: The job's own warning and its end at the limit, and what of an own script keeps it from another start.
ENDS = {"asked": LIMIT, "killed": "kill -TERM $$"}
SAVES = "sleep 0.1; mkdir -p '{run}/checkpoints/step-7'; touch '{run}/checkpoints/step-7/model'; "


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(
    ("policy", "before", "decision"),
    [("auto", "", "stopped"), ("auto", SAVES, "requeue"), ("always", "", "requeue")],
    ids=["nothing saved", "saved", "always"],
)
def test_an_own_script_that_saved_nothing_is_not_requeued_at_its_time_limit(
    desk: Desk, end: str, policy: str, before: str, decision: str
) -> None:
    desk.write("own.py")
    desk.program("srun", SRUN if end == "asked" else IGNORES)
    job = Job(desk, job_script(desk.plan(SCRIPT_JOB, f"recovery.requeue={policy}")), TIMEOUT)
    told = 'printf "%s|" "$@" >>"{run}/told"; echo >>"{run}/told"'
    job.go(STARTED, before + f"echo 41 >'{{run}}/progress'; echo '{told}' >'{{run}}/sender.sh'; " + ENDS[end])
    assert job.events[-1]["decision"] == decision
    (ended,) = (row for row in job.events if row["event"] == "attempt_ended")
    why = (
        f"time limit; the script saved nothing in {job.run}/checkpoints since this job began (the last step seen is 41)"
    )
    assert str(ended["cause"]).startswith(why) == (decision == "stopped"), ended
    alerts = (job.run / "told").read_text().splitlines()
    if decision == "stopped":
        (only,) = alerts
        assert only.startswith("stopping|stopped|time limit") and "saved nothing" in only and "--resume" not in only
        # It may save and load elsewhere, as minGPT-ddp does.
        assert "a requeued job may begin again" in only and "checkpoint.watch, or set recovery.requeue: always" in only


@pytest.mark.parametrize(
    ("content", "decision"),
    [(r"\200\002saved.", "requeue"), (r"\200\002cut off", "stopped"), ("step 7", "stopped")],
    ids=["a save", "half a save", "a log"],
)
def test_what_a_script_saves_elsewhere_is_evidence_too(desk: Desk, content: str, decision: str) -> None:
    """checkpoint.watch: paths relative to the folder of submission, where the script runs."""
    desk.write("own.py")
    desk.write("out/of an earlier run.pt", "\x02")
    desk.program("srun", SRUN)
    job = Job(desk, job_script(desk.plan(SCRIPT_JOB, "checkpoint.watch=[out, '{run}/more']")), TIMEOUT)
    out = desk.project / "out/last.pt"
    job.go(STARTED, f"sleep 0.1; printf '{content}' >'{out}'; " + ENDS["asked"])
    assert job.events[-1]["decision"] == decision
    (ended,) = (row for row in job.events if row["event"] == "attempt_ended")
    where = f"saved nothing in {job.run}/checkpoints or {desk.project}/out or {job.run}/more since this job began"
    assert (where in str(ended["cause"])) == (decision == "stopped"), ended


def test_where_it_is_not_known_whether_a_script_saved(desk: Desk, own: Job) -> None:
    """A file system that does not answer: what is not known is no evidence."""
    desk.program("find", "#!/bin/sh\nexit 1\n")
    own.scontrol = TIMEOUT
    own.go(STARTED, "mkdir '{run}/checkpoints'; kill -TERM $$")
    assert own.events[-1]["decision"] == "stopped"


@pytest.mark.parametrize(
    ("best", "failures", "decision"),
    [
        ("40", "", "requeue"),
        ("41", "", "requeue"),
        ("41", "0 41\n0 41\n", "stopped"),
        ("40", "0 40\n0 40\n", "requeue"),
    ],
    ids=["further", "no further, once", "no further, again and again", "further in the end"],
)
def test_starts_that_gain_nothing_until_the_time_limit_count_for_the_breaker(
    job: Job, best: str, failures: str, decision: str
) -> None:
    files = f"echo {best} >'{{run}}/best'; printf {failures!r} >'{{run}}/failures'; echo 41 100 >'{{run}}/progress'; "
    job.go(STARTED, files + ENDS["asked"])
    assert job.events[-1]["decision"] == decision
    assert ("3 starts in a row came no further than step 41" in str(job.end[1])) == (decision == "stopped")
    assert (job.run / "best").read_text() == "41\n"


LOGS = {
    "an exception": (
        "[rank0]: Traceback (most recent call last):\n[rank0]: ValueError: no such book",
        0,
        "ValueError: no such book",
    ),
    "a signal to an agent that was logging": (
        "[rank0]: ValueError: no such book\nSignalException: Process 7 got signal: 15\n\n"
        "During handling of the above exception, another exception occurred:\n\nAttributeError: no _str",
        0,
        "ValueError: no such book",
    ),
    "only an agent's own errors after a signal": (
        "SignalException: Process 7 got signal: 15\nAttributeError: no _str\n"
        "E1122 20:00:00.000000 1 api.py:1] failed (exitcode: -9) local_rank: 1 (pid: 7) of binary: python",
        1,
        "killed by SIGKILL (out of memory?)",
    ),
    "a setup line": (
        "slurmddp: node N: setup line failed with exit code 3: false",
        None,
        "setup line failed with exit code 3: false",
    ),
    "a signal": (
        "E1122 20:00:00.000000 1 api.py:1] failed (exitcode: -9) local_rank: 1 (pid: 7) of binary: python",
        1,
        "killed by SIGKILL (out of memory?)",
    ),
}


def _logs() -> list[Any]:
    """Each kind with each site and awk; `make test` has each kind once, and one of them with all."""
    return [
        pytest.param(
            *case, marks=() if case[::2] == ("gpus", "mawk") or case[1] == "an exception" else pytest.mark.long
        )
        for case in itertools.product(("gpus", "here"), LOGS, ("mawk", "gawk"))
    ]


@pytest.mark.parametrize(("site", "kind", "awk"), _logs())
def test_the_cause_is_found_in_the_logs(request: pytest.FixtureRequest, site: str, kind: str, awk: str) -> None:
    """With either awk: Debian's and Ubuntu's is mawk, which reads nothing at all where one of its files is missing."""
    program = shutil.which(awk)
    if program is None:
        pytest.skip(f"{awk} is not installed")
    job: Job = request.getfixturevalue("job" if site == "gpus" else "here")
    (job.desk.bin / "awk").symlink_to(program)
    text, rank, cause = LOGS[kind]
    name = "node1" if site == "gpus" else platform.node()
    only_train = "[[ -z ${SLURMDDP_STEP:-}${SLURMDDP_SWEEP:-} ]] || exit 0"
    ranks = f"{only_train}\ncat >\"$SLURMDDP_LOGS/{name}.log\" <<'END'\n{text}\nEND\nexit 1\n"
    if site == "gpus":
        job.desk.program("srun", SRUN.split("for ((")[0] + ranks)
    job.node = ranks
    job.begin()
    (job.run / "ranks").write_text(f"{name}\n{name}\n")
    job.finish()
    ended = next(row for row in job.events if row["event"] == "attempt_ended")
    assert (ended["rank"], ended["node"], ended["cause"]) == (rank, name, cause), job.done.stderr


def test_an_alert_gets_rank_and_node_as_fields(job: Job) -> None:
    """The text of an exception may look like a rank on a node."""
    said = "ValueError: the shapes of rank 2 on axis 1 differ"
    only_train = "[[ -z ${SLURMDDP_STEP:-}${SLURMDDP_SWEEP:-} ]] || exit 0"
    ranks = f"{only_train}\necho '{said}' >\"$SLURMDDP_LOGS/node1.log\"\nexit 1\n"
    job.desk.program("srun", SRUN.split("for ((")[0] + ranks)
    job.text = job.text.replace("breaker=3", "breaker=1")
    job.begin()
    (job.run / "sender.sh").write_text('[[ "$1" != failed ]] || printf "%s|" "$@" >"${0%/*}/told"\n')
    job.finish()
    why = "1 starts in a row crashed before step 1"
    assert (job.run / "told").read_text() == f"failed|failed|node1: {said}; {why}|not restarted automatically|-|node1|"
    marker = (job.run / "markers" / "attempt-000.json").read_text()
    assert json.loads(marker)["reason"] == why


#: As node.sh does where it fails on the nodes of WHERE, in the preflight or at the ranks' start.
FAILS = """#!/bin/bash
[[ -z "${SLURMDDP_SWEEP:-}" && "$*" != *"slurmddp.zip guard"* ]] || exit 0
echo "${SLURMDDP_STEP:-train}" >>"$SLURMDDP_RUN/steps"
for node in $WHERE; do
  printf '1 %s\n%s\n' "$FAULT" "$SAYS" >"$SLURMDDP_LOGS/preflight/$node.failed"
  echo "slurmddp: node $node: $SAYS" >>"$SLURMDDP_LOGS/$node.log"
done
found='{"nodes": {"node1": [["bad", "%s", "", "%s"]]}}'
[[ -n "$WHERE" ]] || printf "$found" "$SAYS" "$FAULT" >"$SLURMDDP_LOGS/preflight/verdict.json"
exit 1
"""
NODES = """#!/bin/bash
case "$*" in
  *hostnames*) printf 'node%d\\n' $(seq "$COUNT") ;;
  requeue*) echo requeue >>"$COUNTED" ;;
  *) echo 'JobId=7 JobState=RUNNING Reason=None Restarts=0 NodeList=nodes' ;;
esac
"""
SETUP = "setup line failed with exit code 3: module load x"
#: What may be otherwise on another node.
ELSEWHERE = "cannot bind /data (No such file or directory)"


def failing(desk: Desk, nodes: int, where: str, says: str, *options: str, site: str = "gpus") -> Job:
    """A job whose node.sh fails on some of its nodes."""
    desk.program("srun", FAILS)
    job_yaml = LM_JOB.replace("gpus", site)
    text = job_script(desk.plan(job_yaml, f"resources.nodes={nodes}", "train.batch.global=64", *options))
    job = Job(desk, text, NODES)
    job.begin()
    fault = "" if says == ELSEWHERE else "user"
    job.finish(WHERE=where, SAYS=says, FAULT=fault, COUNT=str(nodes), COUNTED=str(desk.root / "requeues"))
    return job


def excluded(job: Job) -> list[object]:
    return [row["excluded"] for row in job.events if row["event"] == "node_excluded"]


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("node1", SETUP),
        ("node1", "container.python: there is no python9 in the image: correct it"),
        ("", "no torch in /usr/bin/python3 - install it in the image, or correct container.python"),
    ],
)
def test_what_the_user_must_correct_costs_no_further_node(desk: Desk, where: str, says: str) -> None:
    """The check finds it on the only node: on another one it would be the same, after another wait in the queue."""
    job = failing(desk, 1, where, says)
    assert (job.run / "steps").read_text().split() == ["preflight"]
    assert job.events[-1]["decision"] == "failed" and not (desk.root / "requeues").exists()


def test_what_another_node_may_not_have_is_tried_there(desk: Desk) -> None:
    job = failing(desk, 1, "node1", ELSEWHERE)
    assert job.events[-1]["decision"] == "requeue" and (desk.root / "requeues").exists()


def test_a_setup_line_that_fails_on_some_nodes_takes_these_out(desk: Desk) -> None:
    job = failing(desk, 3, "node2", SETUP, "recovery.preflight=false")
    assert excluded(job) == ["node2"] and job.events[-1]["decision"] == "requeue"


@pytest.mark.parametrize("nodes", [1, 3])
def test_without_a_preflight_the_first_start_that_fails_everywhere_is_the_last(desk: Desk, nodes: int) -> None:
    job = failing(desk, nodes, "node1 node2 node3", SETUP, "recovery.preflight=false")
    assert (job.run / "steps").read_text().split() == ["train"] and not (desk.root / "requeues").exists()
    assert job.end == ("failed", SETUP) and excluded(job) == []


@pytest.mark.parametrize(
    ("site", "says", "decision", "update"),
    [
        ("gpus", SETUP, "failed", False),
        ("fast", SETUP, "failed", True),
        ("fast", ELSEWHERE, "requeue", False),
    ],
)
def test_a_failed_job_that_slurm_would_requeue_by_itself_is_kept_from_it(
    desk: Desk, site: str, says: str, decision: str, update: bool
) -> None:
    """With --requeue=expedite, Slurm requeues a job that exits with another code than 0."""
    desk.site(GPU_SITE.replace("name: gpus", "name: fast") + "requeue: expedite\n")
    updates = desk.root / "updates"
    spy = f'[[ "$*" != *Requeue=* ]] || echo "$*" >>{updates}'
    desk.program("timeout", f'#!/bin/bash\n{spy}\nexec /usr/bin/timeout "$@"\n')
    job = failing(desk, 1, "node1", says, site=site)
    assert job.events[-1]["decision"] == decision and job.done.returncode == 1
    assert updates.exists() == update
    if update:
        assert updates.read_text() == "20 scontrol update JobId=7 Requeue=0\n"
        (job.run / "code" / "slurmddp.zip").unlink()  # job.sh cannot even start
        job.finish()
        assert job.done.returncode == 1 and len(updates.read_text().splitlines()) == 2


BROKEN = {
    "setup": (("setup=[true, '(exit 3)', touch after]",), "setup line failed with exit code 3: (exit 3)"),
    "exit": (("setup=['(exit 0)', 'true $(exit 3)', 'exit 0', touch after]",), "setup line exited with code 0: exit 0"),
    "exit of a script": (
        ("setup=[source <(echo exit 3), touch after]",),
        "setup line exited with code 3: source <(echo exit 3)",
    ),
    "python": (("container.python=/no/python",), "container.python: there is no /no/python on this node: "),
    "broken": (("container.python=broken",), "container.python: broken does not work: libpython: no such file"),
    "old": (("container.python=old",), "container.python: /usr/bin/old is Python 3.6; the ranks need 3.10"),
    "torch": (
        ("container.python=bare",),
        "no torch in /opt/bare: name its Python, --set container.python=FILE, or add `setup: [source .../activate]`",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_on_one_machine_it_fails_at_once_and_says_why(desk: Desk, kind: str) -> None:
    """The real node.sh; it took three starts, of which none said anything."""
    options, says = BROKEN[kind]
    desk.program("broken", "#!/bin/sh\necho Trouble >&2\necho 'libpython: no such file' >&2\nexit 127\n")
    desk.program("old", "#!/bin/sh\necho False nothing 3.6 /usr/bin/old\n")
    desk.program("bare", "#!/bin/sh\necho True torch 3.12 /opt/bare\n")
    plan = desk.plan(LM_JOB.replace("gpus", "here"), *options)
    job = Job(desk, job_script(plan), node=on_disk(desk, node_script(plan)))
    job.begin()
    job.finish()
    decision, cause = job.end
    assert decision == "failed" and str(cause).startswith(says)
    assert job.done.returncode == 1 and not (job.run / "after").exists()


@pytest.mark.parametrize("code", [0, 1])
def test_what_the_ranks_call_hopeless_is_not_started_again(desk: Desk, code: int) -> None:
    """They leave a marker (slurmddp/runtime/watch/marker.py, give_up); what torchrun then exits with says nothing."""
    text = "ImportError: cannot import name 'nothing' from 'json'"
    marker = json.dumps({"state": "failed", "reason": text, "cause": text, "attempt": 0}, indent=2)
    mark = f"mkdir -p $SLURMDDP_RUN/markers; cat >$SLURMDDP_RUN/markers/attempt-000.json <<'END'\n{marker}\nEND\n"
    job = Job(desk, job_script(desk.plan(LM_JOB.replace("gpus", "here"))), node=f"{mark}exit {code}\n")
    job.begin()
    job.finish()
    assert job.end == ("failed", text) and job.done.returncode == 1
    said = [line.partition(" job.sh: ")[2] for line in job.done.stdout.splitlines()]
    assert f"attempt 0: its ranks exited with code {code}, {text}; decision: failed" in said
    assert said[-1] == "exits with code 1; decision: failed"


ENVIRONMENTS = {
    "venv": "source {folder}/bin/activate",
    "conda": "conda activate mine",
    "module": "module load pytorch",
}


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_a_setup_line_brings_the_python_of_the_ranks(desk: Desk, kind: str) -> None:
    """On the local site, too, where slurmddp's own Python is the default. A module may bring packages by PYTHONPATH."""
    folder = desk.root / "environment"
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python3"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] || echo "$0 PYTHONPATH=$PYTHONPATH" >"$SLURMDDP_RUN/seen"\n')
    python.chmod(0o755)
    (folder / "bin" / "activate").write_text(f"PATH={folder}/bin:$PATH\n")
    functions = f"conda() {{ . {folder}/bin/activate; }}; module() {{ conda; export PYTHONPATH=/sw/torch; }}"
    line = ENVIRONMENTS[kind].format(folder=folder)
    plan = desk.plan(LM_JOB.replace("gpus", "here"), f"setup=['{functions}', '{line}']")
    job = Job(desk, job_script(plan), node=on_disk(desk, node_script(plan)))
    job.begin()
    job.finish(PYTHONPATH="/of/the/shell")
    added = ":/sw/torch" if kind == "module" else ""
    seen = (job.run / "seen").read_text()
    assert re.fullmatch(rf"{python} PYTHONPATH=/\S+/slurmddp-\d+/{job.run.name}-\S+/code{added}\n", seen), (
        job.done.stdout
    )


def test_a_run_stops_when_its_gpu_hours_are_used_and_stays_out(desk: Desk) -> None:
    """Four GPUs for 3 s. The next job of the run, which somebody else has brought back, starts nothing."""
    desk.program("srun", SRUN)
    job = Job(desk, job_script(desk.plan(LM_JOB, f"recovery.max_gpu_hours={4 * 3 / 3600}")), SCONTROL)
    told = 'printf "%s|" "$@" >>"{run}/told"; echo >>"{run}/told"'
    assert job.go(STARTED, f"echo '{told}' >'{{run}}/sender.sh'") == ["preflight", "train", "saved", "sweep"]
    decision, cause = job.end
    assert decision == "stopped" and str(cause).startswith("the run has used 0.0 GPU hours, and recovery.max_gpu"), (
        cause
    )
    (only,) = (job.run / "told").read_text().splitlines()
    assert only.startswith("stopping|stopped|the run has used") and "not restarted automatically" in only
    seconds = json.loads((job.run / "ledger.json").read_text())["gpu_seconds"]
    assert 12 <= seconds < 4 * 60
    (job.run / "steps").unlink()
    job.finish()
    assert not (job.run / "steps").exists() and "asked to stop before the ranks started" in job.done.stdout
    assert json.loads((job.run / "ledger.json").read_text())["gpu_seconds"] > seconds
