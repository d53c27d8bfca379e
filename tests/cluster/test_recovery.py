"""Faults on a real Slurm: restarts in place, lost agents and nodes, requeues, the breaker, time limits, cancelling."""

from __future__ import annotations

import json
import os
import random
import time
from itertools import chain

import pytest

from slurmddp.records.stop import CANCELLED, StopRequest

from .cluster import Cluster
from .faults import wait_for_step
from .proof import tensors, traces
from .runs import NO_PREFLIGHT, ONE_RANK_A_NODE, Alice, Run

pytestmark = pytest.mark.cluster

SEED = random.randrange(10**6)
#: How often a rank is killed; `make test-full` does it 20 times.
KILLS = int(os.environ.get("SLURMDDP_KILLS", "1"))
#: Stands in for Python and torchrun where job.sh itself is what is tested: WISH says what becomes of the ranks.
AGENT = """#!/bin/bash
[[ "$*" == *slurmddp.runtime.agent* ]] || exit 0
first() { ((SLURMDDP_ATTEMPT == 0)); }
case "$WISH" in
  stop) ! first || until [[ -e "$SLURMDDP_RUN/stop" ]]; do sleep 0.1; done ;;
  sleep) ! first || { mkdir -p "$SLURMDDP_RUN/checkpoints" && : >"$SLURMDDP_RUN/checkpoints/save" && sleep 300; } ;;
  forget) sleep 300 ;;
  fail) exit 1 ;;
  further) echo "$((SLURMDDP_ATTEMPT < 3 ? SLURMDDP_ATTEMPT : 3))" >"$SLURMDDP_PROGRESS_FILE"; exit 1 ;;
esac
"""

#: A script without slurmddp's library: nothing but the agents tells job.sh that its ranks have failed.
SUMS = """
import datetime, time, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10))
while True:
    dist.all_reduce(torch.ones(1))
    print("a sum of all ranks", flush=True)
    time.sleep(0.5)
"""

#: Steps of a tenth of a second or more, on tensor groups of two ranks.
TENSOR = {
    "train": {
        "steps": 40,
        "model": {"dropout": 0.0},
        "batch": {"global": 24, "micro": 3},
        "optimizer": {"lr": 1e-3},
        "log_every": 1,
    },
    "parallel": {"tensor": 2},
    "checkpoint": {"every_steps": 5},
}


@pytest.fixture(scope="module")
def alice(cluster: Cluster, torch_image: str) -> Alice:
    cluster.write("/home/alice/agent", AGENT, mode=0o755)
    cluster.write("/home/alice/scripts/own.py", "")
    profile = "name: chained\nbases: [testcluster]\nrequeue: chain\n"
    cluster.write("/home/alice/.config/slurmddp/sites/chained.yaml", profile)
    return Alice(cluster, torch_image)


@pytest.fixture(scope="module")
def short(alice: Alice) -> Run:
    """It sleeps into its time limit, of a minute, while other tests run."""
    return pretend(alice, "sleep", minutes=1)


@pytest.fixture(scope="module")
def forgetful(alice: Alice) -> Run:
    """As the one above, but it saves nothing."""
    return pretend(alice, "forget", minutes=1)


@pytest.fixture(scope="module")
def ranks(alice: Alice) -> Run:
    """Four ranks on two nodes. Each start after a kill may take half a minute on a busy machine."""
    return train(alice, "ranks", NO_PREFLIGHT, nodes=2, time=f"{10 + KILLS}m")


@pytest.fixture(scope="module")
def undisturbed(alice: Alice) -> Run:
    run = alice.submit(alice.job_file("undisturbed", resources={"nodes": 2}, **TENSOR))
    run.wait("done", timeout=600)
    return run


def pretend(alice: Alice, wish: str, *settings: str, minutes: int = 5) -> Run:
    """A run of one node whose ranks are the stand-in's."""
    small = ("resources.cpus_per_node=1", "resources.mem_per_node=200M", "recovery.preflight=false")
    if wish == "stop":
        settings = ("recovery.requeue=always", *settings)  # it saves nothing
    own = ("container.runtime=none", "container.python=/home/alice/agent", f"environment.WISH={wish}")
    options = [word for setting in (*small, *own, *settings) for word in ("--set", setting)]
    return alice.submit("scripts/own.py", "--site", "testcluster", "--time", f"{minutes}m", *options)


