"""Text of others (logs, causes, names) commands no terminal, on a real terminal; through a pipe a log is unchanged."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmddp.visible import one_line, visible, with_colours
from tests.helpers import Desk
from tests.programs.test_docs_commands import SBATCH

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


def on_terminal(
    desk: Desk, *arguments: str, look: Callable[[bytes], object] = len, columns: int = 0, **variables: str
) -> tuple[bytes, int]:
    """What `slurmddp ARGUMENTS` writes to a terminal, both its streams, and its exit code. look: gets what is written
    so far, after each write. columns: of the terminal; 0: it does not say."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, "-m", "slurmddp", *arguments]
    environment = {**desk.environment, **variables}
    child = subprocess.Popen(command, cwd=desk.project, env=environment, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # Linux's end of file: nobody else has the terminal
            break
        shown += data
        look(shown)
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
        ("status", run.name), ("runs",), ("logs", run.name), ("status", run.name, "--time"), ("cancel", run.name),
        ("status", f"no{NASTY}"), ("checkpoint", "list", run.name), ("check", f"job{NASTY}.yaml"),
        ("check", f"{NASTY}.yaml"), ("submit", "train.py", "--dry-run", "--site", "here", "--", NASTY), (NASTY,),
        ("check", "train.py", "--site", "here", "--explain", "train.args", "--", NASTY),
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


def test_a_dry_run_ends_with_its_summary_on_a_terminal_and_begins_with_it_in_a_pipe(desk: Desk) -> None:
    desk.write("train.py")
    words = ("submit", "train.py", "--dry-run", "--site", "here")
    shown, code = on_terminal(desk, *words)
    assert code == 0 and shown.index(b"=== job.sh") < shown.index(b"=== node.sh") < shown.index(b"\nnodes     1")
    piped = desk.command(*words)
    assert piped.out.startswith("site      here") and piped.out.index("\nnodes     1") < piped.out.index("=== job.sh")


AGE = re.compile(" +[0-9]+s ")
RED, GREEN, YELLOW, END = "\x1b[31m", "\x1b[32m", "\x1b[33m", "\x1b[0m"


def test_states_and_errors_have_colours_on_a_terminal_only(desk: Desk, run: Path) -> None:
    commands = {
        ("status", run.name): f"state    {RED}failed{END}",
        ("runs",): f"{RED}failed{END}",
        ("status", f"{RED}no"): f"{RED}slurmddp:{END} ",
        ("check", "train.py", "--site", "cores", "-N", "2", "--set", "network.interface=lo"): f"{RED}error:{END} ",
        ("doctor", run.name): f"cause     {RED}",
        ("check", "train.py", "--site", "cores", "--image", "x.sif"): f"{YELLOW}warning:{END} ",
        ("status", run.name, "--no-such"): f"{RED}Error:{END} No such option",
        ("image", "list", "."): f"{RED}unreadable{END}",
        ("checkpoint", "list", run.name): f"{RED}not usable{END}: ",
    }
    (desk.project / "x.sif").symlink_to("nowhere")
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    for command, coloured in commands.items():
        shown = on_terminal(desk, *command, TERM="xterm")[0].decode()
        assert coloured in shown, shown
        plain = shown
        for code in (RED, GREEN, YELLOW, END):
            plain = plain.replace(code, "")
        assert not [char for char in UNSAFE if char in plain], (command, plain)
        for variables in ({"TERM": "dumb"}, {"TERM": "xterm", "NO_COLOR": "1"}, {}):
            again = on_terminal(desk, *command, **variables)[0].decode()
            assert AGE.sub("", again) == AGE.sub("", plain), variables
        piped = desk.command(*command, TERM="xterm")
        assert sorted(AGE.sub("", piped.out + piped.err).splitlines()) == sorted(AGE.sub("", plain).splitlines())
    assert f"{RED}no" not in on_terminal(desk, "status", f"{RED}no", TERM="xterm")[0].decode(), "a colour of others"


#: The end of a line that is no place for a break: a command to paste, or a path.
UNBROKEN = re.compile("(?:(?:slurmddp|sbatch) .*|[^ ]+)$")


def test_sixty_columns_cut_no_word_and_no_command(desk: Desk) -> None:
    """What a wider line has stands in lines of 60 columns, in the same order, but for paths and what is pasted."""
    desk.program("sbatch", SBATCH)
    desk.write("train.py", "import torch\n")
    ranks = desk.program("ranks", f"#!/bin/bash\n[[ $1 != -c ]] || exit 0\necho 'ValueError:{' long' * 20}'\nexit 1\n")
    desk.command("run", "train.py", "--site", "here", "--quiet", "--set", f"container.python={ranks}")
    (failed,) = (desk.project / "runs").iterdir()
    (failed / "checkpoints" / "step-00000001").mkdir(parents=True)
    desk.write("x.sif", "#!/usr/bin/env run-singularity\n\0SIF_MAGIC\0and the rest")
    desk.write("job.yaml", "site: cores\ntrain: {script: train.py}\nresources: {nodes: 2, time: 1h}\n")
    desk.write("batch.sh", "#!/bin/bash\n#SBATCH --ntasks-per-node=4\nsrun torchrun --nproc_per_node=4 train.py\n")
    reason = ("--reason", "a slow disk which makes all ranks wait")
    commands = [
        ("submit", "job.yaml"), ("submit", "job.yaml", "--dry-run"), ("submit", "job.yaml", "--plain", "--dry-run"),
        ("runs",), ("status", failed.name), ("status", failed.name, "--time"), ("doctor", failed.name),
        ("check", "job.yaml"), ("check", "batch.sh"), ("check", "job.yaml", "--per-node"), ("image", "list", "."),
        ("image", "inspect", "x.sif"), ("clean",), ("site",), ("site", "leonardo"), ("site", "gpus", "--explain"),
        ("site", "diff", "leonardo", "snellius"), ("site", "bad-nodes", "--site", "gpus", "--add", "node17", *reason),
        ("checkpoint", "list", failed.name), ("checkpoint", "verify", failed.name), ("submit", "--help"), ("--help",),
        ("sweep", "job.yaml", "--grid", "args.lr=1,2"), ("resume", failed.name), ("status", "no"), ("runs", "--json"),
    ]  # fmt: skip
    for command in commands:
        shown = on_terminal(desk, *command, columns=60, TERM="xterm")[0].decode()
        text = re.sub("\x1b\\[[0-9;]*m", "", shown)
        script = {"--dry-run", "--per-node", "--json", "leonardo"} & {*command}
        if not script:
            for line in text.splitlines():
                assert len(line) <= 60 or len(UNBROKEN.findall(line)[0]) > 46, (command, line, text)
        piped = desk.command(*command)
        if command[0] not in ("submit", "sweep", "runs", "clean") and not {"bad-nodes", "--help"} & {*command}:
            assert sorted(text.split()) == sorted((piped.out + piped.err).split()), command


def test_a_watched_status_has_colours_too(desk: Desk, run: Path) -> None:
    shown = on_terminal(desk, "status", run.name, "--watch", TERM="xterm")[0].decode()
    assert f"state    {RED}failed{END}" in shown and CLIPBOARD not in shown


#: Waits in front of each file until the line of progress was seen.
SLOW_COPY = """
import os, time
from slurmddp.run import snapshot
read = snapshot._read
def slowly(item):
    while not os.path.exists(os.environ["HOME"] + "/seen"):
        time.sleep(0.1)
    return read(item)
snapshot._read = slowly
"""


def test_a_slow_copy_shows_how_far_it_is(desk: Desk, tmp_path: Path) -> None:
    desk.write("train.py")
    desk.program("sbatch", SBATCH)
    (tmp_path / "sitecustomize.py").write_text(SLOW_COPY)
    drawn = b"\rcopying the code: 0 of 1 files, 0:0"

    def look(shown: bytes) -> None:
        if drawn in shown:
            (desk.home / "seen").touch()

    words = ("submit", "train.py", "--site", "cores", "--nodes", "1", "--time", "1h")
    path = f"{tmp_path}:{desk.environment['PYTHONPATH']}"
    shown, code = on_terminal(desk, *words, look=look, TERM="xterm", PYTHONPATH=path)
    assert code == 0 and b"copying" not in shown.rpartition(b"\r\x1b[K")[2], shown


SEEN_SBATCH = """#!/bin/bash
until [[ -e $HOME/seen ]]; do sleep 0.1; done
exec "$HOME/sbatch" "$@"
"""


def test_a_sweep_shows_which_point_it_submits(desk: Desk) -> None:
    desk.write("train.py")
    desk.program("sbatch", SEEN_SBATCH)
    (desk.home / "sbatch").write_text(SBATCH)
    (desk.home / "sbatch").chmod(0o755)
    (desk.project / "job.yaml").write_text("train: {script: train.py}\nresources: {nodes: 1, time: 1h}\n")
    drawn = b"\rsubmitting job-1, 1 of 2, 0:0"

    def look(shown: bytes) -> None:
        if drawn in shown:
            (desk.home / "seen").touch()

    words = ("sweep", "job.yaml", "--site", "cores", "--grid", "args.lr=1,2")
    shown, code = on_terminal(desk, *words, look=look, TERM="xterm")
    assert code == 0 and drawn in shown and b"submitting" not in shown.rpartition(b"\r\x1b[K")[2], shown


BUILDER = """#!/bin/bash
case $1 in
  --version) echo "apptainer version 1.4.5-1" ;;
  inspect) echo '{"data": {"attributes": {"labels": {}}}, "type": "container"}' ;;
  build)
    printf 'INFO: \\033[2J\\n'
    while [[ ! -e $HOME/seen ]]; do read -rt 0.1 < <(:); done
    echo "INFO: done"
    printf '#!/usr/bin/env run-singularity\\n\\0SIF_MAGIC\\00001\\00000\\0' > "${@: -2:1}" ;;
esac
"""


def test_a_build_shows_how_long_it_takes_on_a_terminal_only(desk: Desk) -> None:
    desk.program("apptainer", BUILDER)
    (desk.project / "base.sif").write_bytes(b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\00001\00000\0")
    drawn = b"\rbuilding new.sif, 0:0"

    def look(shown: bytes) -> None:
        if drawn in shown:
            (desk.home / "seen").touch()

    shown, code = on_terminal(desk, "build-image", "new.sif", "--base", "base.sif", look=look, TERM="xterm")
    assert code == 0, shown
    before, _, after = shown.partition(drawn)
    assert b"INFO: \\x1b[2J\n" in before and b"\r\x1b[KINFO: done\n" in after, "the line gives way, and is removed"
    assert b"\x1b" not in after.partition(b"INFO: done")[2].replace(b"\r\x1b[K", b"")
    assert b"building new.sif, 0:" not in after.rpartition(b"\r\x1b[K")[2], "nothing of it is left"
    for variables in ({"TERM": "dumb"}, {}):
        shown, code = on_terminal(desk, "build-image", "new.sif", "--base", "base.sif", "--force", **variables)
        assert code == 0 and b"\x1b" not in shown and drawn not in shown
    piped = desk.command("build-image", "new.sif", "--base", "base.sif", "--force", TERM="xterm")
    assert piped.code == 0 and "\r" not in piped.err and "building new.sif," not in piped.err
    assert "building new.sif," not in (desk.project / "new.sif.build.log").read_text()
