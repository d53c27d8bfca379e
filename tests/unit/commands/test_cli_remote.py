"""--host: what is refused before anything is connected, and what runs here all the same."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmddp.commands import remote
from slurmddp.errors import UserError
from tests.helpers import Desk, Result


@pytest.fixture
def offline(desk: Desk) -> Desk:
    """Where ssh says so if it is started."""
    desk.program("ssh", f"#!/bin/bash\ntouch {desk.root}/started\nexit 255\n")
    desk.environment["XDG_RUNTIME_DIR"] = str(desk.root)
    return desk


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--host", "-oProxyCommand=x", "status"], "--host: '-oProxyCommand=x' is not a host\n  -> write user@login"),
        (["--host=user@-x", "status"], "is not a host"),
        (["--host", "a b", "status"], "is not a host"),
        (["--host", "login:22", "status"], "is not a host"),
        (["--host", "", "status"], "--host: no login node given"),
        (["--remote-dir", "x", "status"], "SLURMDDP_HOST: no login node given"),
        (["--host"], "--host needs a value"),
        (["--host", "login", "--remote-dir", "a b", "status"], "--remote-dir: 'a b' is not a folder for copies"),
        (["--host", "login", "--remote-dir", "x;y", "status"], "is not a folder for copies"),
        (["--host", "login", "init", "a b.yaml"], "run it without --host: SLURMDDP_HOST= slurmddp init 'a b.yaml'"),
    ],
)
def test_refusals(cli: Callable[..., Result], offline: Desk, words: list[str], wrong: str) -> None:
    done = cli(*words)
    assert done.code == 2 and wrong in done.err, done.err
    assert not (offline.root / "started").exists()


def test_help_version_and_completion_are_of_this_machine(cli: Callable[..., Result], offline: Desk) -> None:
    for words in (["--host", "login", "submit", "-h"], ["--version"], ["status", "--help"], ["--help"]):
        assert cli(*words, SLURMDDP_HOST="login").code == 0
    cli("--host", "login", _SLURMDDP_COMPLETE="complete_bash", COMP_WORDS="slurmddp sta", COMP_CWORD="1")
    assert not (offline.root / "started").exists()
    assert remote.asked(["submit", "x.py", "--", "-h"], {"SLURMDDP_HOST": "me@login"}) == (
        "me@login", None, ["submit", "x.py", "--", "-h"],
    )  # fmt: skip
    assert cli("status", SLURMDDP_HOST="login").code == 255 and (offline.root / "started").exists()


@pytest.mark.parametrize(
    ("parent", "variable", "path"),
    [
        (None, "HOME", "/slurmddp"), ("~", "HOME", ""), ("$WORK/a", "WORK", "/a"), ("${WORK}", "WORK", ""),
        ("/a/b/", "", "/a/b"), ("a", "HOME", "/a"),
    ],
)  # fmt: skip
def test_folder_of_a_project(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, parent: str | None, variable: str, path: str
) -> None:
    (desk.project / "my code").mkdir()
    monkeypatch.chdir(desk.project / "my code")
    found, below = remote._folder(parent, desk.environment)
    assert found == variable and below.startswith(f"{path}/my-code-"), below


def test_the_configuration_names_the_folder(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk.project)
    (desk.config / "config.yaml").write_text("remote_dir: $WORK/x\nsite: cores\n")
    assert remote._folder(None, desk.environment)[0] == "WORK"
    desk.write("train.py")
    assert desk.resolve_file(None, "train.script=train.py").job.site == "cores", "it is no key of a job"
    (desk.config / "config.yaml").write_text("remote_dir: a b\n")
    with pytest.raises(UserError, match=r"config.yaml: remote_dir: 'a b' is not a folder"):
        remote._folder(None, desk.environment)


def test_sockets_lie_where_nobody_else_looks_and_their_path_is_short(tmp_path: Path) -> None:
    short = Path("/tmp") / f"s{os.getpid()}"
    short.mkdir(0o700)
    try:
        sockets = remote._sockets({"XDG_RUNTIME_DIR": str(short)})
        assert sockets == short / "slurmddp" and sockets.stat().st_mode & 0o777 == 0o700
        sockets.chmod(0o755)
        with pytest.raises(UserError, match="only you can enter"):
            remote._sockets({"XDG_RUNTIME_DIR": str(short)})
        sockets.rmdir()
        sockets.symlink_to(tmp_path)
        with pytest.raises(UserError, match="only you can enter"):
            remote._sockets({"XDG_RUNTIME_DIR": str(short)})
        sockets.unlink()
    finally:
        short.rmdir()
    long = tmp_path / ("x" * 60)
    long.mkdir()
    assert remote._sockets({"XDG_RUNTIME_DIR": str(long)}) == Path(f"/tmp/slurmddp-ssh-{os.getuid()}")


def test_csh_can_quote_what_runs_there() -> None:
    assert not set("!\n") & set(remote._SCRIPT + remote._LOGIN_SHELL)


@pytest.fixture
def answers(desk: Desk) -> Callable[[bytes], None]:
    """`answers(b"...")`: what the login node prints, whatever it is asked. rsync says what it would copy."""
    desk.environment["XDG_RUNTIME_DIR"] = str(desk.root)
    desk.program("ssh", f'#!/bin/bash\n[[ "$*" == *"-O check"* ]] || cat {desk.root}/answer\n')
    desk.program("rsync", f'#!/bin/bash\necho "$*" >>{desk.root}/copied\n')

    def put(answer: bytes) -> None:
        (desk.root / "answer").write_bytes(answer)

    return put


PAGE = b"<!doctype html>"
NO_REPORT = [
    b"", b"\0", b"no report", b"\0" + PAGE, b"\0/x/.bashrc\0alias ls=x", b"\0/x/train.py\0import os", b"\0..\0x",
    b"\0/x/sitecustomize.py.html/\0x", b"\0/x/\x1b]52;c;x\x07.html\0x", b"\0/x/.x.html\0x", b"\0/x/a\n.html\0x",
    b"\0-x.html\0x",
]  # fmt: skip


@pytest.mark.parametrize("answer", NO_REPORT)
@pytest.mark.parametrize("force", [True, False])
def test_a_login_node_does_not_choose_what_is_written_here(
    cli: Callable[..., Result], desk: Desk, answers: Callable[[bytes], None], answer: bytes, force: bool
) -> None:
    desk.write("train.py", "print('mine')\n")
    before = {path: path.read_bytes() for path in desk.project.rglob("*") if path.is_file()}
    answers(answer)
    done = cli("--host", "login", "report", "gpt-1", *(["--force"] if force else []))
    assert done.code == 1 and "login sent no report" in done.err and "Traceback" not in done.err, done.err
    assert {path: path.read_bytes() for path in desk.project.rglob("*") if path.is_file()} == before
    assert sorted(path for path in desk.project.rglob("*") if path.is_file()) == sorted(before)


def test_a_report_goes_where_it_should(
    cli: Callable[..., Result], desk: Desk, answers: Callable[[bytes], None]
) -> None:
    answers(b"Welcome\0/tmp/x/gpt-1.html\0" + PAGE + b"\0")
    assert cli("--host", "login", "report", "gpt-1").out == "gpt-1.html\n"
    assert (desk.project / "gpt-1.html").read_bytes() == PAGE + b"\0"


@pytest.mark.parametrize(
    "answer",
    [b"", b"\0", b"\0x", b"\0/home/$(touch x)", b"\0/a b", b"\0/x:y", b"\0/x\n/y"],
)
def test_a_login_node_does_not_choose_where_rsync_writes(
    cli: Callable[..., Result], desk: Desk, answers: Callable[[bytes], None], answer: bytes
) -> None:
    """Without a folder, it would be the root of the login node; and a path with a colon could be of another host."""
    desk.write("train.py")
    answers(answer)
    done = cli("--host", "login", "check", "train.py")
    assert done.code in (1, 2) and "Traceback" not in done.err and not (desk.root / "copied").exists(), done.err