def train(alice: Alice, name: str, recovery: dict[str, bool] | None = None, **resources: object) -> Run:
    """A run that would go on for hours, with a checkpoint every 10 steps."""
    lasting = {"steps": 100000, "trace_samples": False}
    checkpoint = {"every_steps": 10}
    job = alice.job_file(name, resources=resources, train=lasting, checkpoint=checkpoint, recovery=recovery or {})
    return alice.submit(job)


def fed(run: Run) -> dict[int, list[int]]:
    """The samples of each step, of whichever attempt, as the first ranks of the tensor groups were given them."""
    return {step: sorted(chain(*ranks[::2])) for steps in traces(run).values() for step, ranks in steps.items()}


def batch_host(run: Run) -> str:
    return run.cluster.job(run.job_id)["BatchHost"]


def events(run: Run, name: str) -> list[dict]:
    return [row for row in run.lines("events.jsonl") if row["event"] == name]


def resumed_after(run: Run, since: float, attempt: int) -> dict:
    return run.wait_for_event("resumed", lambda row: row["time"] > since and row["attempt"] == attempt, timeout=150)


def newest(run: Run) -> int:
    """The number of the attempt that runs now: tests of one run may run twice."""
    run.wait_for_event("attempt_started")
    return int(events(run, "attempt_started")[-1]["attempt"])


def end_of(run: Run, attempt: int) -> dict:
    return run.wait_for_event("attempt_ended", lambda row: row["attempt"] == attempt)


def get_further(run: Run) -> None:
    """Wait until the breaker sees progress: faults that come too quickly after each other end the run."""

    def reached() -> bool:
        failures = run.folder / "failures"
        failed = [int(line.split()[1]) for line in failures.read_text().splitlines()] if failures.exists() else []
        progress = run.folder / "progress"  # not there before the first step: this test may be the first of its run
        return progress.exists() and int(progress.read_text().split()[0]) > max(failed, default=-1)

    run.cluster.wait_for(reached, "steps beyond those of the failures", 60)


def end(run: Run) -> None:
    """scancel, and nothing of it is left."""
    run.cluster.run("login", ["scancel", run.job_id])
    run.wait("cancelled")
    run.cluster.wait_for(lambda: not run.processes(), f"no process is left: {run.processes()}", 30)


@pytest.mark.parametrize("times", [3, pytest.param(10, marks=pytest.mark.long)])
def test_requeued_from_the_batch_script_there_is_no_hold(alice: Alice, times: int) -> None:
    runs = [pretend(alice, "stop") for _ in range(times)]
    for run in runs:
        run.wait_for_event("attempt_started")
        # What Slurm sends by itself ahead of the time limit, to the batch script alone.
        alice.cluster.run("login", ["scancel", "--batch", "--signal=USR2", run.job_id])
    for run in runs:
        run.wait("done")
        requeued, (_, again) = run.wait_for_event("requeued"), events(run, "job_started")
        assert (requeued["how"], requeued["reason"]) == ("requeue", "time limit")
        assert events(run, "hold_released") and again["time"] - requeued["time"] < 60, "Slurm's hold is 121 s"


