"""The job that goes on in another's place, where the site forbids requeues: what its submission is given."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from slurmddp.slurm.base import KEPT, LEAKING
from tests.helpers import SHELL


def test_the_lists_of_variables_are_those_of_a_submission() -> None:
    """A pattern in bash, as `case` has it, of what `clean_environment` takes away and keeps."""
    text = (SHELL / "requeue" / "chain.sh").read_text()
    assert f"SLURMDDP_* | {'* | '.join(LEAKING)}*)" in text
    assert f"{' | '.join(sorted(KEPT))}) ;;" in text


@pytest.mark.parametrize(
    ("option", "dependency"),
    [("", "afterany:7"), ("#SBATCH --dependency=singleton\n", "afterany:7,singleton")],
    ids=["alone", "in a sweep with --at-most"],
)
def test_it_inherits_nothing_that_this_job_was_given(tmp_path: Path, option: str, dependency: str) -> None:
    """What `clean_environment` keeps and takes away when a person submits from inside a job."""
    given = ("SLURM_JOB_ID", "SLURMD_NODENAME", "SRUN_DEBUG", "SALLOC_X", "PMI_RANK", "PMIX_ID", "SBATCH_QOS",
             "SLURMDDP_RUN", "SQUEUE_FORMAT")  # fmt: skip
    kept = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURMISH", "HOME")
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f"#!/bin/sh\nenv >{tmp_path}/given\necho \"$*\" >{tmp_path}/words\necho '8;cluster'\n")
    sbatch.chmod(0o755)
    functions = "".join(f"source {SHELL}/{name}.sh\n" for name in ("messages", "requeue/chain"))
    stubs = 'say() { :; }; event() { echo "$2"; }; alert() { :; }; json() { printf \'"%s"\' "$1"; }\n'
    values = f"run='{tmp_path}/runs/my run'; job_id=7; requeue_policy=chain; excluded=(node3)\n"
    (tmp_path / "runs/my run").mkdir(parents=True)
    (tmp_path / "runs/my run/job.sh").write_text(f"#!/bin/bash\n{option}")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", **dict.fromkeys((*given, *kept), "a\nb")}
    done = subprocess.run(
        ["bash", "-uc", f"{functions}{stubs}{values}requeue 'time limit'"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert '"how": "chain"' in done.stdout and '"next_job": "8"' in done.stdout
    names = {line.split("=")[0] for line in (tmp_path / "given").read_text().splitlines() if "=" in line}
    assert names.isdisjoint(given) and names >= set(kept)
    words = (tmp_path / "words").read_text()
    assert f"--dependency={dependency} " in words and "--exclude=node3 " in words
