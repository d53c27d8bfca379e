"""Docker's credential helpers: who is asked, for what, for how long, and whom the answer is shown to."""

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmddp.errors import UserError
from slurmddp.images.registry import credentials as helper
from slurmddp.images.registry.client import resolve
from slurmddp.images.registry.credentials import Found, find_credentials
from tests.registry_answers import Reply, Server

Helper = Callable[..., Path]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Helper:
    """Makes docker-credential-NAME of a line of bash; the file that is returned gets its argument and its stdin."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def made(line: str, name: str = "lab") -> Path:
        asked = folder / f"{name}.asked"
        path = folder / f"docker-credential-{name}"
        path.write_text(f'#!/bin/bash\nserver=$(cat); echo "$1 $server" >>"{asked}"\n{line}\n')
        path.chmod(0o755)
        return asked

    return made


def login(home: Path, tree: object) -> None:
    (home / ".docker").mkdir(exist_ok=True)
    (home / ".docker/config.json").write_text(json.dumps(tree))


def told(**more: str) -> str:
    return f"echo '{json.dumps({'Username': 'ann', 'Secret': 'S3CRET', **more})}'"


def shown(found: Found) -> tuple[str, str, str] | None:
    one = found.credentials
    return (one.username, one.password, one.source) if one else None


ANN = ("ann", "S3CRET", "docker-credential-lab (~/.docker/config.json)")


@pytest.mark.parametrize(
    ("tree", "registry", "server"),
    [
        ({"credHelpers": {"g.io": "lab"}}, "g.io", "g.io"),
        ({"credHelpers": {"https://G.io/": "lab"}, "credsStore": "other"}, "g.io", "g.io"),
        ({"credHelpers": {"x.io": "other"}, "credsStore": "lab"}, "g.io:5000", "g.io:5000"),
        ({"auths": {"g.io": {}}, "credsStore": "lab"}, "g.io", "g.io"),
        ({"credsStore": "lab"}, "docker.io", "https://index.docker.io/v1/"),
        ({"credHelpers": {"docker.io": "lab"}}, "docker.io", "https://index.docker.io/v1/"),
    ],
)
def test_a_helper_is_asked_for_one_registry(
    home: Path, program: Helper, tree: object, registry: str, server: str
) -> None:
    asked = program(told(ServerURL=server))
    login(home, tree)
    result = find_credentials(registry, "a/b")
    assert shown(result) == ANN and "S3CRET" not in repr(result)
    assert asked.read_text() == f"get {server}\n"


def test_a_helper_that_names_no_registry_is_believed(home: Path, program: Helper) -> None:
    """gcloud's does not."""
    program(told())
    login(home, {"credsStore": "lab"})
    assert shown(find_credentials("g.io", "a/b")) == ANN


def test_a_helper_of_one_registry_is_not_asked_for_another(home: Path, program: Helper) -> None:
    asked = program(told())
    login(home, {"credHelpers": {"g.io": "lab"}})
    for registry in ("evil.example", "g.io:444", "x.g.io"):
        assert find_credentials(registry, "a/b") == Found(None)
    assert not asked.exists()


def test_a_password_in_the_file_goes_before_the_helper(home: Path, program: Helper) -> None:
    asked = program(told())
    entry = {"auth": base64.b64encode(b"bob:B0B").decode()}
    login(home, {"auths": {"g.io": entry}, "credsStore": "lab", "credHelpers": {"g.io": "lab"}})
    assert shown(find_credentials("g.io", "a/b")) == ("bob", "B0B", "~/.docker/config.json")
    assert not asked.exists()


@pytest.mark.parametrize(
    ("line", "remark"),
    [
        (told(ServerURL="https://evil.example"), "which returned credentials of another registry"),
        (told(ServerURL="g.io:444"), "which returned credentials of another registry"),
        (told() + "; exit 1", "which has no credentials for it (exit code 1)"),
        ("echo S3CRET", "which gave an invalid answer"),
        ("echo '[]'", "which gave an invalid answer"),
        ("""echo '{"Username": "ann", "Secret": ["S3CRET"]}'""", "which gave an invalid answer"),
        (told(Username=""), "which gave an invalid answer"),
        (told(Username="<token>"), "which has a token, but slurmddp supports only user name and password"),
    ],
)
def test_an_answer_that_cannot_be_used(home: Path, program: Helper, line: str, remark: str) -> None:
    program(line)
    login(home, {"credsStore": "lab"})
    result = find_credentials("g.io", "a/b")
    assert result == Found(None, (f"~/.docker/config.json leaves g.io to the credential helper 'lab', {remark}",))


