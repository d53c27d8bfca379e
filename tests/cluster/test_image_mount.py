"""A .sif stays mounted when Slurm signals all processes of a job: its ranks save before they exit."""

import pytest

from .cluster import Cluster
from .runs import Alice, story

pytestmark = pytest.mark.cluster

#: It reads the image while it saves.
SCRIPT = """\
import time
import torch.distributed as dist
from slurmddp.runtime import should_stop

dist.init_process_group("gloo")
print("trains", flush=True)
while not should_stop():
    time.sleep(0.1)
time.sleep(2)
import xml.dom.minidom
open(f"/home/alice/scripts/saved-{dist.get_rank()}", "w").close()
"""
#: Processes that see such a mount, and those that make one.
MOUNTS = "grep -ls squashfuse /proc/[0-9]*/mounts | wc -l; pgrep -c squashfuse; true"


@pytest.mark.parametrize(
    ("how", "mode"),
    [
        (["scancel"], "torchrun"),
        pytest.param(["scontrol", "requeue"], "torchrun", marks=pytest.mark.long),
        (["scancel"], "srun"),
    ],
)
def test_slurms_sigterm_leaves_time_for_the_last_save(
    fresh_cluster: Cluster, torch_image: str, how: list[str], mode: str
) -> None:
    cluster, alice = fresh_cluster, Alice(fresh_cluster, torch_image)
    cluster.sh("login", "rm -f /home/alice/scripts/saved-*", user="root")
    cluster.write("/home/alice/scripts/saving.py", SCRIPT)
    run = alice.submit(
        "scripts/saving.py", "--site", "testcluster", "--image", torch_image, "--nodes", "2", "--time", "5m",
        *("--set", "recovery.preflight=false", "--set", f"launch.mode={mode}"),
        *("--set", "resources.ranks_per_node=1", "--set", "resources.cpus_per_node=1"),
    )  # fmt: skip
    logs = run.folder / "logs/attempt-000"
    cluster.wait_for(lambda: sum("trains" in path.read_text() for path in logs.glob("node*.log")) == 2, "both", 120)
    cluster.run("login", [*how, run.job_id])
    cluster.wait_for(lambda: not run.processes(), "no process is left", 60)
    saved = cluster.machine_path("/home/alice/scripts").glob("saved-*")
    assert sorted(path.name for path in saved) == ["saved-0", "saved-1"], story(run)
    assert not [row for row in run.lines("events.jsonl") if row["event"] == "image_not_protected"], story(run)
    cluster.run("login", ["scancel", run.job_id], check=False)
    for node in cluster.nodes:
        assert cluster.sh(node, MOUNTS, user="root").stdout.split() == ["0", "0"]
