"""The job that goes on in another's place, where the site forbids requeues: what its submission is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmddp.cluster.base import KEPT, LEAKING
from slurmddp.supervisor import requeue
from slurmddp.supervisor.loop import Loop


def test_the_lists_of_variables_are_those_of_a_submission() -> None:
    """What `clean_environment` takes away and keeps; SLURMDDP_ begins with SLURM."""
    assert set(requeue._REACH) == set(KEPT)
    assert all(name.startswith(requeue._OF_JOB) for name in LEAKING)


@pytest.mark.parametrize(
    ("singleton", "dependency"),
    [(False, "afterany:7"), (True, "afterany:7,singleton")],
    ids=["alone", "in a sweep with --at-most"],
)
def test_it_inherits_nothing_that_this_job_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, singleton: bool, dependency: str
) -> None:
    given = ("SLURM_JOB_ID", "SLURMD_NODENAME", "SRUN_DEBUG", "SALLOC_X", "PMI_RANK", "PMIX_ID", "SBATCH_QOS",
             "SLURMDDP_RUN", "SQUEUE_FORMAT")  # fmt: skip
    kept = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURMISH", "HOME")
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f"#!/bin/sh\nenv >{tmp_path}/given\necho \"$*\" >{tmp_path}/words\npwd\necho '8;cluster'\n")
    sbatch.write_text(sbatch.read_text().replace("pwd\n", f"pwd >{tmp_path}/folder\n"))
    sbatch.chmod(0o755)
    (tmp_path / "runs/my run").mkdir(parents=True)
    (tmp_path / "runs/my run/job.sh").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in (*given, *kept):
        monkeypatch.setenv(name, "a\nb")
    chain = requeue.Chain(Loop(), "7", f"{tmp_path}/runs/my run", singleton)
    assert chain.again("time limit", ["node3"]) == "8"
    names = {line.split("=")[0] for line in (tmp_path / "given").read_text().splitlines() if "=" in line}
    assert names.isdisjoint(given) and names >= set(kept)
    words = (tmp_path / "words").read_text()
    assert f"--dependency={dependency} " in words and "--exclude=node3 " in words
    assert (tmp_path / "folder").read_text() == f"{tmp_path}/runs\n"
