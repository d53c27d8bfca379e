"""What an alert may hold: nothing of the run's secrets, and nothing from a run folder of another user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurmddp.records.alert import Alert
from slurmddp.supervisor import compose, deliver
from slurmddp.supervisor.deliver import Sender, Settings, Targets

KEY = "-----BEGIN KEY-----\n" + "\n".join(letter * 40 for letter in "abc") + "\n-----END KEY-----"
LONG = "".join(chr(97 + number % 26) + str(number) for number in range(1500))


def sender(root: Path, known: Targets = deliver._NONE) -> Sender:
    (root / "run/payloads").mkdir(parents=True)
    (root / "run/payloads/bot").write_text("on failed 5 x\n")
    (root / "run/logs/attempt-001").mkdir(parents=True)
    (root / "run/logs/attempt-001/n1.log").write_text("a line of the log\n")
    return Sender(Settings(str(root / "run"), str(root / "secrets"), (str(root / "disk"),)), known)


def with_facts(sender: Sender) -> Alert:
    sender.read_targets()
    return sender._with_facts(Alert("failed", "failed", "boom", "nothing", node="n1", attempt=1))


def environment(root: Path, *values: str) -> None:
    (root / "secrets").mkdir(mode=0o700)
    (root / "secrets/.environment").write_text("\0".join(f"V{n}={value}" for n, value in enumerate(values)))


@pytest.mark.parametrize(
    ("log", "left"),
    [
        (KEY, {"[secret]"}),
        (f"key: {'b' * 40}", {"key: [secret]"}),
        (LONG, {"[secret]"}),
        ("x" * 4000 + LONG, {"x" * 300}),
        (f"cut: {LONG[:100]}", {"cut: [secret]"}),
        ("correct horse\nbattery", {compose._LEFT_OUT}),
        ("short is short", {"short is short"}),
        ("DB_PASSWORD=unknown1 lr=3", {"DB_PASSWORD=[redacted] lr=3"}),
    ],
)
def test_secrets_of_several_lines_long_ones_and_parts(tmp_path: Path, log: str, left: set[str]) -> None:
    one = sender(tmp_path)
    environment(tmp_path, KEY, LONG, "correct horse battery", "short")
    (tmp_path / "run/logs/attempt-001/n1.log").write_text(log)
    assert set(with_facts(one).log_tail.split("\n")) == left


def test_no_text_of_an_alert_has_a_secret_of_a_known_kind() -> None:
    alert = compose.safe(Alert("failed", "failed", "login with ghp_" + "a8K" * 12, "nothing"), ())
    assert alert.cause == "login with ghp_[redacted]"


@pytest.mark.parametrize("before", [10, 2000, 4000])
def test_a_secret_at_the_start_of_what_is_read_of_a_log(before: int) -> None:
    data = ("y" * before + "\n" + LONG + "\nend").encode()
    assert compose.end_of_log(data, False, [LONG]).replace("y", "") in ("", "[secret]\nend", "\n[secret]\nend")
    assert compose.end_of_log((LONG[3000:] + "\n" + "z\n" * 5000).encode(), False, [LONG]).strip("z\n") == ""


def test_without_the_secrets_nothing_is_shown_that_may_hold_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home folder that does not answer; one that is not there has no values for the ranks either."""
    assert with_facts(sender(tmp_path)).cause == "boom"
    (tmp_path / "a").mkdir()

    def refuse(folder: Path) -> None:
        raise OSError("Stale file handle")

    monkeypatch.setattr(deliver, "_secrets", refuse)
    alert = with_facts(sender(tmp_path / "a"))
    assert (alert.log_tail, alert.cause) == ("", deliver._LEFT_OUT)
    (tmp_path / "b").mkdir()
    alert = with_facts(sender(tmp_path / "b", Targets(secrets=("of the log",))))
    assert (alert.log_tail, alert.cause) == ("a line [secret]", "boom"), "they were known from before"


def test_a_run_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = sender(tmp_path)
    environment(tmp_path, "password")
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(OSError, match="belongs to another user"):
        one._within(one.settings.run, lambda: pytest.fail("it was read"))
    assert one.read_targets().payloads == {} and with_facts(one).log_tail == ""