class TestAlone:
    """What job.sh does with the ranks of a script of one's own."""

    def test_three_starts_without_progress_stop_it(self, alice: Alice, short: Run) -> None:
        run = pretend(alice, "fail")
        run.wait("failed")
        assert [row["decision"] for row in events(run, "attempt_ended")] == ["next", "next", "failed"]
        marker = json.loads((run.folder / "markers/attempt-002.json").read_text())
        assert marker["state"] == "no progress"

    @pytest.mark.long
    def test_progress_goes_on(self, alice: Alice) -> None:
        run = pretend(alice, "further")
        run.wait("failed")
        # Steps 0, 1, 2, 3, 3, 3: from the first 3 on, three starts got no further.
        assert (run.folder / "failures").read_text() == "0 0\n1 1\n2 2\n3 3\n4 3\n5 3\n"
        assert len(list((run.folder / "logs").glob("attempt-*/node*.log"))) == 6

    def test_cancel_saves_and_is_final(self, alice: Alice) -> None:
        run = pretend(alice, "stop")
        run.wait_for_event("attempt_started")
        alice.cluster.write(f"{run.answer['run_folder']}/stop", StopRequest(CANCELLED).text())
        (ended,) = [run.wait_for_event("attempt_ended")]
        assert (ended["decision"], ended["cause"]) == ("stopped", "cancelled by the user")
        run.wait_for_event("job_ended")
        assert not events(run, "requeued")

    def test_scancel_is_final(self, alice: Alice) -> None:
        run = pretend(alice, "sleep")
        run.wait_for_event("attempt_started")
        alice.cluster.run("login", ["scancel", run.job_id])
        run.wait("cancelled")
        assert run.wait_for_event("job_ended")["decision"] == "cancelled"
        assert not events(run, "requeued")

    def test_an_operators_requeue_is_no_cancelling(self, alice: Alice) -> None:
        run = pretend(alice, "sleep")
        run.wait_for_event("attempt_started")
        alice.cluster.run("login", ["scontrol", "requeue", run.job_id], user="root")
        run.wait("done")
        run.wait_for_event("job_ended", lambda row: row["decision"] == "done")  # the alerts' end comes in between
        assert [row["decision"] for row in events(run, "job_ended")] == ["requeue", "done"]
        assert len(events(run, "requeued")) == len(events(run, "hold_released")) == 1

    @pytest.mark.parametrize(
        "partition",
        [
            pytest.param("low", marks=pytest.mark.long),
            "low-warned",
            pytest.param("low-cancelled", marks=pytest.mark.long),
        ],
    )
    def test_preempted_it_goes_on(self, alice: Alice, partition: str) -> None:
        """At once, Slurm itself requeues; with a warning, there is time to save; and where Slurm would cancel, too."""
        run = pretend(alice, "stop", f"resources.partition={partition}", "resources.cpus_per_node=4")
        run.wait_for_event("attempt_started")
        here = f"--nodelist={batch_host(run)}"
        alice.cluster.run("login", ["sbatch", "--partition=high", "--exclusive", here, "--wrap=sleep 1"])
        requeued = run.wait_for_event("requeued")
        ended = run.wait_for_event("job_ended")
        if partition == "low":
            assert ended["signal"] == "TERM"
        else:
            assert requeued["reason"] == "preemption" and not ended["signal"]
        run.wait("done")
        (_, again) = events(run, "job_started")
        assert again["time"] - requeued["time"] < 60, "Slurm's hold, where it sets one, is 121 s"

    @pytest.mark.long
    def test_where_requeues_are_forbidden_a_chained_job_goes_on(self, alice: Alice) -> None:
        run = pretend(alice, "stop", "site=chained")
        run.wait_for_event("attempt_started")
        alice.cluster.run("login", ["scancel", "--batch", "--signal=USR2", run.job_id])
        requeued = run.wait_for_event("requeued")
        assert requeued["how"] == "chain" and requeued["next_job"] != run.job_id
        ended = run.wait_for_event("job_ended", lambda row: row["job_id"] == requeued["next_job"])
        assert (ended["decision"], ended["attempt"]) == ("done", 1)

    def test_a_run_longer_than_its_time_limit_goes_on_until_it_is_done(self, short: Run) -> None:
        short.wait("done", timeout=150)
        requeued = short.wait_for_event("requeued")
        assert requeued["reason"] == "time limit"
        assert short.wait_for_event("job_ended")["signal"] == "TERM"

    def test_a_script_that_saves_nothing_is_not_requeued_at_its_time_limit(self, forgetful: Run) -> None:
        forgetful.wait("stopped", timeout=150)
        assert not events(forgetful, "requeued")
        ended = forgetful.wait_for_event("attempt_ended")
        assert ended["cause"].startswith("time limit; the script saved nothing in ")
        assert ended["not_requeued"] in forgetful.status()[1]["detail"]


