"""Input of any size or depth costs a few seconds and one message: no command hangs, and none ends in a traceback.

Seconds are of processor time, which a busy machine does not change.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import Desk, Result

Bounded = Callable[..., Result]

#: What no input may cost.
SECONDS = 5.0
#: Of waiting: for what takes no processor time, such as a pipe that nobody writes to.
WAIT = 60
SCRIPT = "name: gpt\nsite: here\ntrain: {script: train.py}\n"
MILLION = 1_000_000


def each(kinds: Iterable[Any], *quick: Any) -> list[Any]:
    """All kinds as parameters; those that are not named run in `make test-full` alone."""
    return [kind if kind in quick else pytest.param(kind, marks=pytest.mark.long) for kind in kinds]


@pytest.fixture
def bounded(cli: Callable[..., Result]) -> Iterator[Bounded]:
    """`cli`, which must cost less than SECONDS, and print no traceback and no more than a page of errors."""

    def give_up(*_: object) -> None:
        raise TimeoutError(f"it waits for more than {WAIT} s")

    def run(*arguments: str, **variables: str) -> Result:
        begin = time.process_time()
        signal.alarm(WAIT)
        try:
            done = cli(*arguments, **variables)
        finally:
            signal.alarm(0)
        spent = time.process_time() - begin
        assert spent < SECONDS, f"{spent:.1f} s"
        assert "Traceback" not in done.err and len(done.err) < 20_000, done.err[-2000:]
        return done

    before = signal.signal(signal.SIGALRM, give_up)
    yield run
    signal.signal(signal.SIGALRM, before)


#: "is nested deeper than", or "exceeded maximum nesting depth": the parser of PyYAML 6.0.4 counts, too.
NESTED = "nest"
JOBS: dict[str, tuple[str, str]] = {
    "unknown keys": (SCRIPT + "".join(f"k{n:05}: 1\n" for n in range(80_000)), "and 79,980 more mistakes"),
    "unknown keys below": (SCRIPT + "resources:\n" + "".join(f" k{n:05}: 1\n" for n in range(80_000)), "more mistakes"),
    "wrong entries": (SCRIPT + "setup:\n" + "- []\n" * 80_000, "more mistakes"),
    "wrong variables": (SCRIPT + "environment:\n" + "".join(f" {n}: b\n" for n in range(80_000)), "more mistakes"),
    "hours": (SCRIPT + f"resources: {{time: {'9' * 900_000}h}}\n", "must be a duration"),
    "hours that are infinite": (SCRIPT + f"resources: {{time: {'9' * 400}h}}\n", "must be a duration"),
    "days": (SCRIPT + f"resources: {{time: {'9' * 5000}-00:00:00}}\n", "must be a duration"),
    "seconds": (SCRIPT + f"timeouts: {{stop: {'9' * 5000}}}\n", "timeouts.stop"),
    "memory": (SCRIPT + f"resources: {{mem_per_node: {'9' * 5000}G}}\n", "must be an amount of memory"),
    "nodes": (SCRIPT + f"resources: {{nodes: {'9' * 5000}}}\n", "resources.nodes"),
    "steps": (SCRIPT.replace("}", f", steps: {'9' * 900_000}}}"), "train.steps"),
    "steps as a power": (SCRIPT.replace("}", f", steps: {'9' * 900_000}e99}}"), "train.steps"),
    "a rate": (SCRIPT.replace("}", f", optimizer: {{lr: {'9' * 900_000}}}}}"), "train.optimizer.lr"),
    "depth": ("a: " + "[" * 900_000, NESTED),
    "depth in blocks": ("- " * 400_000, NESTED),
    "maps": ("{a: " * 200_000, NESTED),
    "an alias bomb": ("a: &a [x]\n" + "".join(f"b{n}: &b{n} [*a, *a]\n" for n in range(30)), "contains a YAML alias"),
    "a long name": (f"site: here\nname: {'x' * 900_000}\n", "name: 'xxx"),
    "a long word": ("x" * 999_000, "is not a mapping"),
    "a long key": (f"{'x' * 900_000}: 1\n", "is not valid YAML"),
    "quotes": ('a: "' + "\\x41" * 200_000, "is not valid YAML"),
    "binary noise": ("\0" * 900_000, "is not valid YAML"),
    "comments": ("#\n" * 450_000, "is empty"),
    "documents": ("---\n" * 200_000, "second YAML document"),
    "binds": (SCRIPT + "container: {binds: [" + "a:b:c:d, " * 80_000 + "]}\n", "more mistakes"),
    "alerts": (SCRIPT + "alerts: [" + "{to: x}, " * 80_000 + "]\n", "more mistakes"),
}


@pytest.mark.parametrize("kind", each(JOBS, "unknown keys", "hours", "steps as a power", "depth", "an alias bomb"))
def test_a_job_file(desk: Desk, bounded: Bounded, kind: str) -> None:
    text, message = JOBS[kind]
    desk.write("train.py")
    desk.write("job.yaml", text)
    done = bounded("check", "job.yaml")
    assert done.code == 2 and message in done.err, done.err[:2000]


@pytest.mark.long
def test_many_right_entries(desk: Desk, bounded: Bounded) -> None:
    desk.site("name: adds\ntitle: has setup lines\nbases: [here]\njob: {setup: [a, b]}\n")
    desk.write("train.py")
    many = (
        "".join(f" V{n}: '{n}'\n" for n in range(20_000)) + "setup:\n" + "".join(f"- true {n}\n" for n in range(20_000))
    )
    desk.write("job.yaml", SCRIPT.replace("here", "adds") + "environment:\n" + many)
    assert bounded("check", "job.yaml").code == 0
    shown = bounded("check", "job.yaml", "--explain", "environment")
    assert shown.out.count("\n") == 40_000


@pytest.mark.parametrize(
    "arguments",
    [
        ("--set", "a." * 50_000 + "a=1"),
        ("--set", "resources.time=" + "9" * 100_000 + "h"),
        ("--set", "environment=" + "[" * 50_000),
        ("--explain", "setup." + "9" * 5000),
        ("--explain", "setup.²"),
        ("--nodes", "9" * 100_000),
        ("--time", "1" * 5000 + ":00:00"),
    ],
)
def test_an_option(desk: Desk, bounded: Bounded, arguments: tuple[str, ...]) -> None:
    desk.write("train.py")
    desk.write("job.yaml", SCRIPT)
    done = bounded("check", "job.yaml", *arguments)
    assert done.code == 2 and done.err.startswith("slurmddp: "), done.err[:1000]


def test_a_variable_of_the_environment(desk: Desk, bounded: Bounded) -> None:
    desk.write("train.py")
    desk.write("job.yaml", SCRIPT)
    assert bounded("check", "job.yaml", **{"SLURMDDP_" + "A__" * 30_000 + "A": "1"}).code == 2


@pytest.fixture
def failed(desk: Desk, cli: Callable[..., Result]) -> Path:
    """The folder of a run that failed, its log to be replaced."""
    desk.write("train.py")
    ranks = desk.program("ranks", "#!/bin/bash\n[[ $1 != -c ]] || exit 0\nexit 1\n")
    options = ("--set", f"container.python={ranks}", "--set", "recovery.no_progress=1")
    assert cli("run", "train.py", "--site", "here", "--quiet", *options).code == 1
    (folder,) = (desk.project / "runs").iterdir()
    (folder / "events.jsonl").write_text('{"event": "job_started", "attempt": 0, "job_id": "local-1-1"}\n')
    return folder


def ended(folder: Path, log: str = "") -> None:
    """The run failed with this log."""
    with (folder / "events.jsonl").open("a") as events:
        events.write('{"event": "job_ended", "attempt": 0, "exit_code": 1}\n')
    (found,) = (folder / "logs" / "attempt-000").glob("*.log")
    found.write_text(log)


ROOT_CAUSE = "Root Cause (first observed failure):\n"
LOGS = {
    "blank lines": "\n" * 3 * MILLION,
    "blank lines of spaces": " \t\n" * MILLION,
    "a cause and blank lines": ROOT_CAUSE + "\n" * (MILLION - 100),
    "causes": ROOT_CAUSE * 27_000,
    "causes without an end": (ROOT_CAUSE + "  rank      : 0 (local_rank: 0)\n") * 14_000,
    "one word": "x" * 3 * MILLION,
    "one line of words": "Rendezvous" * 300_000,
    "one exception": "E" * MILLION + "Error" * 1000,
    "dots": "[rank0]: " + "a." * MILLION,
    "errors": "Error" * 600_000,
    "our own": "slurmddp: node " + "a: " * MILLION,
    "exceptions": "ValueError: x\n" * 200_000,
}


@pytest.mark.parametrize("kind", each(LOGS, "blank lines", "a cause and blank lines", "one line of words"))
def test_status_on_a_log(desk: Desk, bounded: Bounded, failed: Path, kind: str) -> None:
    ended(failed, LOGS[kind])
    done = bounded("status", failed.name)
    assert done.code == 1 and "state    failed" in done.out and len(done.out) < 5000, done.out[:3000]


EVENTS: dict[str, str] = {
    "blank lines": "\n" * 3 * MILLION,
    "depth": "[" * MILLION + "\n",
    "depth of maps": '{"a": ' * 200_000 + "\n",
    "a huge line": '{"event": "x", "text": "' + "x" * 30 * MILLION + '"}\n',
    "digits": '{"event": "x", "time": ' + "9" * 100_000 + "}\n",
    "an attempt of 4000 digits": '{"event": "x", "attempt": ' + "9" * 4000 + "}\n",
    "no end": "x" * 30 * MILLION,
    "times": '{"event": "x", "attempt": 0, "time": 1e999}\n{"event": "x", "attempt": 0, "time": NaN}\n',
    "events": '{"event": "error", "attempt": 0, "time": 1, "rank": 0, "message": "x"}\n' * 40_000,
}


@pytest.mark.parametrize("kind", each(EVENTS, "depth", "an attempt of 4000 digits"))
def test_commands_on_events(desk: Desk, bounded: Bounded, failed: Path, kind: str) -> None:
    with (failed / "events.jsonl").open("a") as events:
        events.write(EVENTS[kind] + "\n")
    (failed / "metrics.jsonl").write_text(EVENTS[kind])
    ended(failed)
    for command in (("status", failed.name), ("status", failed.name, "--time"), ("runs",), ("logs", failed.name)):
        done = bounded(*command)
        assert done.code == (1 if command[0] == "status" else 0), (command, done.out[:1000], done.err[:1000])


DEEP = "[" * 200_000


@pytest.mark.parametrize(
    "name", each(["submission.json", "manifest.json", "markers/attempt-000.json", "job.json"], "submission.json")
)
@pytest.mark.parametrize("kind", ["deep", "pipe"])
def test_a_file_of_the_run_folder(desk: Desk, bounded: Bounded, failed: Path, name: str, kind: str) -> None:
    ended(failed)
    (failed / name).unlink(missing_ok=True)
    if kind == "deep":
        (failed / name).write_text(DEEP)
    else:
        os.mkfifo(failed / name)
    for command in ("status", "logs", "status --time"):
        done = bounded(*command.split(), str(failed))
        assert done.code in (0, 1, 2, 3), done.err
    done = bounded("submit", "--resume", str(failed))
    assert done.code == 2


@pytest.mark.parametrize(
    "name",
    each(
        ["events.jsonl", "metrics.jsonl", "logs/job.log", "stop", "logs/attempt-000/x.log"],
        "events.jsonl",
        "logs/job.log",
    ),
)
def test_a_pipe_where_a_file_should_be(desk: Desk, bounded: Bounded, failed: Path, name: str) -> None:
    ended(failed)
    (failed / name).unlink(missing_ok=True)
    os.mkfifo(failed / name)
    for command in ("status", "logs", "status --time", "runs"):
        done = bounded(*command.split(), *([] if command == "runs" else [str(failed)]))
        assert done.code in (0, 1, 2, 3), done.err


def test_a_project_of_folders_in_folders(desk: Desk, bounded: Bounded) -> None:
    place = desk.project
    desk.write("train.py")
    for _ in range(600):
        place = place / "a"
    place.mkdir(parents=True)
    (place / "x.py").touch()
    done = bounded("run", "train.py", "--site", "here")
    assert done.code == 2 and "deeper" in done.err, done.err[-500:]


def test_an_index_with_a_deep_line(desk: Desk, bounded: Bounded, failed: Path) -> None:
    with (desk.home / ".local/state/slurmddp/runs.jsonl").open("a") as index:
        index.write(DEEP + "\n" + json.dumps({"id": "x", "path": "y" * MILLION, "created": "z"}) + "\n")
    assert failed.name in bounded("runs").out
