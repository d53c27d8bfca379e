"""slurmddp preflight: what it refuses, and what it makes of the job; tests/cluster/test_network.py runs it."""

from __future__ import annotations

from collections.abc import Callable

from slurmddp.launch.preflight import CHANGES, DEFAULTS
from tests.helpers import LM_JOB, Desk, Result

Cli = Callable[..., Result]


def test_a_site_without_slurm_is_refused(cli: Cli, desk: Desk) -> None:
    desk.write("a.py")
    desk.write("job.yaml", "site: here\ntrain: {script: a.py}\n")
    before = desk.tree()
    shown = cli("preflight", "job.yaml")
    assert shown.code == 2 and "recovery.preflight is only, but without a Slurm job" in shown.err
    assert shown.out == "" and desk.tree() == before


def test_the_job_ends_after_preflight_and_measurement(desk: Desk) -> None:
    changes = [f"{key}={value}" for key, value in (*DEFAULTS, *CHANGES)]
    job, _ = desk.scripts(LM_JOB, "resources.nodes=2", *changes)
    assert "\npreflight=only measure=yes " in job and "\nrequeue_policy=none " in job
