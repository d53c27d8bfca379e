"""What bob, another user of the same nodes, sees of the secrets of alice's run while it trains."""

from __future__ import annotations

import hashlib
import json
import time

import pytest

from .cluster import Cluster
from .runs import Alice, Run

TOKEN = "hf_" + "0123456789abcdef" * 2
#: Each rank says the hash of what it got, fails once, and then waits to be asked to stop.
SCRIPT = """\
import hashlib, os, pathlib, sys, time
found = hashlib.sha256(os.environ.get("HF_TOKEN", "").encode()).hexdigest()
start = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("rank", os.environ["RANK"], "start", start, found, flush=True)
if start == "0":
    sys.exit(1)
while not pathlib.Path(os.environ["SLURMDDP_STOP_FILE"]).exists():
    time.sleep(0.2)
"""
#: All that another user may read of a node: command lines, environments, files, what Slurm tells.
LOOK = """\
cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null
scontrol show job --details {job}; scontrol write batch_script {job} -
grep -rs '' {run} /home/alice/.config /home/alice/.local /tmp /dev/shm /var/spool /var/log
ls -l {run}
"""


@pytest.fixture(scope="module")
def alice(cluster: Cluster, torch_image: str) -> Alice:
    return Alice(cluster, torch_image)


def wait_for_ranks(run: Run, count: int) -> None:
    """Wait until so many ranks that were restarted in place have told the hash of the token."""
    wanted = hashlib.sha256(TOKEN.encode()).hexdigest()
    deadline = time.monotonic() + 120
    while run.logs().count(f"start 1 {wanted}") < count:
        assert time.monotonic() < deadline and run.status()[0] == 3, run.logs()
        time.sleep(0.5)


def test_the_ranks_of_both_nodes_get_a_secret_that_bob_finds_nowhere(alice: Alice) -> None:
    cluster = alice.cluster
    # Open to bob but for what slurmddp closes itself.
    cluster.run("login", ["chmod", "755", "/home/alice"])
    cluster.write("/home/alice/secret/train.py", SCRIPT)
    job = alice.job_file(
        "secret",
        environment_from=["HF_TOKEN"],
        paths={"runs": "/scratch/secret-runs"},
        alerts=[{"to": "json", "url_env": "HOOK"}],
        train=None,
    )
    text = cluster.machine_path(job).read_text().replace("train: null", "train: {script: secret/train.py}")
    cluster.write(job, text)
    variables = {"HF_TOKEN": TOKEN, "HOOK": "https://127.0.0.1:9/hook-" + TOKEN}
    done = cluster.run("login", ["slurmddp", "submit", "--json", job], env=variables)
    run = Run(cluster, json.loads(done.stdout))
    wait_for_ranks(run, 4)
    where = {"job": run.job_id, "run": run.answer["run_folder"]}
    for host in ("login", "node1", "node2"):
        seen = cluster.sh(host, LOOK.format(**where), user="bob", check=False)
        assert TOKEN not in seen.stdout + seen.stderr, host
        assert "Permission denied" in seen.stderr, "the run folder is closed to bob"
        if host != "login":
            assert "train.py" in seen.stdout, "bob does see the ranks' command lines"
            # Of alice's own processes, the ranks have it, and job.sh, the preflight and Slurm's do not.
            have = cluster.sh(host, f"grep -lz 'HF_TOKEN={TOKEN}' /proc/[0-9]*/environ | cut -d / -f 3 | xargs -n 1 "
                              "sh -c 'tr \"\\\\0\" \" \" </proc/$0/cmdline; echo'", user="root").stdout  # fmt: skip
            assert "train.py" in have and "job.sh" not in have, have
    for path in run.folder.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path
    cluster.run("login", ["scontrol", "requeue", run.job_id])
    wait_for_ranks(run, 8)  # those of the second attempt read the same file
    alice.command("cancel", run.id, "--wait", timeout=90)
    assert TOKEN not in run.logs()
