"""What the sender of alerts makes of any log: valid JSON in each target's form and size, and never the address."""

from __future__ import annotations

import json
import re
import shutil
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from slurmddp.visible import visible
from tests.helpers import ROOT
from tests.programs.alerts.conftest import TARGETS, Alerts

HOOK = "https://hooks.example.com/services/T0AAAAAAA/B0BBBBBBB/abcdefghijklmnopqrstuvwx"
TOPIC = "https://ntfy.example.com/gpt-alerts-x7"
FLOW = "https://prod.example.com:443/workflows/0123456789abcdef0123456789abcdef/run?sp=%2Frun&sig=s1gnature-Of_the-Flow-0123"

#: What of these addresses would let somebody else post.
TOKENS = (b"abcdefghijklmnopqrstuvwx", b"gpt-alerts-x7", b"0123456789abcdef0123456789abcdef", b"s1gnature-Of_the-Flow")


def secret_everywhere(alerts: Alerts) -> None:
    alerts.address(HOOK, "slack", "discord", "json")
    alerts.address(TOPIC, "ntfy")
    alerts.address(FLOW, "teams")


@pytest.fixture
def silent(alerts_of: Any) -> Alerts:
    """All kinds of target; the messages stay in the spool, where they can be looked at."""
    alerts: Alerts = alerts_of(site="alerts: {from: login}")
    secret_everywhere(alerts)
    return alerts


def texts(value: Any) -> list[str]:
    """Every text in a JSON value."""
    if isinstance(value, dict):
        return [text for item in value.items() for part in item for text in texts(part)]
    if isinstance(value, list):
        return [text for item in value for text in texts(item)]
    return [value] if isinstance(value, str) else []


def test_the_json_message_says_all_that_is_known(silent: Alerts) -> None:
    silent.log(b"one\ntwo\n", "node1")
    log = silent.log(b"Traceback\nRuntimeError: boom\n", "node2")
    (silent.run.path / "progress").write_text("120 1000\n")
    silent.alert(
        "failed", "FAILED", "rank 3 on node2: RuntimeError: boom", "nothing", "3", "node2", SLURMDDP_JOB_ID="17"
    )
    found = json.loads(silent.body("json"))
    assert isinstance(found.pop("time"), int)
    assert found == {
        "schema": 1,
        "key": f"{silent.run.id}.0.failed",
        "kind": "failed",
        "site": "told",
        "job": "gpt",
        "job_id": "17",
        "run": silent.run.id,
        "folder": str(silent.run.path),
        "attempt": 0,
        "state": "FAILED",
        "step": 120,
        "steps": 1000,
        "cause": "rank 3 on node2: RuntimeError: boom",
        "node": "node2",
        "rank": 3,
        "next": "nothing",
        "command": f"slurmddp status {silent.run.id}; slurmddp logs {silent.run.id}",
        "log": str(log),
        "log_tail": "Traceback\nRuntimeError: boom",
    }
    assert [event["spooled"] for event in silent.events()] == [True] * len(TARGETS)
    for path in [*silent.waiting(), *(file for folder in silent.waiting() for file in folder.iterdir())]:
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize(
    ("fields", "rank", "node"),
    [((), None, None), (("-", "node7"), None, "node7"), (("", ""), None, None), (("5", "node7"), 5, "node7"),
     (("rank 2", "on axis"), None, None)],
)  # fmt: skip
def test_rank_and_node_are_fields_and_never_read_out_of_the_cause(
    silent: Alerts, fields: tuple[str, ...], rank: int | None, node: str | None
) -> None:
    silent.alert("failed", "FAILED", "node7: ValueError: the shapes of rank 2 on axis 1 differ", "nothing", *fields)
    found = json.loads(silent.body("json"))
    assert (found["rank"], found["node"]) == (rank, node)


def test_every_key_is_documented(silent: Alerts) -> None:
    silent.alert("failed")
    page = (ROOT / "docs/alerts.md").read_text().split("## The JSON message")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert [key for row in rows for key in re.findall("`(.+?)`", row)] == list(json.loads(silent.body("json")))


def test_what_is_not_known_is_null(silent: Alerts) -> None:
    silent.alert("finished")
    found = json.loads(silent.body("json"))
    assert [found[name] for name in ("step", "steps", "cause", "node", "rank", "next", "log", "state", "job_id")] == [
        None
    ] * 9
    assert found["log_tail"] == "" and found["attempt"] == 0