class TestRanks:
    """One run of four ranks: any of them is killed, on any node; then an agent."""

    def test_a_killed_rank_restarts_in_place(self, ranks: Run) -> None:
        run, dice = ranks, random.Random(SEED)
        run.wait_for_step(20)
        attempt = newest(run)
        failures = run.folder / "failures"
        before = len(failures.read_text().splitlines()) if failures.exists() else 0
        for rank in (0, *(dice.randrange(4) for _ in range(KILLS - 1))):
            time.sleep(dice.random())
            ((node, process, _),) = run.processes(f"RANK={rank}")
            now = time.time()
            run.cluster.run(node, ["kill", "-KILL", str(process)])
            resumed = resumed_after(run, now, attempt)
            saved = run.wait_for_event("checkpoint_saved", lambda row, after=resumed["time"]: row["time"] > after)
            assert saved["step"] > resumed["step"] > 0, f"seed {SEED}"
        assert len(failures.read_text().splitlines()) == before + KILLS

    def test_a_killed_agent_is_started_again_where_it_was(self, ranks: Run) -> None:
        run, attempt = ranks, newest(ranks)
        node = random.Random(SEED).choice(events(run, "attempt_started")[0]["nodes"].split())
        agents = [one for one in run.processes() if one[0] == node and "-m slurmddp.runtime.agent" in one[2]]
        now = time.time()
        run.cluster.run(node, ["kill", "-KILL", *(str(process) for _, process, _ in agents)])
        assert resumed_after(run, now, attempt + 1)["step"] > 0
        ended, started = end_of(run, attempt), events(run, "attempt_started")
        assert (ended["node"], ended["cause"]) == (node, "the torchrun agent: Killed")
        assert started[-2]["nodes"] == started[-1]["nodes"]

    def test_a_sigterm_that_nobody_asked_for_is_a_fault(self, ranks: Run) -> None:
        """As of earlyoom: the ranks save, and start again where they were."""
        run, attempt = ranks, newest(ranks)
        get_further(run)
        now = time.time()
        rank = random.Random(SEED).randrange(4)
        ((node, process, _),) = run.processes(f"RANK={rank}")
        run.cluster.run(node, ["kill", "-TERM", str(process)], user="root")
        assert resumed_after(run, now, attempt + 1)["step"] > 0
        ended = end_of(run, attempt)
        assert (ended["rank"], ended["node"], ended["decision"]) == (rank, node, "next")
        assert ended["cause"].startswith("SIGTERM that neither Slurm nor the user sent")

    @pytest.mark.long  # test_alerts.py kills one, too
    def test_a_killed_job_script_is_requeued(self, ranks: Run) -> None:
        """With all of its step, as where cgroups track processes. Slurm ends the job, and asks the ranks to stop."""
        run, attempt = ranks, newest(ranks)
        get_further(run)
        now = time.time()
        run.cluster.run("login", ["scancel", "--batch", "--signal=KILL", run.job_id])
        requeued = run.wait_for_event("requeued", lambda row: row["time"] > now)
        assert "job.sh was killed by SIGKILL" in requeued["reason"]
        ended = run.wait_for_event("job_ended", lambda row: row["time"] > now)
        assert (ended["signal"], ended["decision"]) == ("KILL", "requeue")
        run.wait(
            "running"
        )  # where cgroups track processes, what ends Slurm's hold died with the job: the next command does
        assert resumed_after(run, now, attempt + 1)["step"] > 0

    def test_starts_that_die_before_our_program_are_counted(self, ranks: Run) -> None:
        """The code is gone, as after a purge of scratch and of the nodes' /tmp; then a rank is killed."""
        run, attempt = ranks, newest(ranks)
        get_further(run)
        ((node, process, _),) = run.processes("RANK=1")
        (run.folder / "code").rename(run.folder / "code.gone")
        for each in events(run, "attempt_started")[-1]["nodes"].split():
            run.cluster.sh(each, "rm -r /tmp/slurmddp-1000/*/code", user="root")
        run.cluster.run(node, ["kill", "-KILL", str(process)])
        status = run.wait("failed", timeout=90)
        assert "copy of the code is gone" in status["cause"]
        cause = end_of(run, attempt)["cause"]
        assert "the ranks could not start" in cause and "No module named 'slurmddp'" in cause
        folders = run.folder.glob(f"logs/attempt-{attempt:03d}/torchrun/*/*/*")
        starts = max(int(path.name.rpartition("_")[2]) for path in folders)
        assert starts < 15, "in 10 s"
        run.cluster.wait_for(lambda: not run.processes(), f"no process is left: {run.processes()}", 30)


