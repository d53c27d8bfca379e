"""How a mistake is told: file, line, key, value, and the nearest known key."""

import pytest

from slurmddp.errors import UserError
from tests.helpers import LM_JOB, Desk, refusal


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("resources: {nods: 2}", ":6: resources.nods: unknown key\n  -> did you mean resources.nodes?"),
        ("nodes: 2", ":6: nodes: unknown key\n  -> did you mean resources.nodes?"),
        ("resource:\n  nodes: 2", ":6: resource: unknown key\n  -> did you mean resources?"),
        (
            "checkpoint:\n  intervall: 3m",
            ":7: checkpoint.intervall: unknown key\n  -> did you mean checkpoint.interval?",
        ),
        ("xyzzy: 1", ":6: xyzzy: unknown key\n  -> docs/job.md lists all keys"),
        ("resources: {nodes: two}", ":6: resources.nodes: must be a whole number, not 'two'"),
        ("resources: {nodes: 1.5}", ":6: resources.nodes: must be a whole number, not '1.5'"),
        ("resources: {nodes: 0}", ":6: resources.nodes: must be at least 1, not '0'"),
        ("resources: {nodes: [1]}", ":6: resources.nodes: must be a whole number, not ['1']"),
        ("resources: {nodes: }", ":6: resources.nodes: must be a whole number, not empty"),
        ("resources: {time: 30}", ":6: resources.time: '30' needs a unit"),
        ("resources: {exclusive: maybe}", ":6: resources.exclusive: must be true or false, not 'maybe'"),
        ("resources: {account: [a]}", ":6: resources.account: must be text, not ['a']"),
        ("resources: 3", ":6: resources: must be a mapping of keys to values, not '3'"),
        ("resources:", ":6: resources: must be a mapping of keys to values, not empty"),
        ("setup: module load x", ":6: setup: must be a list, not 'module load x'"),
        ("setup:\n- a\n- [b]", ":8: setup.1: must be text, not ['b']"),
        ("container:\n  binds:\n  - /a\n  - a:b:c:d", ":9: container.binds.1: 'a:b:c:d' must be source"),
        ("container:\n  binds: [{source: /a, mod: ro}]", ":7: container.binds.0.mod: unknown key"),
        ("environment: {A B: x}", ":6: environment.A B: 'A B' must be letters"),
        ("environment: {RANK: x}", ":6: environment sets RANK"),
        ("launch: {rendezvous: etcd}", ":6: launch.rendezvous: must be one of 'c10d' or 'static', not 'etcd'"),
        ("name: 'a b'", ":6: name: 'a b' must be 1 to 100 letters"),
        ("name: " + "x" * 300, "'" + "x" * 76 + "... must be 1 to 100 letters"),
    ],
)
def test_a_mistake_in_the_job_file(desk: Desk, written: str, message: str) -> None:
    job = "\n" + LM_JOB.removeprefix("name: gpt\n") + written + "\n"
    with pytest.raises(UserError) as caught:
        desk.resolve(job)
    shown = refusal(caught.value)
    assert message in shown
    assert shown.startswith(f"{desk.project}/job.yaml:")


def test_all_mistakes_are_told_at_once(desk: Desk) -> None:
    with pytest.raises(UserError) as caught:
        desk.resolve(LM_JOB + "nodes: 2\nresources: {time: soon}\n")
    assert len([line for line in refusal(caught.value).splitlines() if "job.yaml:" in line]) == 2


def test_a_job_without_anything_to_train(desk: Desk) -> None:
    with pytest.raises(UserError, match="train: is missing"):
        desk.resolve("site: gpus\n")
    with pytest.raises(UserError, match="needs one of task"):
        desk.resolve("site: gpus\ntrain: {steps: 5}\n")


def test_an_unknown_site_names_the_place_and_the_nearest(desk: Desk) -> None:
    with pytest.raises(UserError) as caught:
        desk.resolve(LM_JOB.replace("gpus", "gpu"))
    assert refusal(caught.value) == f"{desk.project}/job.yaml:2: unknown site 'gpu'\n  -> did you mean gpus?"
