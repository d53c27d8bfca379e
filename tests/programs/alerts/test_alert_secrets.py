"""Addresses: where they are read from, what is refused, and that they go where nobody else looks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmddp.alerts import secrets
from slurmddp.errors import UserError
from slurmddp.job.plan.model import AlertTarget
from slurmddp.run.layout import RunFolder
from tests.helpers import Desk, Result, refusal

Cli = Callable[..., Result]

URL = "https://hooks.example.com/services/T0/B0/abcdefghijkl"


def target(
    name: str = "slack", *, env: str | None = None, file: str | None = None, insecure: bool = False
) -> AlertTarget:
    return AlertTarget(name, "slack", ("failed",), insecure, env, file)


def private(desk: Desk, name: str, text: str = URL + "\n", mode: int = 0o600) -> Path:
    path = desk.config / "alerts" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def test_each_address_comes_from_its_place(desk: Desk) -> None:
    private(desk, "slack", f"# of the team's channel\n\n{URL}/1\n")
    other = private(desk, "elsewhere", f"{URL}/2")
    environment = {**desk.environment, "HOOK": f" {URL}/3 ", "OTHER": "stays"}
    found = secrets.take((target(), target("b", file=str(other)), target("c", env="HOOK")), environment)
    assert found == {"slack": f"{URL}/1", "b": f"{URL}/2", "c": f"{URL}/3"}
    assert "HOOK" not in environment and environment["OTHER"] == "stays"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o777])
def test_a_file_that_others_may_read_is_refused(desk: Desk, mode: int) -> None:
    path = private(desk, "slack", mode=mode)
    with pytest.raises(UserError) as error:
        secrets.take((target(),), desk.environment)
    assert f"chmod 600 {path}" in refusal(error.value) and URL not in refusal(error.value)


@pytest.mark.parametrize(
    "text",
    ["", "\n", "hooks.example.com/x", "ftp://x/y", "https://", "https://a b/c", 'https://x/"', "https://x/\\n", "https://é/x",
     "file:///etc/passwd", "https://x/" + "a" * 2000, "https:///path"],
)  # fmt: skip
def test_what_is_no_address_is_refused_and_not_shown(desk: Desk, text: str) -> None:
    private(desk, "slack", text)
    with pytest.raises(UserError) as error:
        secrets.take((target(),), desk.environment)
    shown = refusal(error.value)
    assert "is not of the form https://HOST/PATH" in shown and (len(text) < 9 or text not in shown)


def test_what_is_missing_is_named(desk: Desk) -> None:
    with pytest.raises(UserError, match="alerts/slack"):
        secrets.take((target(),), desk.environment)
    with pytest.raises(UserError, match=r"\$NO_SUCH"):
        secrets.take((target(env="NO_SUCH"),), desk.environment)


def test_plain_http_must_be_asked_for_or_stay_on_this_host(desk: Desk) -> None:
    for host in ("127.0.0.1:8000", "localhost", "[::1]:80", "127.9.9.9"):
        environment = {**desk.environment, "HOOK": f"http://{host}/x"}
        assert secrets.take((target(env="HOOK"),), environment)
    for host in ("127.0.0.1.example.com", "localhost.example.com", "10.0.0.1", "user@10.0.0.1"):
        environment = {**desk.environment, "HOOK": f"http://{host}/x"}
        with pytest.raises(UserError, match="insecure: true"):
            secrets.take((target(env="HOOK"),), environment)
        assert secrets.take((target(env="HOOK", insecure=True),), environment)


def test_no_file_of_the_project_is_taken(desk: Desk) -> None:
    path = desk.write("secret.txt", URL)
    path.chmod(0o600)
    with pytest.raises(UserError, match="copied to the run folder"):
        secrets.take((target(file=str(path)),), desk.environment, str(desk.project))
    link = desk.root / "link"
    link.symlink_to(path)
    with pytest.raises(UserError, match="copied to the run folder"):
        secrets.take((target(file=str(link)),), desk.environment, str(desk.project))


def test_they_are_kept_for_their_owner_alone_whatever_the_umask(desk: Desk) -> None:
    folder = RunFolder(desk.root / "run-1")
    before = os.umask(0)
    try:
        secrets.keep(folder, {"slack": URL}, desk.environment)
    finally:
        os.umask(before)
    place = secrets.of_run("run-1", desk.environment)
    assert [path.stat().st_mode & 0o777 for path in (place.parent, place, place / "slack")] == [0o700, 0o700, 0o600]
    assert secrets.address("run-1", "slack", desk.environment) == URL
    assert secrets.address("run-1", "other", desk.environment) is None
    secrets.forget("run-1", desk.environment)
    assert not place.exists()


def test_old_ones_are_forgotten_and_no_others(desk: Desk) -> None:
    month = 31 * 86400
    started, ended = '{"event": "job_started", "job_id": "1"}\n', '{"event": "job_ended"}\n'

    def make(name: str, events: str | None = None, age: int = 0, waits: bool = False) -> Path:
        folder = RunFolder(desk.root / "runs" / name)
        folder.path.mkdir(parents=True)
        secrets.keep(folder, {"slack": URL}, desk.environment)
        if events is not None:
            folder.events.write_text(events)
            os.utime(folder.events, (time.time() - age, time.time() - age))
        if waits:
            (folder.path / "alerts/spool/message").mkdir(parents=True)
        return folder.path

    make("pending")
    make("running", started, month)
    make("just-ended", started + ended)
    make("requeued", started + ended + started, month)
    make("chained", started + '{"event": "requeued", "how": "chain"}\n' + ended, month)
    make("waits", started + ended, month, waits=True)
    make("over", started + ended, month)
    make("removed").rmdir()
    away = RunFolder(desk.root / "file-system-that-is-away" / "run")
    secrets.keep(away, {"slack": URL}, desk.environment)
    assert sorted(secrets.forget_old(desk.environment)) == ["over", "removed"]
    assert not secrets.of_run("over", desk.environment).exists()
    assert len(list((desk.config / "secrets").iterdir())) == 7


def test_no_file_and_no_process_of_a_run_has_the_address(desk: Desk, cli: Cli) -> None:
    """A real run on this machine: its own environment, all its files, and what it was made from."""
    desk.write("train.py", "")
    desk.write("job.yaml", "name: gpt\nsite: here\ntrain: {script: train.py}\nalerts: [{to: json, url_env: HOOK}]\n")
    ranks = desk.program("ranks", '#!/bin/bash\ncat /proc/self/environ >"$SLURMDDP_RUN/environment"\n')
    done = cli("run", "job.yaml", "--quiet", "--set", f"container.python={ranks}", HOOK=URL)
    (folder,) = (desk.project / "runs").iterdir()
    environment = (folder / "environment").read_bytes()
    assert b"SLURMDDP_RUN=" in environment and b"HOOK=" not in environment, done.err
    assert secrets.address(folder.name, "json", desk.environment) == URL
    kept = secrets.of_run(folder.name, desk.environment)
    for path in [path for path in desk.root.rglob("*") if path.is_file() and path.parent != kept]:
        assert b"abcdefghijkl" not in path.read_bytes(), path


def test_a_message_holds_no_value_of_environment_from(desk: Desk, cli: Cli) -> None:
    """A script that fails with its token in the error's text, and an alert that shows the end of its log."""
    desk.write("train.py", "")
    token = "hf_abcdefghijkl$(id)"
    lines = "site: here\nenvironment_from: [HF_TOKEN]\nalerts: [{to: json}]\n"
    desk.write("job.yaml", "name: gpt\ntrain: {script: train.py}\n" + lines)
    private(desk, "json", "http://127.0.0.1:9/x\n")
    says = 'echo "ValueError: $HF_TOKEN is not valid"'
    ranks = desk.program("ranks", f"#!/bin/bash\n[[ $1 != -c ]] || exit 0\n{says}\nexit 1\n")
    cli("run", "job.yaml", "--quiet", "--set", f"container.python={ranks}", HF_TOKEN=token)
    (run,) = (desk.project / "runs").iterdir()
    assert token in "".join(path.read_text() for path in (run / "logs").rglob("*.log")), "the script printed it"
    bodies = [path.read_text() for path in (run / "alerts" / "spool").glob("*/body")]
    assert bodies and all("is not valid" in body and "hf_abcdefghijkl" not in body for body in bodies), bodies


def test_a_refused_submission_leaves_no_address(desk: Desk, cli: Cli) -> None:
    desk.write("train.py", "")
    desk.write("job.yaml", "name: gpt\nsite: cores\ntrain: {script: train.py}\nalerts: [{to: json, url_env: HOOK}]\n")
    desk.program("sbatch", "#!/bin/bash\nenv >$HOME/environment\necho 'no such account' >&2\nexit 1\n")
    done = cli("submit", "job.yaml", "--set", "resources.time=10m", HOOK=URL)
    assert done.code == 2 and "no such account" in done.err
    assert "HOOK" not in (desk.home / "environment").read_text()
    assert not list((desk.config / "secrets").iterdir())
    missing = cli("submit", "job.yaml", "--set", "resources.time=10m")
    assert missing.code == 2 and "$HOOK" in missing.err and not (desk.project / "runs").exists()
