"""recovery.spares_warm on three nodes, in the image: the agents of all attempts are forked from warm processes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest

from .cluster import Cluster
from .runs import Alice, Run, story
from .test_forking import SCRIPT

pytestmark = pytest.mark.cluster

#: Where it is asked to stop, it saves for some seconds: fewer than Slurm leaves between SIGTERM and SIGKILL here.
SAVING_SCRIPT = "from slurmddp.runtime import should_stop\n" + SCRIPT.replace(
    '("gloo")\n', '("gloo")\nshould_stop()  # from now on, signals only ask to stop\n'
).replace(
    "    time.sleep(0.1)\n",
    """\
    time.sleep(0.1)
    if should_stop():
        print(f"rank {dist.get_rank()} saves", flush=True)
        time.sleep(2)
        open(f"/home/alice/scripts/saved-{dist.get_rank()}", "w").close()
        raise SystemExit
""",
)


def seeds(run: Run, attempt: int) -> dict[str, str]:
    """{node: the hash seed of its rank} of the first start of an attempt."""
    logs = {path.stem: path.read_text() for path in run.folder.glob(f"logs/attempt-{attempt:03d}/node*.log")}
    found = {node: re.search(r"start 0 rank \d+ seed (\S+)\n", text) for node, text in logs.items()}
    return {node: match[1] for node, match in found.items() if match}


@contextlib.contextmanager
def warm_run(
    cluster: Cluster, image: str, nodes: str, script: str = SCRIPT, *options: str
) -> Iterator[tuple[Run, str, str]]:
    """A run on node1 to node3 whose first attempt trains: with its batch host and the other node."""
    alice = Alice(cluster, image)
    cluster.write("/home/alice/scripts/forked.py", script)
    run = alice.submit(
        "scripts/forked.py", "--site", "testcluster", "--image", image, "--nodes", nodes, "--time", "20m",
        *options,
        *("--set", "recovery.fork=true", "--set", "recovery.spares_warm=true", "--set", "recovery.heartbeats=true"),
        *("--set", "resources.ranks_per_node=1", "--set", "resources.cpus_per_node=1"),
    )  # fmt: skip
    cluster.wait_for(lambda: len(seeds(run, 0)) == 2, "the first attempt trains", 300)
    run.wait_for_event("heartbeats")
    batch_host = cluster.job(run.job_id)["BatchHost"]
    (other,) = {*seeds(run, 0)} - {batch_host}
    try:
        yield run, batch_host, other
    finally:
        cluster.run("login", ["scancel", run.job_id], check=False)
        for node in [node for node in cluster.nodes if not cluster.host_is_up(node)]:
            cluster.wait_for(lambda: cluster.node_states()[node].startswith("down"), "Slurm has given it up", 120)  # noqa: B023 - called at once
            cluster.restart_host(node)
        cluster.wait_nodes(timeout=120)


def test_a_spare_starts_from_its_warm_process(fresh_cluster: Cluster, torch_image: str) -> None:
    cluster = fresh_cluster
    with warm_run(cluster, torch_image, "1-2+1") as (run, batch_host, other):
        cluster.kill_host(other)
        cluster.wait_for(lambda: len(seeds(run, 1)) == 2, "the next attempt trains", 120)
        assert other not in seeds(run, 1)
        assert seeds(run, 1)[batch_host] == seeds(run, 0)[batch_host]  # forks of one process
        assert not [row for row in run.lines("events.jsonl") if row["event"] in ("not_warm", "not_forked")], story(run)
        cluster.write("/home/alice/scripts/enough", "")
        cluster.wait_job(run.job_id, timeout=90)
        # Of this run alone: a host whose power was cut keeps what others had there.
        find = f"find / -xdev -maxdepth 5 -name '{run.id}*-warm' -not -path '/proc/*'"
        left = cluster.sh(batch_host, find, user="root")
        assert left.stdout == "" and run.status()[1]["state"] == "done", story(run)
    cluster.run("login", ["rm", "/home/alice/scripts/enough"], user="root")


def test_the_run_survives_a_spare_that_dies_and_a_warm_process_that_dies(
    fresh_cluster: Cluster, torch_image: str
) -> None:
    cluster = fresh_cluster
    with warm_run(cluster, torch_image, "2+1") as (run, batch_host, other):
        (spare,) = {*cluster.nodes} - {batch_host, other}
        cluster.kill_host(spare)
        assert run.wait_for_event("node_excluded")["excluded"] == spare
        assert not [row for row in run.lines("events.jsonl") if row["event"] == "attempt_ended"], story(run)

        name = f"SLURMDDP_RENDEZVOUS_ID={run.id}-{run.job_id}-warm"
        script = f"cd /proc; for p in $(grep -lzsx {name} [0-9]*/environ); do grep -qsz forked.py ${{p%environ}}cmdline"
        warm = cluster.sh(other, f"{script} && echo ${{p%/environ}}; done; true", user="root").stdout.split()
        there = cluster.processes(other)
        agents = [pid for pid, words in there if "slurmddp.runtime.agent" in words]
        assert warm and agents, f"{other}: {there}\n{story(run)}"
        cluster.run(other, ["kill", "-KILL", *warm, *map(str, agents)], user="root", check=False)
        cluster.wait_for(lambda: len(seeds(run, 1)) == 2, "the next attempt trains", 200)
        assert seeds(run, 1)[batch_host] == seeds(run, 0)[batch_host]
        cold = [(row["node"], row["why"]) for row in run.lines("events.jsonl") if row["event"] == "not_warm"]
        assert cold == [(other, "no warm process on this node: logs/warm may say why")], story(run)
        assert f"no warm agent on {other}" in str(run.status()[1]), story(run)


def test_scancel_leaves_time_for_the_last_save(fresh_cluster: Cluster, torch_image: str) -> None:
    """Slurm signals all steps at once: warm processes and the mount of the image must not end before the agents."""
    cluster = fresh_cluster
    with warm_run(cluster, torch_image, "2+1", SAVING_SCRIPT, "--set", "recovery.preflight=false") as (run, _, _):
        cluster.run("login", ["scancel", run.job_id])
        run.wait("cancelled")
        saved = sorted(path.name for path in cluster.machine_path("/home/alice/scripts").glob("saved-*"))
        assert saved == ["saved-0", "saved-1"], story(run)
        cluster.wait_for(lambda: not run.processes(), f"no process is left: {run.processes()}", 30)
        told = {row["event"] for row in run.lines("events.jsonl")}
        assert not told & {"not_warm", "image_not_protected"}, story(run)
    cluster.sh("login", "rm /home/alice/scripts/saved-*", user="root")
