"""slurmddp doctor: exit codes, JSON, standard input, folders, and what cannot be read."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import ROOT, Desk, Result

Cli = Callable[..., Result]
FAILED = "step 1\n[rank3]: RuntimeError: CUDA out of memory.\nRuntimeError: Connection reset by peer\n"


def test_a_failed_log(desk: Desk, cli: Cli) -> None:
    log = desk.write("slurm-5.out", FAILED)
    shown = cli("doctor", str(log))
    assert shown.code == 1
    first, where, evidence, *_ = shown.out.splitlines()
    assert first == "cause     the GPU ran out of memory (certain) [gpu-memory]"
    assert where == "where     rank 3"
    assert evidence == f"evidence  {log}:2: RuntimeError: CUDA out of memory."
    assert shown.out.splitlines()[-1] == f"then      a connection to another rank was lost ({log}:3)"


@pytest.mark.parametrize("text", [FAILED, "step 1\n", "RuntimeError: Connection reset by peer\n"])
def test_json_has_a_root_where_something_failed(desk: Desk, cli: Cli, text: str) -> None:
    shown = cli("doctor", str(desk.write("a.log", text)), "--json")
    told = json.loads(shown.out)
    assert told["schema"] == 1 and shown.code == (told["root"] is not None)


def test_json_has_the_keys_of_the_page(desk: Desk, cli: Cli) -> None:
    told = json.loads(cli("doctor", str(desk.write("a.log", FAILED)), "--json").out)
    root, (followed,) = told["root"], told["cascades"]
    keys = {*told, *(f"root.{key}" for key in root), *(f"root.evidence.{key}" for key in root["evidence"])}
    page = (ROOT / "docs/doctor.md").read_text(encoding="utf-8").split("## --json")[1].split("## ")[0]
    assert {
        key for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for key in re.findall(r"`(.*?)`", row)
    } == keys
    assert {*root} - {*followed} == {"message", "why", "fix", "source", "traceback"}


def test_a_folder_of_logs_and_several_files(desk: Desk, cli: Cli) -> None:
    desk.write("logs/0/stderr.log", "RuntimeError: Connection reset by peer\n")
    log = desk.write("logs/1/stderr.log", FAILED)
    shown = cli("doctor", str(desk.project / "logs"))
    assert (shown.code, f"{log}:2" in shown.out) == (1, True)
    assert cli("doctor", str(log), str(log)).code == 1


def test_an_empty_standard_input(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO())))  # type: ignore[type-var]
    shown = cli("doctor", "-")
    assert shown.code == 2 and shown.err.startswith("slurmddp: standard input is empty\n  -> send a log"), shown


def test_a_good_log(desk: Desk, cli: Cli) -> None:
    log = desk.write("a.log", "step 1\nstep 2\n")
    shown = cli("doctor", str(log))
    assert (shown.code, shown.out) == (0, f"no failure found in {log}\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b"\x1f\x8b\x08a", "is compressed"), (bytes(range(9)) * 90, "is not text")],
)
def test_what_is_no_log(desk: Desk, cli: Cli, content: bytes, message: str) -> None:
    log = desk.write("a.log", "")
    log.write_bytes(content)
    shown = cli("doctor", "a.log")
    assert shown.code == 2 and shown.err.startswith(f"slurmddp: a.log {message}\n  -> "), shown.err
    desk.write("b.log", "step 1\n")
    both = cli("doctor", "a.log", "b.log")
    assert both.code == 0 and f"note: a.log {message}" in both.out, both.out


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("gone/a.log", "slurmddp: gone/a.log cannot be read: No such file or directory"),
        ("nothing", "slurmddp: no run 'nothing'"),
        ("empty", "slurmddp: empty has no files"),
    ],
)
def test_what_cannot_be_read(desk: Desk, cli: Cli, target: str, message: str) -> None:
    Path(desk.project, "empty").mkdir()
    shown = cli("doctor", target)
    assert shown.code == 2 and shown.err.startswith(message)
