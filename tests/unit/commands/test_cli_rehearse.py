"""check --rehearse: what cannot be rehearsed is refused before anything is submitted; the rest is in tests/cluster."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers import LM_JOB, Desk, Result

Cli = Callable[..., Result]


@pytest.mark.parametrize(
    ("job", "message", "todo"),
    [
        ("site: here\ntrain: {task: lm, data: {path: /data}}\n", "site here has no Slurm", "use a cluster's site"),
        (LM_JOB, "the dataset /data/books does not exist", "correct the path"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(cli: Cli, desk: Desk, job: str, message: str, todo: str) -> None:
    desk.write("job.yaml", job)
    before = desk.tree()
    shown = cli("check", "job.yaml", "--rehearse")
    assert shown.code == 2 and message in shown.err and todo in shown.err and shown.out == ""
    assert desk.tree() == before, "nothing was written"
