"""slurmddp debug shell, stacks and profile: what they ask for, show and refuse. Slurm is a stand-in."""

import json
import os
import threading
import time
from collections.abc import Callable

import pytest

from slurmddp.commands.debug import profile
from slurmddp.records import stacks
from slurmddp.records.submission import now as submitted_now
from slurmddp.run import submission
from slurmddp.run.gate import own
from slurmddp.run.layout import RunFolder
from slurmddp.run.version import version
from tests.checkpoints import make_run
from tests.helpers import Desk, Result, append_event

Cli = Callable[..., Result]
SRUN = """#!/bin/bash
printf '%s\\0' "$@" >"$HOME/srun.argv"
env -0 >"$HOME/srun.env"
cat "$HOME/answer"
exit "$(cat "$HOME/code")"
"""
ANSWER = "srun: a line of Slurm's\n" + "".join(
    map(
        stacks.write,
        (
            stacks.Rank(2, 4, 12, "S", "asked", "node2"),
            stacks.Line(2, "Current thread 0x00007f1 (most recent call first):"),
            stacks.Line(2, '  File "/r/code/slurmddp/runtime/watch/own_stacks.py", line 3 in look'),
            stacks.Line(2, "Thread 0x00007f2 (most recent call first):"),
            stacks.Rank(0, 4, 10, "S", "asked", "node1"),
            stacks.Line(0, "Thread 0x00007f3 (most recent call first):"),
            stacks.Line(2, '  File "train.py", line 9 in step'),
            stacks.Line(0, '  File "train.py", line 9 in step'),
            stacks.Rank(1, 4, 11, "T", "silent", "node1"),
        ),
    )
)


@pytest.fixture
def run(desk: Desk) -> RunFolder:
    """A run of job 7, whose ranks are on two nodes."""
    folder = make_run(desk.project / "runs" / "gpt-1")
    submission.write(own(folder, to="write"), submitted_now("7", "slurm", ("sbatch",)))
    append_event(folder.events, "job_started", attempt=0, job_id="7", node="node1", nodes="node[1-2]")
    append_event(folder.events, "attempt_started", attempt=0, job_id="7", node="node1", nodes="node1 node2")
    slurm_says(desk, "RUNNING")
    desk.program("srun", SRUN)
    (desk.home / "answer").write_text(ANSWER)
    (desk.home / "code").write_text("0")
    return folder


def slurm_says(desk: Desk, state: str) -> None:
    line = f"JobId=7 JobName=gpt UserId=alice(1001) JobState={state} Reason=None NodeList=node[1-2]"
    desk.program("scontrol", f"#!/bin/bash\necho '{line}'\n")


def srun(desk: Desk) -> tuple[list[str], dict[str, str]]:
    pairs = (desk.home / "srun.env").read_text().split("\0")[:-1]
    return (desk.home / "srun.argv").read_text().split("\0")[:-1], dict(pair.split("=", 1) for pair in pairs)


def test_attach_starts_a_step_beside_the_ranks(desk: Desk, run: RunFolder) -> None:
    (desk.home / "answer").write_text("out")
    (desk.home / "code").write_text("7")
    words = ("debug", "shell", str(run.path), "--node", "node2", "--", "echo", "-n", "a b")
    done = desk.command(*words, SLURM_JOB_ID="1", SLURMDDP_STEP="x")
    assert (done.code, done.out) == (7, "out"), done.err
    arguments, environment = srun(desk)
    assert arguments[-5:] == ["bash", str(run.node_sh), "echo", "-n", "a b"] and "--pty" not in arguments
    assert {"--overlap", "--jobid=7", "--nodelist=node2", "--mem=0"} <= set(arguments)
    ours = {name: value for name, value in environment.items() if name.startswith("SLURM")}
    assert ours == {
        "SLURMDDP_STEP": "attach", "SLURMDDP_ATTACH_NODES": "node1 node2", "SLURMDDP_NODES": "2",
        "SLURMDDP_RUN": str(run.path), "SLURMDDP_LOGS": str(run.attempt_logs(0)), "SLURMDDP_JOB_ID": "7",
        "SLURMDDP_ATTEMPT": "0", "SLURMDDP_RENDEZVOUS_ID": "gpt-1-7-0", "SLURMDDP_PORT": "0",
    }  # fmt: skip
    desk.command("debug", "shell", str(run.path))
    arguments, _ = srun(desk)
    assert "--nodelist=node1" in arguments and arguments[-3:-1] == ["/bin/sh", "-c"]


def test_stacks_are_grouped_and_the_odd_one_is_first(desk: Desk, run: RunFolder, cli: Cli) -> None:
    done = cli("debug", "stacks", str(run.path))
    assert done.code == 0, done.err
    assert (
        done.out
        == """\
rank 1 on node1, process 11
  stopped by a signal
  no answer

ranks 0, 2 on node1, node2
  main thread, most recent call first
    File "train.py", line 9 in step

no process found: rank 3
"""
    )
    arguments, _ = srun(desk)
    assert arguments[-4:] == [str(run.code_archive), "ranks", "stacks", "gpt-1-7-0"]
    assert arguments[-7:-5] == ["bash", str(run.python_sh)]
    assert {"--overlap", "--jobid=7", "--nodelist=node1,node2", "--ntasks-per-node=1", "--gres=none"} <= set(arguments)
    told = json.loads(cli("debug", "stacks", str(run.path), "--json").out)
    assert (told["attempt"], told["missing"]) == (0, [3])
    assert told["ranks"][1] == {
        "rank": 1, "node": "node1", "pid": 11, "state": "T", "answer": "silent", "threads": [[]],
    }  # fmt: skip
    assert told["ranks"][2]["threads"] == [['File "train.py", line 9 in step']]


