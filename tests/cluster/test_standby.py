"""recovery.standby on three nodes: the batch host is lost, and the run goes on and ends in the same allocation."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator

import pytest

from .cluster import Cluster
from .faults import freeze, supervisors
from .proof import WEBHOOK, Receiver
from .runs import Alice, Run, story
from .test_forking import SCRIPT as FORKED
from .test_warm import seeds

pytestmark = pytest.mark.cluster

#: All ranks end after the same step.
ENOUGH = 'os.path.exists("/home/alice/scripts/enough")'
SCRIPT = FORKED.replace(f"while not {ENOUGH}:", "enough = torch.zeros(1)\nwhile not enough.item():").replace(
    "    time.sleep(0.1)\n", f"    time.sleep(0.1)\n    enough.fill_({ENOUGH})\n    dist.all_reduce(enough)\n"
)


@contextlib.contextmanager
def standby_run(cluster: Cluster, image: str) -> Iterator[tuple[Run, str, Receiver]]:
    """A run that trains on two of three nodes, with its batch host, and who receives its alerts."""
    receiver = Receiver(cluster, 8080)
    cluster.write(WEBHOOK, receiver.url + "\n", mode=0o600)
    cluster.write("/home/alice/scripts/forked.py", SCRIPT)
    alice = Alice(cluster, image)
    software = [word for key, value in alice.software().items() for word in ("--set", f"{key}={json.dumps(value)}")]
    run = alice.submit(
        "scripts/forked.py", "--site", "testcluster", *software, "--nodes", "2+1", "--time", "20m",
        *("--set", "recovery.standby=true", "--set", "recovery.heartbeats=true"),
        *("--set", "recovery.fork=true", "--set", "recovery.spares_warm=true"),
        *("--set", f"alerts=[{{to: json, url_file: {WEBHOOK}, insecure: true}}]"),
        *("--set", "resources.ranks_per_node=1", "--set", "resources.cpus_per_node=1"),
    )  # fmt: skip
    cluster.wait_for(lambda: len(seeds(run, 0)) == 2, "the first attempt trains", 300)
    assert run.wait_for_event("heartbeats")["silent"] == ""
    batch_host = cluster.job(run.job_id)["BatchHost"]
    try:
        yield run, batch_host, receiver
    finally:
        print(story(run))
        receiver.stop()
        cluster.run("login", ["scancel", run.job_id], check=False)
        cluster.restart_host(batch_host)
        cluster.wait_nodes(timeout=120)
        cluster.run("login", ["rm", "-f", "/home/alice/scripts/enough"], user="root")


def ends_well(cluster: Cluster, run: Run, receiver: Receiver) -> None:
    """The job completes, in its only start, and says so once."""
    after = f"sbatch --parsable --nodes=1 --dependency=afterok:{run.job_id} --output=/dev/null --wrap true"
    dependant = cluster.sh("login", after).stdout.strip()
    cluster.write("/home/alice/scripts/enough", "")
    assert cluster.wait_job(run.job_id, timeout=120) == "COMPLETED"
    job = cluster.job(run.job_id)
    assert (job["Restarts"], job["ExitCode"]) == ("0", "0:0")
    assert run.status()[1]["state"] == "done", story(run)
    assert cluster.wait_job(dependant) == "COMPLETED"
    assert [row["event"] for row in run.lines("events.jsonl")].count("job_ended") == 1, story(run)
    kinds = [alert["kind"] for alert in receiver.alerts(run)]
    assert kinds.count("finished") == 1 and not {"requeued", "failed"} & {*kinds}, kinds


@pytest.mark.parametrize(
    "fault", ["power cut", *(pytest.param(each, marks=pytest.mark.long) for each in ("cut off", "cut off and frozen"))]
)
def test_the_batch_host_is_lost_and_the_run_goes_on(fresh_cluster: Cluster, torch_image: str, fault: str) -> None:
    """Cut off: the host comes back while another one leads. Frozen: its supervisor first stands still meanwhile."""
    cluster = fresh_cluster
    with standby_run(cluster, torch_image) as (run, batch_host, receiver):
        lost = time.monotonic()
        if fault == "power cut":
            cluster.kill_host(batch_host)
        else:
            cluster.cut_network(batch_host)
        if fault == "cut off and frozen":
            freeze(cluster, batch_host, "STOP")
        cluster.wait_for(lambda: len(seeds(run, 1)) == 2, "the next attempt trains", 120)
        print("seconds", time.monotonic() - lost, flush=True)
        assert batch_host not in seeds(run, 1), story(run)
        if fault == "cut off and frozen":
            freeze(cluster, batch_host, "CONT")
        if fault != "power cut":
            swept = run.folder / f"logs/attempt-000/sweep/{batch_host}"
            cluster.wait_for(lambda: swept.exists() and "process" in swept.read_text(), "it has ended its ranks", 30)
            assert supervisors(cluster, batch_host), "it waits"
            # If the node came back right after Slurm has given it up (15 s here), Slurm would kill job.sh, and take its
            # end for the job's, which is then requeued.
            time.sleep(max(0.0, 45 - (time.monotonic() - lost)))
            cluster.mend_network(batch_host)
            time.sleep(5)
        ends_well(cluster, run, receiver)
        rows = run.lines("events.jsonl")
        takes_over = next(n for n, row in enumerate(rows) if row["event"] == "node_excluded")
        by = {row["node"] for row in rows[takes_over:] if row["event"] in ("attempt_started", "cleaned", "job_ended")}
        assert len(by) == 1 and batch_host not in by, story(run)


@pytest.mark.long
def test_a_supervisor_that_was_frozen_goes_on_itself(fresh_cluster: Cluster, torch_image: str) -> None:
    """Its node lives: nobody takes over, however long it stands still."""
    cluster = fresh_cluster
    with standby_run(cluster, torch_image) as (run, batch_host, receiver):
        freeze(cluster, batch_host, "STOP")
        time.sleep(20)
        freeze(cluster, batch_host, "CONT")
        ends_well(cluster, run, receiver)
        assert not [row for row in run.lines("events.jsonl") if row["event"] == "node_excluded"], story(run)
        assert [path.name.split(".")[0] for path in (run.folder / "lease").iterdir()] == ["1"]
