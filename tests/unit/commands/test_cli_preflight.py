"""slurmddp check --preflight: what it refuses, and what it makes of the job; tests/cluster/test_network.py runs it."""

from collections.abc import Callable

import pytest

from slurmddp.commands.check.nodes import CHANGES, DEFAULTS, unmeasured
from tests.helpers import LM_JOB, Desk, Result

Cli = Callable[..., Result]


def test_a_site_without_slurm_is_refused(cli: Cli, desk: Desk) -> None:
    desk.write("a.py")
    desk.write("job.yaml", "site: here\ntrain: {script: a.py}\n")
    before = desk.tree()
    shown = cli("check", "job.yaml", "--preflight")
    assert shown.code == 2 and "job.yaml:1: site: a job of site here, without Slurm, has no preflight" in shown.err
    assert shown.out == "" and desk.tree() == before


def test_the_job_ends_after_preflight_and_measurement(desk: Desk) -> None:
    changes = [f"{key}={value}" for key, value in (*DEFAULTS, *CHANGES)]
    job, _ = desk.scripts(LM_JOB, "resources.nodes=2", *changes)
    assert "\n  preflight=only measure=yes " in job and "\n  requeue_policy=none " in job


@pytest.mark.parametrize(
    ("options", "passed", "why"),
    [
        (["resources.nodes=1"], True, "the job has one node"),
        (["resources.nodes=2", "network.measure=false"], True, "network.measure is off"),
        (["resources.nodes=2"], True, "only one node passed the preflight"),
        (["resources.nodes=2"], False, "the job ended before"),
    ],
)
def test_why_the_network_was_not_measured(desk: Desk, options: list[str], passed: bool, why: str) -> None:
    assert unmeasured(desk.plan(LM_JOB, *options), passed=passed) == why
