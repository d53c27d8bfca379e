"""`slurmddp site init --probe` on a real Slurm: the draft submits a working job as it is."""

from __future__ import annotations

import json

import pytest

from .cluster import Cluster
from .runs import ONE_RANK_A_NODE, Alice
from .variant import variant

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def alice(cluster: Cluster, torch_image: str) -> Alice:
    return Alice(cluster, torch_image)


@pytest.mark.skipif(not variant().apptainer, reason="the job of the draft needs Apptainer, which these hosts lack")
def test_a_drafted_site_runs_a_job_unedited(alice: Alice) -> None:
    """Its Slurm counts GPUs that are null devices: the probe sees none, so the job trains on CPUs."""
    draft = "/home/alice/drafted.yaml"
    queue = ["squeue", "--noheader", "--states=PENDING,RUNNING", "--format=%i"]
    before = alice.cluster.run("login", queue).stdout
    done = alice.command("site", "init", "--probe", "--force", "--partition", "main", "-o", draft, timeout=150)
    assert done.stderr.count("sbatch --parsable") == 2, "node3 has one GPU, the others have two"
    assert alice.cluster.run("login", queue).stdout == before
    assert alice.command("site", "validate", draft).stdout == f"{draft}: valid\n"
    text = alice.cluster.machine_path(draft).read_text()
    for line in ("level: probed # 2 of 2", "gpu_vendor: none # probe of node", "runtime: apptainer", "interface: ib0"):
        assert line in text, text

    run = alice.submit(alice.job_file("drafted", site=draft, resources=ONE_RANK_A_NODE, train={"steps": 10}))
    run.wait("done", timeout=240)
    assert json.loads((run.folder / "manifest.json").read_text())["site"] == "drafted"
