"""`slurmddp --host` from this machine to the cluster's login host: a real sshd, whose sessions are on that host."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.helpers import Desk
from tests.sshd import needs_sshd, started

from .cluster import Cluster
from .runs import Alice, Run

pytestmark = [pytest.mark.cluster, pytest.mark.long, needs_sshd]


def test_a_job_from_a_laptop(cluster: Cluster, torch_image: str, tmp_path: Path) -> None:
    alice, laptop = Alice(cluster, torch_image), Desk(tmp_path / "laptop")
    job = alice.job_file("laptop", site="testcluster", resources={"nodes": 2}, paths={"runs": "runs"})
    laptop.write("job.yaml", cluster.machine_path(job).read_text())
    enter = shlex.join(cluster.entry("login", ["bash", "-c"]))
    session = laptop.program("session", f'#!/bin/bash\nexec {enter} "$SSH_ORIGINAL_COMMAND"\n')
    with started(laptop, tmp_path, f"ForceCommand {session}") as sshd:
        done = sshd.run("submit", "job.yaml", "--json")
        assert done.code == 0, done.err
        run = Run(cluster, json.loads(done.out))
        assert "/home/alice/slurmddp/project-" in done.err and run.folder.parent.name == "runs"
        followed = sshd.run("logs", run.id, "-f")
        assert followed.code == 0 and "step " in followed.out, followed.err
        assert sshd.run("status", run.id).code == 0
        assert sshd.run("report", run.id, "-o", "run.html").code == 0
        assert run.id in (laptop.project / "run.html").read_text()
        assert sshd.log.read_text().count("Accepted publickey") == 1