def test_stacks_of_one_node_and_of_nodes_that_do_not_answer(desk: Desk, run: RunFolder, cli: Cli) -> None:
    (desk.home / "code").write_text("1")
    done = cli("debug", "stacks", str(run.path), "--node", "node2")
    assert done.code == 0 and "no process found" not in done.out
    assert "--nodelist=node2" in srun(desk)[0]
    (desk.home / "answer").write_text("")
    assert cli("debug", "stacks", str(run.path)).code == 1
    (desk.home / "code").write_text("0")
    done = cli("debug", "stacks", str(run.path))
    assert done.code == 1 and "they may just be starting" in done.err


@pytest.mark.parametrize("command", ["shell", "stacks"])
def test_what_has_no_ranks_is_refused(desk: Desk, run: RunFolder, cli: Cli, command: str) -> None:
    def refused(text: str, *words: str) -> None:
        done = cli("debug", command, str(run.path), *words)
        assert done.code == 2 and text in done.err and not (desk.home / "srun.argv").exists(), done.err

    refused("has no ranks on node node9\n  -> nodes: node1, node2", "--node", "node9")
    text = run.manifest.read_text()
    run.manifest.write_text(text.replace('"schema": ', '"schema": 9'))
    refused(f"and this slurmddp ({version()}) reads only version")
    run.manifest.write_text(text)
    (desk.bin / "srun").unlink()
    refused("srun is not on this machine")
    append_event(run.events, "attempt_ended", attempt=0, exit_code=1, decision="next")
    refused("has no ranks at the moment")
    slurm_says(desk, "PENDING")
    refused("is not running: requeued")
    (desk.bin / "scontrol").unlink()
    refused("squeue is not on this machine")
    run.submission.unlink()
    run.events.unlink()
    refused("is not running: it was never submitted")


@pytest.mark.skipif(os.getuid() != 0, reason="giving a folder to another user takes root")
def test_nothing_of_another_users_run_is_executed(desk: Desk, run: RunFolder, cli: Cli) -> None:
    os.chown(run.path, 65534, -1)
    for command in ("shell", "stacks"):
        done = cli("debug", command, str(run.path))
        assert done.code == 2 and "belongs to" in done.err and not (desk.home / "srun.argv").exists()


@pytest.fixture
def training(run: RunFolder) -> RunFolder:
    """A run of a bundled task, with this version's runtime."""
    run.job_json.write_text("{}")
    return run


def answered(run: RunFolder, **facts: object) -> threading.Thread:
    """What rank 0 does: read the request, and write the event."""

    def answer() -> None:
        while not run.profile_request.exists():
            time.sleep(0.01)
        asked = json.loads(run.profile_request.read_text())
        run.profile_request.unlink()
        append_event(run.events, "profiled", **{"step": 41, "last": 40 + asked["steps"], "error": "", **facts})

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def test_profile_prints_the_traces(training: RunFolder, cli: Cli) -> None:
    append_event(training.events, "profiled", step=1, last=2, files=["old"], error="")
    thread = answered(training, files=["a.json.gz", "b.json.gz"])
    done = cli("debug", "profile", str(training.path), "--steps", "7", "--all-ranks")
    thread.join()
    assert (done.code, done.out) == (0, "steps   41 to 47\ntrace   a.json.gz\ntrace   b.json.gz\n"), done.err
    thread = answered(training, files=[], error="rank 0: no CUPTI")
    done = cli("debug", "profile", str(training.path))
    thread.join()
    assert done.code == 1 and "torch.profiler failed: rank 0: no CUPTI" in done.err


def test_profile_refuses_what_nobody_would_answer(training: RunFolder, cli: Cli) -> None:
    def refused(text: str) -> None:
        done = cli("debug", "profile", str(training.path))
        assert done.code == 2 and text in done.err and not done.out, done.err

    training.profile_request.touch()
    refused("was requested before, and has not begun")
    training.profile_request.unlink()
    training.job_json.unlink()
    refused("runs your own script")
    training.events.unlink()
    append_event(training.events, "job_started", attempt=0, job_id="7", node="node1", nodes="node[1-2]")
    refused("has no ranks at the moment")
    assert not training.profile_request.exists()


def test_a_run_that_ends_before_its_profile(
    training: RunFolder, desk: Desk, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "_ASK_EVERY", 0.1)
    monkeypatch.setattr(profile, "running_attempt", lambda *_: slurm_says(desk, "CANCELLED"))
    done = cli("debug", "profile", str(training.path))
    assert done.code == 1 and "was over before the profile was written: " in done.err
    assert not training.profile_request.exists()