def test_an_addresses_user_and_password_are_secrets_and_its_host_is_none(silent: Alerts) -> None:
    silent.address("https://a-user-of-many-letters:a-word-of-many-letters@hooks-of-ours.example.org:8443/x", "json")
    silent.log(b"a-user-of-many-letters and a-word-of-many-letters at hooks-of-ours.example.org\n")
    silent.alert("failed", "FAILED", "boom", "nothing")
    assert json.loads(silent.body("json"))["log_tail"] == "[secret] and [secret] at hooks-of-ours.example.org"


def test_the_newest_log_and_attempt_are_taken_where_the_cause_names_no_node(silent: Alerts) -> None:
    silent.log(b"old\n", attempt=0)
    silent.log(b"new\n", attempt=12)
    silent.alert("hang", "RUNNING", "no rank is behind the others")
    found = json.loads(silent.body("json"))
    assert (found["attempt"], found["log_tail"]) == (12, "new")


def test_markup_and_mentions_are_only_text(silent: Alerts) -> None:
    nasty = "<!channel> <@U123> @everyone &amp; *b* `c` ```d``` [x](https://evil.example.com)"
    silent.log(nasty.encode() + b"\n")
    silent.alert("failed", "FAILED", nasty, nasty)
    slack = json.loads(silent.body("slack"))["text"]
    assert "<" not in slack and ">" not in slack and "&lt;!channel&gt;" in slack and "&amp;amp;" in slack
    discord = json.loads(silent.body("discord"))
    assert discord["allowed_mentions"] == {"parse": []} and discord["flags"] == 4
    for text in (slack, discord["content"]):
        # All that is not ours stands between backticks, and ends there.
        assert text.count("```") == 2 and all(line.count("`") in (0, 2, 3) for line in text.splitlines())
    card = json.loads(silent.body("teams"))["attachments"][0]["content"]
    assert {item["type"] for item in card["body"]} == {"RichTextBlock"}, "the one element that knows no markdown"
    assert "msteams" in card and "entities" not in card["msteams"]
    assert nasty in silent.body("ntfy").decode()


def test_no_message_is_longer_than_its_service_takes(alerts_of: Any) -> None:
    """Everything that may be long is, and the run and the job have the longest names."""
    alerts = alerts_of(site="alerts: {from: login}", name="n" * 100, runs="/".join(["ü" * 100] * 4))
    alerts.log("日".encode() * 4000)
    (alerts.run.path / "progress").write_text("9" * 15 + " " + "9" * 15)
    alerts.alert(
        "failed", "s" * 999, "rank 1 on node1: " + "c" * 9999, "n`" * 999, "1", "node1", SLURMDDP_JOB_ID="12345678_1234"
    )
    discord = json.loads(alerts.body("discord"))["content"]
    assert len(discord) <= 2000 and all(line.count("`") in (0, 2, 3) for line in discord.splitlines())
    assert len(alerts.body("ntfy")) <= 4096
    assert len(json.loads(alerts.body("slack"))["text"].encode()) <= 3000
    assert len(alerts.body("teams")) < 21_000
    assert all(f"run: {str(alerts.run.path)[:100]}" in alerts.body(to).decode() for to in ("discord", "ntfy", "slack"))


def test_a_cause_that_looks_like_a_slot_is_only_text(silent: Alerts) -> None:
    silent.log(b"@state@ @log:text@ @@ @\n")
    silent.alert("failed", "FAILED", "rank 1 on node1: @log_tail@ @folder:3@ @x@", "@cause@ \\n")
    found = json.loads(silent.body("json"))
    assert (found["cause"], found["next"]) == ("rank 1 on node1: @log_tail@ @folder:3@ @x@", "@cause@ \\n")
    assert found["log_tail"] == "@state@ @log:text@ @@ @"
    lines = silent.body("ntfy").decode().splitlines()
    assert {f"cause: {found['cause']}", f"next: {found['next']}", found["log_tail"]} <= set(lines)


