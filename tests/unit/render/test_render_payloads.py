"""Payloads of alerts: the slots that the sender can fill, and text that is JSON around any value."""

import json
import re

import pytest

from slurmddp.job.alerts import KINDS
from slurmddp.records.alert import Alert
from slurmddp.render.alert_texts import payload
from slurmddp.render.scripts import alert_files
from slurmddp.supervisor.compose import compose
from tests.helpers import Desk

FORMS = ("slack", "discord", "teams", "ntfy", "json")
SLOT = re.compile(r"@(\w+)(?::(\w+))?@")


@pytest.fixture
def payloads(desk: Desk) -> dict[str, str]:
    """Kind of target -> its payload, for a target that hears of everything."""
    desk.write("train.py")
    targets = ", ".join(f"{{to: {to}, on: [{', '.join(KINDS)}]}}" for to in FORMS)
    plan = desk.plan(f"name: gpt\nsite: here\ntrain: {{script: train.py}}\nalerts: [{targets}]\n")
    assert plan.alerts is not None
    found = {target.to: payload(plan, plan.alerts, target) for target in plan.alerts.targets}
    assert alert_files(plan) == {f"payloads/{to}": text for to, text in found.items()}
    return found


@pytest.mark.parametrize("to", FORMS)
def test_the_sender_knows_each_word_and_slot(payloads: dict[str, str], to: str) -> None:
    """With all facts, no part is left out, and no slot stays."""
    texts = {name: f"<{name}>" for name in ("state", "cause", "next", "folder", "log", "log_tail")}
    alert = Alert("failed", rank=3, node="n1", run="run", job_id="7", attempt=2, time=1, step=8, steps=9, **texts)
    message = compose(to, payloads[to], alert)
    assert message is not None and not SLOT.search(message.message.body.decode())
    for name, form in SLOT.findall(payloads[to]):
        assert form in ("", "rest", "text", "number") or form.isdecimal(), (name, form)
        found = compose(to, f"on failed 4 verb\n{'each' if name == 'line' else 'optional'} @{name}@", alert)
        assert found is not None and found.message.body, name
    words = {
        "on",
        "leave",
        "proxy",
        "insecure",
        "escape",
        "bytes",
        "header",
        "part",
        "optional",
        "each",
    }  # docs/alerts.md
    assert {line.split(" ")[0] for line in payloads[to].splitlines()} <= words


@pytest.mark.parametrize("to", FORMS)
def test_each_kind_has_its_words(payloads: dict[str, str], to: str) -> None:
    lines = [line.split(" ", 3) for line in payloads[to].splitlines() if line.startswith("on ")]
    assert tuple(kind for _, kind, _, _ in lines) == KINDS
    assert all(priority in "2345" and verb for _, _, priority, verb in lines)


@pytest.mark.parametrize("to", [form for form in FORMS if form != "ntfy"])
def test_the_body_is_json_with_every_part_and_with_none_of_the_optional_ones(payloads: dict[str, str], to: str) -> None:
    lines = [line.partition(" ")[::2] for line in payloads[to].splitlines()]
    for words in (("part",), ("part", "optional"), ("part", "optional", "each")):
        body = "".join(text for word, text in lines if word in words)
        body = SLOT.sub(lambda slot: {"text": '"x"', "number": "1"}.get(slot[2] or "", "x"), body)
        assert "gpt" in json.dumps(json.loads(body))
