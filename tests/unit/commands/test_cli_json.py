"""Every command that prints has --json, every one that submits has --dry-run, and answers say what is next."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typer.main import get_command

from slurmddp.commands.app import app
from slurmddp.records.submission import now as submitted_now
from slurmddp.run import submission
from slurmddp.run.gate import own
from slurmddp.run.state import EXIT_CODES, next_commands
from tests.checkpoints import make_run
from tests.helpers import Desk, Result, append_event

Cli = Callable[..., Result]

#: They become another program, or print what is JSON already.
WITHOUT_JSON = {"debug shell", "debug port", "schema"}
#: What gives Slurm a new job. (check --preflight and site init --probe submit jobs that themselves only look.)
SUBMIT = {"submit", "resume", "rerun", "sweep submit", "sweep rerun", "build-image"}


def options() -> Iterator[tuple[str, set[str]]]:
    """The words and options of every command, hidden ones and other names of the same too."""
    pending: list[tuple[str, Any]] = [("", get_command(app))]
    while pending:
        words, command = pending.pop()
        for name, part in getattr(command, "commands", {}).items():
            pending.append((f"{words} {name}".strip(), part))
        if not getattr(command, "commands", {}):
            yield words, {option for each in command.params for option in each.opts}


COMMANDS = dict(options())


def test_the_lists_are_of_commands_that_exist() -> None:
    assert COMMANDS.keys() >= WITHOUT_JSON | SUBMIT and len(COMMANDS) > 35


@pytest.mark.parametrize("words", sorted(COMMANDS))
def test_every_command_has_json_and_every_submission_a_dry_run(words: str) -> None:
    assert ("--json" in COMMANDS[words]) != (words in WITHOUT_JSON)
    assert words not in SUBMIT or "--dry-run" in COMMANDS[words]


@pytest.mark.parametrize("state", EXIT_CODES)
def test_what_is_next_are_commands_that_exist(state: str) -> None:
    found = next_commands("gpt-1", state)
    assert len(found) >= 2
    for each in found:
        name, *words = each.split()
        command = max((known for known in COMMANDS if " ".join(words).startswith(known + " ")), key=len)
        assert name == "slurmddp" and "gpt-1" in words
        assert {word for word in words if word.startswith("-")} <= COMMANDS[command]


def waiting(desk: Desk) -> str:
    """A run whose job 7 waits in the queue; Slurm cancels it."""
    folder = make_run(desk.project / "runs" / "gpt-1")
    submission.write(own(folder, to="write"), submitted_now("7", "slurm", ("sbatch",)))
    desk.program("scontrol", "#!/bin/sh\necho 'JobId=7 UserId=alice(1001) JobState=PENDING Reason=Priority'\n")
    for name in ("squeue", "sacct"):
        desk.program(name, "#!/bin/sh\n")
    desk.program("scancel", '#!/bin/sh\ntouch "$HOME/cancelled"\n')
    return str(folder.path)


def test_cancel(desk: Desk, cli: Cli) -> None:
    done = cli("cancel", waiting(desk), "--json")
    told = json.loads(done.out)
    assert done.code == 0 and (desk.home / "cancelled").exists()
    assert (
        told["run_id"] == "gpt-1" and told["jobs"] == [{"job_id": "7", "action": "cancelled"}] and told["end"] is None
    )
    assert told["text"].startswith("Cancelled job 7.") and told["next"][0] == "slurmddp status gpt-1"


def test_status_and_doctor_say_what_is_next(desk: Desk, cli: Cli) -> None:
    run = waiting(desk)
    assert "slurmddp cancel gpt-1" in json.loads(cli("status", run, "--json").out)["next"]
    folder = desk.project / "runs" / "gpt-1"
    (folder / "rendezvous.key").touch()
    (folder / "job.sh").touch()
    append_event(folder / "events.jsonl", "job_started", attempt=0, job_id="7", node="n1", nodes="n1")
    (folder / "logs/attempt-000").mkdir(parents=True, exist_ok=True)
    (folder / "logs/attempt-000/n1.log").write_text("Traceback (most recent call last):\nValueError: boom\n")
    told = json.loads(cli("doctor", run, "--json").out)
    assert told["root"] and told["next"][0] == "slurmddp logs gpt-1 --tail 100"
    assert json.loads(cli("doctor", str(folder / "logs/attempt-000/n1.log"), "--json").out)["next"] == []


def test_a_run_on_this_machine_ends_with_its_status(desk: Desk, cli: Cli) -> None:
    desk.write("train.sh", "echo hello\nexit 3\n")
    ranks = desk.program("ranks", "#!/bin/bash\n[[ $1 != -c ]] || exit 0\necho hello\nexit 1\n")
    done = cli("run", "train.sh", "--site", "here", "--json", "--set", f"container.python={ranks}")
    told = json.loads(done.out)
    assert (told["state"], told["exit_code"]) == ("failed", done.code) and told["next"][0].startswith(
        "slurmddp doctor "
    )


def test_alert_watch_once(desk: Desk, cli: Cli) -> None:
    assert json.loads(cli("alert", "watch", "--once", "--json").out) == {"sent": 0, "left": 0, "why": None}
