"""An alert as a receiver takes it: the kinds it wants, slots, parts that are left out, escapes, and the bytes left."""

from __future__ import annotations

import pytest

from slurmddp.records.alert import Alert
from slurmddp.supervisor.compose import compose, safe, way

ALERT = Alert("failed", "failed", 'a "cause"', "not restarted", run="r1", node="n1", rank=0, step=5, steps=20, time=9)
WANTED = "on failed 5 red\n"


def body(payload: str, alert: Alert = ALERT) -> str:
    found = compose("bot", WANTED + payload, alert)
    assert found is not None
    return found.message.body if isinstance(found.message.body, str) else found.message.body.decode()


def test_only_the_kinds_that_a_target_wants() -> None:
    assert compose("bot", "on finished 3 ok\npart x", ALERT) is None
    found = compose("bot", WANTED + "leave login\nproxy http://p:1\ninsecure 1\nheader X-Id: @run@\nheader bad", ALERT)
    assert found is not None and found.message[:4] == ("bot", ALERT.key, "failed", True)
    assert found.message.headers == ("X-Id: r1",)
    assert tuple(found[1:]) == ("login", "http://p:1") == way("leave login\nproxy http://p:1")
    assert way("on failed") == ("node", "")


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        ("part @run@ @priority@ @verb@", "r1 5 red"),
        ("part [@job_id@]", "[]"),
        ("optional [@job_id@]", ""),
        ("optional [@node@]", "[n1]"),
        ("part @job_id:text@ @step:number@ @node:text@ @attempt:number@", 'null 5 "n1" 0'),
        ("part @cause:3@", 'a "...'),
        ("part a\\nb\\t\\u0041\\q", "a\nb\tA\\q"),
        ("escape json\npart @cause@", 'a \\"cause\\"'),
        ("escape html\npart @next@", "not restarted"),
        ("part @progress@", "step 5 of 20 (25 %)"),
        ("part @job@", "?"),
    ],
)
def test_slots(payload: str, text: str) -> None:
    assert body(payload) == text


def test_escapes_of_receivers() -> None:
    odd = ALERT._replace(cause="<a> & `b`")
    assert body("escape html backtick\npart @cause@", odd) == "&lt;a&gt; &amp; 'b'"
    assert body("escape json\npart \\n", odd) == "\\n", "the receiver's own escape"


def test_each_line_of_the_log_and_the_bytes_that_are_left() -> None:
    lines = ALERT._replace(log_tail="one\n\ntwo")
    assert body("each <@line@>", lines) == "<one><two>"
    long = ALERT._replace(log_tail="\n".join(f"line {number:04}" for number in range(50)))
    cut = body("bytes 100\npart @run@:@log_tail:rest@", long)
    assert len(cut) <= 101 and cut.startswith("r1:line ") and cut.endswith("line 0049")
    assert body("bytes 60\npart @log_tail:rest@", long) == "", "too little room for anything that helps"


def test_what_may_be_shown_is_one_line_and_bounded() -> None:
    found = safe(ALERT._replace(cause="a\nb" + "x" * 999, node="n;1", rank=10**9, state="s" * 200), [])
    assert found.cause.startswith("a b") and len(found.cause) <= 603
    assert (found.node, found.rank, len(found.state) <= 123) == ("", None, True)
    assert safe(ALERT, []).rank == 0 and safe(ALERT._replace(rank=10**9 - 1), []).rank == 10**9 - 1
