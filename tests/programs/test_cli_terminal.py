"""Text of others (logs, causes, names) commands no terminal, on a real terminal; through a pipe a log is unchanged."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurmddp.visible import one_line, visible, with_colours
from tests.helpers import Desk

CLIPBOARD = "\x1b]52;c;cm0gLXJmIH4K\x07"
NASTY = f"{CLIPBOARD}\x1b[2J\x1bc\x9b31m\x9d0;title\x07 \u202egnp.exe\u2066 \u200f a\x08b \x7f"
COLOURED = "\x1b[1;31mred\x1b[0m"
UNSAFE = [
    *map(chr, range(9)), "\x0b", "\x0c", "\r", "\x1b", "\x7f", "\x80", "\x9b", "\x9f", "\u061c", "\u200e", "\u200f",
    "\u2028", "\u2029", *map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2066, 0x206A)),
]  # fmt: skip


def test_what_is_escaped() -> None:
    for char in UNSAFE:
        shown = visible(f"a{char}b")
        assert shown.isprintable() and shown.startswith("a\\") and len(shown) > 4, repr(char)
    for text in ("äöü €\U0001f600 \\n", "a\tb\nc", "שלום", "الاسم"):
        assert visible(text) == text
    assert one_line("a\nb") == "a\\nb"


def test_colours_pass_where_they_may_and_end() -> None:
    assert with_colours(COLOURED) == COLOURED + "\x1b[0m"
    assert with_colours("plain") == "plain"
    for code in ("\x1b[2J", "\x1b[5;5H", "\x1b[?25l", "\x1b[31", "\x1b[0;1;A", "\x1b]0;t\x07"):
        assert with_colours(f"\x1b[31m{code}") == f"\x1b[31m{visible(code)}\x1b[0m"


def on_terminal(desk: Desk, *arguments: str) -> tuple[bytes, int]:
    """What `slurmddp ARGUMENTS` writes to a terminal, both its streams, and its exit code."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "slurmddp", *arguments]
    child = subprocess.Popen(command, cwd=desk.project, env=desk.environment, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # Linux's end of file: nobody else has the terminal
            break
        shown += data
    os.close(ours)
    return shown.replace(b"\r\n", b"\n"), child.wait(timeout=60)


@pytest.fixture
def run(desk: Desk) -> Path:
    """A run that failed, whose every text is nasty."""
    desk.write("train.py")
    ranks = desk.program("ranks", '#!/bin/bash\n[[ $1 != -c ]] || exit 0\ncat "$HOME/printed"\nexit 1\n')
    (desk.home / "printed").write_text(f"{NASTY}\n{COLOURED} 1 %\r2 %\nValueError: {NASTY}\n")
    desk.command("run", "train.py", "--site", "here", "--quiet", "--set", f"container.python={ranks}")
    (folder,) = (desk.project / "runs").iterdir()
    attempt = folder / "logs" / "attempt-000"
    (attempt / f"node{CLIPBOARD.replace('/', '')}.log").write_text(f"{NASTY}\n")
    more: list[dict[str, Any]] = [
        {"event": "node_excluded", "excluded": f"node{NASTY}", "reason": f"{NASTY}\nstate    done"},
        {"event": "attempt_ended", "attempt": 0, "cause": NASTY, "node": f"n{NASTY}", "rank": 1, "exit_code": 1},
    ]
    with (folder / "events.jsonl").open("a") as events:
        events.writelines(json.dumps({"time": 1e9, **line}) + "\n" for line in more)
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"time": 1e9, "attempt": 0, "step": NASTY}) + "\n")
    return folder


def test_no_command_hands_it_to_the_terminal(desk: Desk, run: Path) -> None:
    (desk.project / f"job{NASTY}.yaml").write_text(f'site: here\n"a{json.dumps(NASTY)[1:-1]}": 1\n')
    commands = [
        ("status", run.name), ("runs",), ("logs", run.name), ("goodput", run.name), ("cancel", run.name),
        ("status", f"no{NASTY}"), ("checkpoint", "list", run.name), ("plan", f"job{NASTY}.yaml"),
        ("plan", f"{NASTY}.yaml"), ("submit", "train.py", "--dry-run", "--site", "here", "--", NASTY), (NASTY,),
        ("plan", "train.py", "--site", "here", "--explain", "train.args", "--", NASTY),
    ]  # fmt: skip
    for command in commands:
        shown, _ = on_terminal(desk, *command)
        text = shown.decode("utf-8")
        for char in UNSAFE:
            assert char not in text.replace(COLOURED, "").replace("\x1b[0m", ""), (command, text)
    shown, _ = on_terminal(desk, "status", run.name)
    assert b"\\x1b]52;c;" in shown and b"\\u202e" in shown
    assert not any(line.startswith(b"state    done") for line in shown.splitlines()), "one value is one line"


def test_logs_keep_colours_on_a_terminal_and_every_byte_in_a_pipe(desk: Desk, run: Path) -> None:
    shown, code = on_terminal(desk, "logs", run.name)
    assert code == 0 and COLOURED.encode() in shown and b"\\x1b]52;c;cm0gLXJmIH4K\\x07" in shown
    (log,) = [path for path in (run / "logs" / "attempt-000").glob("*.log") if "\x1b" not in path.name]
    raw = b"binary \xff\xfe\x80 \x1b]52;c;x\x07\r\n"
    log.write_bytes(raw + b"no end")
    command = [sys.executable, "-m", "slurmddp", "logs", run.name, "--attempt", "0", "--node", log.stem]
    done = subprocess.run(command, cwd=desk.project, env=desk.environment, capture_output=True, check=True)
    assert done.stdout == raw + b"no end\n"
    told = desk.command("status", run.name, "--json")
    assert told.out.isascii() and told.out.isprintable() is False and "\\u001b]52" in told.out
    assert "\x1b" not in told.out and "gnp" in json.dumps(json.loads(told.out))
    words = ("submit", "train.py", "--dry-run", "--site", "cores", "--time", "10m", "--", NASTY)
    command = [sys.executable, "-m", "slurmddp", *words]
    done = subprocess.run(command, cwd=desk.project, env=desk.environment, capture_output=True, check=True)
    assert "\u202egnp.exe".encode() in done.stdout, "the exact scripts"
    piped = desk.command("status", run.name)
    assert "\x1b" not in piped.out and "\\x1b]52" in piped.out, "all else is escaped in a pipe as well"