@pytest.mark.parametrize(
    "line",
    [
        "(sleep 60; touch {0}/end) & echo $! >{0}/pid; wait",
        "echo $$ >{0}/pid; for i in {{1..1200}}; do printf ' '; sleep 0.05; done; touch {0}/end",
    ],
    ids=["silent", "drip"],
)
def test_a_helper_that_does_not_end_is_ended(
    home: Path, program: Helper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    program(line.format(tmp_path))
    login(home, {"credsStore": "lab"})
    monkeypatch.setattr(helper, "PATIENCE", 3.0)
    result = find_credentials("g.io", "a/b")
    assert result.credentials is None and "which gave no answer within 3 s" in result.remarks[0]
    assert was_ended(tmp_path)


def test_ctrl_c_ends_a_helper(home: Path, program: Helper, tmp_path: Path) -> None:
    program(f"echo $$ >{tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; sleep 60; touch {tmp_path}/end")
    with Server(lambda request: Reply(401, b"", {"WWW-Authenticate": 'Basic realm="x"'})) as server:
        login(home, {"credsStore": "lab"})
        command = f"""import signal
from slurmddp.images.registry.client import resolve
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored under nohup, and in a shell's background
resolve('{server.host}/a/b')"""
        with subprocess.Popen([sys.executable, "-c", command], stderr=subprocess.PIPE) as asking:
            while not (tmp_path / "pid").exists():
                assert asking.poll() is None
                time.sleep(0.01)
            asking.send_signal(signal.SIGINT)
            _, said = asking.communicate()
    assert said.endswith(b"KeyboardInterrupt\n")
    assert was_ended(tmp_path)


def was_ended(folder: Path) -> bool:
    """Waits until the process whose id is in `pid` is gone; whether it did not come to its own end."""
    while _runs(int((folder / "pid").read_text())):
        time.sleep(0.01)
    return not (folder / "end").exists()


def _runs(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("name", ["../../tmp/x", "a/b", "-x", "a b", "missing"])
def test_a_name_that_leads_to_no_program(home: Path, name: str) -> None:
    login(home, {"credHelpers": {"g.io": name}})
    result = find_credentials("g.io", "a/b")
    assert result.credentials is None
    assert f"the credential helper {name!r}, which is not in PATH" in result.remarks[0]


def test_a_program_of_the_working_directory_is_not_run(
    home: Path, program: Helper, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = program(told())
    monkeypatch.chdir(asked.parent)
    monkeypatch.setenv("PATH", f".:{os.environ['PATH'].partition(':')[2]}")
    login(home, {"credsStore": "lab"})
    assert "which is not in PATH" in find_credentials("g.io", "a/b").remarks[0]
    assert not asked.exists()


def test_a_program_that_cannot_be_run(home: Path, program: Helper) -> None:
    path = program("").with_name("docker-credential-lab")
    path.write_text("#!/no/such/shell\n")
    login(home, {"credsStore": "lab"})
    assert "which cannot be run: No such file or directory" in find_credentials("g.io", "a/b").remarks[0]


def test_what_a_helper_says_is_shown_to_its_registry_alone(home: Path, program: Helper) -> None:
    """The registry redirects to a store, which wants to know who asks, too."""
    program(told())
    with Server(lambda request: Reply(401, b"", {"WWW-Authenticate": 'Basic realm="mine"'})) as store:
        answers = [
            Reply(401, b"", {"WWW-Authenticate": 'Basic realm="x"'}),
            Reply(307, b"", {"Location": f"http://localhost:{store.port}/"}),
        ]
        with Server(lambda request: answers["authorization" in request.headers]) as server:
            login(home, {"credHelpers": {server.host: "lab"}})
            with pytest.raises(Exception, match="though it lists it"):
                resolve(f"{server.host}/a/b", architecture="amd64")
        expected = "Basic " + base64.b64encode(b"ann:S3CRET").decode()
        assert [request.headers.get("authorization") for request in server.requests] == [None, expected]
        assert [request.headers.get("authorization") for request in store.requests] == [None]


def test_a_registry_that_refuses_a_helpers_password_is_told_apart(home: Path, program: Helper) -> None:
    program(told())
    with Server(lambda request: Reply(401, b"", {"WWW-Authenticate": 'Basic realm="x"'})) as server:
        login(home, {"credsStore": "lab"})
        with pytest.raises(UserError, match=r"the login from docker-credential-lab \(~/.docker") as error:
            resolve(f"{server.host}/a/b", architecture="amd64")
    assert "S3CRET" not in str(error.value)
