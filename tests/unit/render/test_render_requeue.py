"""The job that goes on in another's place, where the site forbids requeues: what its submission is given."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmddp.plan.model import Plan
from slurmddp.render.scripts import guard_script, job_script
from tests.helpers import Desk, check_bash

SITE = (
    "name: s\ntitle: t\nrequeue: chain\npartitions: {p: {gpus_per_node: 1}}\n"
    "job: {resources: {partition: p}, container: {runtime: none}}\n"
)


@pytest.fixture
def plan(desk: Desk) -> Plan:
    desk.site(SITE)
    return desk.plan("name: n\nsite: s\nresources: {nodes: {min: 1, max: 2}}\ntrain: {script: a.py}\n")


def test_the_scripts_are_clean(plan: Plan, tmp_path: Path) -> None:
    check_bash(job_script(plan), "job.sh", tmp_path)
    check_bash(guard_script(plan) or "", "guard.sh", tmp_path)


@pytest.mark.parametrize("script", [job_script, guard_script])
def test_it_inherits_nothing_that_this_job_was_given(plan: Plan, script: Callable[[Plan], str], tmp_path: Path) -> None:
    """What `clean_environment` keeps and takes away when a person submits from inside a job."""
    given = ("SLURM_JOB_ID", "SLURMD_NODENAME", "SRUN_DEBUG", "SALLOC_X", "PMI_RANK", "PMIX_ID", "SBATCH_QOS",
             "SLURMDDP_RUN", "SQUEUE_FORMAT")  # fmt: skip
    kept = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURMISH", "HOME")
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f"#!/bin/sh\nenv >{tmp_path}/given\necho \"$*\" >{tmp_path}/words\necho '8;cluster'\n")
    sbatch.chmod(0o755)
    body = script(plan).split("# --- back into the queue")[1].split("\nwas_requeued()")[0]
    stubs = 'say() { :; }; event() { echo "$2"; }; alert() { :; }; json() { printf \'"%s"\' "$1"; }\n'
    values = f"run='{tmp_path}/runs/my run'; job_id=7; excluded=(node3)\n"
    (tmp_path / "runs").mkdir()
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", **dict.fromkeys((*given, *kept), "a\nb")}
    done = subprocess.run(
        ["bash", "-uc", f"{stubs}{values}#{body}\nrequeue 'time limit'"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert '"how": "chain"' in done.stdout and '"next_job": "8"' in done.stdout
    names = {line.split("=")[0] for line in (tmp_path / "given").read_text().splitlines() if "=" in line}
    assert names.isdisjoint(given) and names >= set(kept)
    words = (tmp_path / "words").read_text()
    assert "--dependency=afterany:7 " in words and "--exclude=node3 " in words