def test_a_payload_of_ones_own_is_sent(silent: Alerts) -> None:
    """The run folder's payloads may be edited, and files may be added: each is a target of its name."""
    (silent.run.path / "payloads" / "own").write_text(
        'on failed 3 burns\nleave login\nescape json\nheader X-Job: @job@\npart {"said": "@verb@: @cause:4@"}'
    )
    silent.alert("failed", "FAILED", 'a"bcdefg', SLURMDDP_JOB_ID="17")
    assert json.loads(silent.body("own")) == {"said": 'burns: a"bc...'}
    (entry,) = [path for path in silent.waiting() if path.name.endswith(".own")]
    assert "\nheader X-Job: 17\n" in (entry / "head").read_text()


def test_without_payloads_it_says_so(silent: Alerts) -> None:
    shutil.rmtree(silent.run.path / "payloads")
    assert "payloads is missing: was the file system purged?" in silent.alert("failed")
    assert not silent.waiting()


FRAGMENTS = st.sampled_from(
    [
        b"\x1b[31mred\x1b[0m", b"\x1b]8;;https://x\x1b\\link\x1b]8;;\x07", b"\x1b", b"\x9b31m", b"\0", b'"', b"\\",
        b"\\u0000", b"\r", b"\n", b"\t", b"\x7f", b"\x85", b"\xc2\x85", b"\xe2\x80\xa8", b"\xff\xfe", b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80", b"\xc0\x80", b"\xe2\x82", b"\xf0\x9f\x98\x80", "ä日本".encode(), b"`", b"```", b"<!here>",
        b"&lt;", b"%s%n", b"$(id)", b"`id`", HOOK.encode(), TOPIC.encode(), FLOW.encode(), TOKENS[0], b"x" * 5000,
        HOOK[:-4].encode() + b"\n" + HOOK[-4:].encode(), HOOK.replace("abcdefgh", "abcd\x1b[0mefgh").encode(),
        b"\xc2\x9b31m", "\u202e\u2066\u200f\u061c\u2029".encode(), b"\xe2\xc2\x80\x80\xae", b"\xe2\x80\xe2\x80\xae\xae",
        HOOK.replace("abcdefgh", "abcd\u202eefgh").encode(),
        b"x" * 290 + HOOK.encode(), ("é" * 700).encode(), b"\n" * 40,
    ]
)  # fmt: skip
BYTES = st.lists(st.one_of(FRAGMENTS, st.binary(max_size=40)), max_size=40).map(b"".join)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(log=BYTES, cause=BYTES)
@example(log=b"\xed\xa0\x80 \xf4\x90\x80\x80 \xf8\x88\x80\x80\x80 \xef\xbf\xbf\n" * 20, cause=b"\xff")
@example(
    log="a \u202e b \u2067 c \x9b31m \u200f\u061c\u2028\n".encode() * 9,
    cause=b"\xe2\xc2\x80\x80\xae \xe2\x80\xe2\x80\xae\xae",
)
@example(log=("日" * 70000).encode(), cause=("😀" * 3000).encode())
@example(log=b"x" * 70000 + HOOK.encode(), cause=HOOK.encode() * 50)
@example(log=HOOK.encode() * 1500, cause=b"rank 1 on node1: " + b"\\" * 2000)
@example(log=b'\\"' * 20000, cause=b'"' * 2000)
def test_any_bytes_make_valid_messages_without_the_address(silent: Alerts, log: bytes, cause: bytes) -> None:
    shutil.rmtree(silent.run.path / "alerts", ignore_errors=True)
    silent.log(log)
    silent.alert("failed", b"FAILED", cause.replace(b"\0", b"")[:100000], b"next \xff")
    for target in TARGETS:
        body = silent.body(target)
        assert not any(token in body for token in TOKENS), (target, body)
        text = body.decode("utf-8")  # strict
        shown = [text] if target == "ntfy" else texts(json.loads(text))
        assert all(visible(part) == part for part in shown), target
        assert "[31m" not in text or b"[31m" in log.replace(b"\x1b[31m", b"") + cause.replace(b"\x1b[31m", b"")
    assert len(json.loads(silent.body("discord"))["content"]) <= 2000
    assert len(silent.body("ntfy")) <= 4096
    assert len(silent.body("teams")) < 21_000 and len(silent.body("slack")) < 30_000
    # Lines that are there are shown: nothing is left out for fear of bytes.
    if not log.strip(b"\n") and b"\r" not in log:
        assert json.loads(silent.body("json"))["log_tail"] == ""