class TestNodes:
    """A run that can lose nodes. (The batch host: test_faults.py.)"""

    def test_a_lost_node_is_replaced_by_the_spare(self, alice: Alice, fresh_cluster: Cluster) -> None:
        run = train(alice, "spare", nodes={"min": 1, "max": 2, "spares": 1}, **ONE_RANK_A_NODE)
        run.wait_for_step(20)
        before = events(run, "attempt_started")[0]["nodes"].split()
        (lost,) = [node for node in before if node != batch_host(run)]
        now = time.time()
        fresh_cluster.kill_host(lost)
        try:
            assert resumed_after(run, now, attempt=1)["step"] > 0
            after = events(run, "attempt_started")[1]["nodes"].split()
            assert len(after) == 2 and lost not in after
            assert run.wait_for_event("node_excluded")["excluded"] == lost
            assert run.wait_for_event("attempt_ended")["node"] == lost
            assert not (run.folder / "failures").exists(), "the run is not at fault"
            assert run.cluster.job(run.job_id)["Restarts"] == "0"
        finally:
            fresh_cluster.restart_host(lost)
            end(run)
            fresh_cluster.wait_nodes()

    @pytest.mark.long
    @pytest.mark.parametrize("nodes", [{"min": 2, "max": 2, "spares": 1}, {"min": 1, "max": 2}], ids=["spare", "fewer"])
    def test_a_lost_tensor_group_changes_no_loss(
        self, alice: Alice, fresh_cluster: Cluster, undisturbed: Run, nodes: dict[str, int]
    ) -> None:
        """Each node is a tensor group of two ranks. On the other mesh, gradients are added up in another order."""
        run = alice.submit(alice.job_file("tensor", resources={"nodes": nodes}, **TENSOR))
        before = run.wait_for_event("attempt_started")["nodes"].split()
        (lost,) = [node for node in before if node != batch_host(run)]
        wait_for_step(run, 12)
        now = time.time()
        fresh_cluster.kill_host(lost)
        try:
            assert resumed_after(run, now, attempt=1)["step"] >= 10
            run.wait("done", timeout=600)
        finally:
            fresh_cluster.restart_host(lost)
            fresh_cluster.wait_nodes()
        after = events(run, "attempt_started")[-1]["nodes"].split()
        assert len(after) == nodes["min"] and lost not in after
        assert events(run, "started")[-1]["parallel"] == ("TP" if len(after) == 1 else "DDP+TP")
        assert fed(run) == fed(undisturbed)
        ours, theirs = ({row["step"]: row for row in each.metrics()} for each in (run, undisturbed))
        assert ours.keys() == theirs.keys() == set(range(1, 41))
        for step, row in theirs.items():
            for fact in ("loss", "grad_norm", "samples"):
                assert ours[step][fact] == pytest.approx(row[fact], rel=1e-5 if len(after) == 1 else 0), (step, fact)
        weights, wanted = tensors(run, 40), tensors(undisturbed, 40)
        assert weights.keys() == wanted.keys()
        for name, value in wanted.items():
            apart = (weights[name] - value).norm()
            assert apart <= (1e-4 * value.norm() if len(after) == 1 else 0), name

    @pytest.mark.long
    @pytest.mark.parametrize("nodes", [{"min": 2, "max": 2, "spares": 1}, {"min": 1, "max": 2}])
    def test_nodes_that_lose_sight_of_each_other_are_parted(
        self, alice: Alice, fresh_cluster: Cluster, nodes: dict[str, int]
    ) -> None:
        """Slurm reaches both. The agents would wait for each other for ten minutes."""
        lasting = {"train": {"steps": 100000, "trace_samples": False}, "checkpoint": {"every_steps": 10}}
        hang = {"timeouts": {"hang": "5s", "collective": "60s"}}
        run = alice.submit(alice.job_file("parted", resources={"nodes": nodes, **ONE_RANK_A_NODE}, **lasting, **hang))
        run.wait_for_step(20)
        began = run.wait_for_event("attempt_started")
        before = began["nodes"].split()
        fresh_cluster.part(*before)
        try:
            # About a minute on an idle machine; the agents alone would need ten.
            run.wait_for_event("first_step", lambda row: row["attempt"] > 0, timeout=240)
            after = events(run, "attempt_started")[-1]["nodes"].split()
            assert len(set(before) & set(after)) == 1 and len(after) == nodes["min"]
            assert "the ranks did not restart within" in run.wait_for_event("attempt_ended")["cause"]
            assert run.wait_for_event("node_excluded")["excluded"] in before
        finally:
            end(run)

    @pytest.mark.long
    def test_nodes_of_an_own_script_that_lose_sight_of_each_other_are_parted(
        self, alice: Alice, fresh_cluster: Cluster
    ) -> None:
        """Slurm reaches both. Nothing tells of the ranks but their agents, which would wait for ten minutes."""
        fresh_cluster.write("/home/alice/scripts/sums.py", SUMS)
        small = [word for key, value in ONE_RANK_A_NODE.items() for word in ("--set", f"resources.{key}={value}")]
        options = ("--site", "testcluster", "--image", alice.image, "--nodes", "2+1", "--time", "10m", *small)
        run = alice.submit("scripts/sums.py", *options)

        def added() -> int:
            """In how many attempts the ranks have met. One may end with its check of the nodes."""
            told = {path.parent for path in run.folder.glob("logs/*/*.log") if "a sum of all ranks" in path.read_text()}
            return len(told)

        try:
            fresh_cluster.wait_for(lambda: added() == 1, "the ranks have met", 120)
            before = run.wait_for_event("attempt_started")["nodes"].split()
            fresh_cluster.part(*before)
            fresh_cluster.wait_for(lambda: added() == 2, "the ranks have met again", 240)
            after = events(run, "attempt_started")[-1]["nodes"].split()
            assert len(set(before) & set(after)) == 1 and len(after) == 2
            assert "the ranks did not restart within" in run.wait_for_event("attempt_ended")["cause"]
            assert run.wait_for_event("node_excluded")["excluded"] in before
        finally:
            end(run)

    @pytest.mark.long
    def test_where_requeues_are_forbidden_a_chained_job_follows_a_lost_node(
        self, alice: Alice, fresh_cluster: Cluster
    ) -> None:
        """Of two runs at once: one needs all its nodes, the other one's script was on the node that is lost."""
        places = (("2", "node3"), ("1-2", "node1"))
        runs = [
            pretend(
                alice,
                "sleep",
                "site=chained",
                f"resources.nodes={nodes}",
                f"resources.sbatch_extra=[--exclude={without}]",
            )
            for nodes, without in places
        ]
        for run in runs:
            run.wait_for_event("attempt_started")
        assert [batch_host(run) for run in runs] == ["node1", "node2"]
        time.sleep(6)  # the guards have begun
        fresh_cluster.kill_host("node2")
        try:
            for run, reason in zip(runs, ("node failure", "node2: Slurm lost the node, which ran job.sh"), strict=True):
                requeued = run.wait_for_event("requeued", timeout=120)
                assert (requeued["how"], requeued["reason"]) == ("chain", reason)
        finally:
            fresh_cluster.restart_host("node2")
            fresh_cluster.wait_nodes()
        for run in runs:
            (requeued,) = events(run, "requeued")
            ended = run.wait_for_event("job_ended", lambda row, job=requeued["next_job"]: row["job_id"] == job, 120)
            assert (ended["decision"], ended["attempt"]) == ("done", 1)
