"""`resources.ranks_per_node: auto`: nodes that may differ, and what the plan can then still say."""

import json

import pytest

from slurmddp.errors import UserError
from slurmddp.job.plan.model import Allocation
from slurmddp.render.documents import job_json, job_yaml
from tests.helpers import GPU_SITE, LM_JOB, Desk, plan_of, refusal, shape

AUTO = "resources.ranks_per_node=auto"
BATCH = ("train.batch.global=64", "train.batch.micro=4")
CORES = "site: cores\ntrain: {script: a.py}\n"


def refused(desk: Desk, job: str, *options: str) -> str:
    with pytest.raises(UserError) as caught:
        desk.plan(job, *options)
    return refusal(caught.value)


def flags(desk: Desk, job: str, *options: str) -> list[str]:
    wanted = ("--gpus", "--gres", "--exclusive", "--mem", "--cpus-per-task")
    return [line for line in desk.plan(job, AUTO, *options).sbatch if line.startswith(wanted)]


def test_nodes_with_gpus_are_asked_for_whole(desk: Desk) -> None:
    plan = desk.plan(LM_JOB, AUTO, "resources.nodes=2", *BATCH)
    assert shape(plan) == (2, 1, None, None, 0, 1)
    assert plan.nodes.world is None
    assert flags(desk, LM_JOB, *BATCH) == ["--gpus-per-node=1", "--mem=0", "--exclusive"]
    # A kind of node that the profile does not know: the nodes will.
    assert flags(desk, LM_JOB, "resources.partition=other", *BATCH) == ["--gpus-per-node=1", "--mem=0", "--exclusive"]


def test_what_the_job_says_itself_is_left_to_it(desk: Desk) -> None:
    assert flags(desk, LM_JOB, "resources.gpus_per_node=2", "resources.mem_per_node=8G", *BATCH) == [
        "--gpus-per-node=2", "--mem=8192M", "--exclusive",
    ]  # fmt: skip
    assert flags(desk, LM_JOB, "resources.sbatch_extra=[--gpus=3]", "resources.cpus_per_node=8", *BATCH) == [
        "--cpus-per-task=8", "--gpus=3",
    ]  # fmt: skip
    assert flags(desk, LM_JOB, "resources.exclusive=false", *BATCH) == ["--gpus-per-node=1"]


def test_a_site_that_rejects_whole_nodes(desk: Desk) -> None:
    desk.site(GPU_SITE.replace("gpu_request: gpus-per-node", "gpu_request: gres\nunsupported_flags: [--exclusive]"))
    assert "rejects --exclusive, which ranks_per_node: auto" in refused(desk, LM_JOB, AUTO, *BATCH)
    assert flags(desk, LM_JOB, "resources.sbatch_extra=[--gpus=3]", *BATCH) == ["--gpus=3"]


def test_a_slurm_that_does_not_count_gpus(desk: Desk) -> None:
    desk.site(GPU_SITE.replace("gpus-per-node", "none"))
    shown = refused(desk, LM_JOB, AUTO, *BATCH)
    assert "does not count GPUs" in shown and "--set resources.ranks_per_node" in shown


def test_ranks_on_the_cores_of_whole_nodes(desk: Desk) -> None:
    plan = desk.plan(CORES, AUTO, "resources.nodes=3")
    assert shape(plan) == (3, 0, None, None, 0, 8)
    assert flags(desk, CORES) == ["--mem=0", "--exclusive"]
    assert desk.plan(CORES, AUTO, "environment.OMP_NUM_THREADS=2").layout.threads_per_rank == 2
    assert desk.plan(CORES, AUTO, "environment.OMP_NUM_THREADS=many").layout.threads_per_rank == 8


def test_cores_that_the_job_names_are_known_here(desk: Desk) -> None:
    assert shape(desk.plan(CORES, AUTO, "resources.cpus_per_node=16")) == (1, 0, 2, 16, None, 8)
    few = desk.plan(CORES, AUTO, "resources.cpus_per_node=6", "environment.OMP_NUM_THREADS=2")
    assert shape(few) == (1, 0, 3, 6, None, 2)
    assert desk.plan(CORES, AUTO, "resources.cpus_per_node=3").nodes.ranks_per_node == 1


def test_this_machine_is_known(desk: Desk) -> None:
    assert desk.plan("site: here\ntrain: {script: a.py}\n", AUTO).nodes.ranks_per_node == 1


def test_limits_hold_as_elsewhere(desk: Desk) -> None:
    assert "65 cores per node are more than the 64" in refused(desk, LM_JOB, AUTO, "resources.cpus_per_node=65", *BATCH)
    assert "5 GPUs per node are more than the 4" in refused(desk, LM_JOB, AUTO, "resources.gpus_per_node=5", *BATCH)


def test_an_allocation_is_taken_whole(desk: Desk) -> None:
    resolved = desk.resolve(LM_JOB, AUTO, "resources.nodes=2", *BATCH)
    plan = plan_of(resolved, desk.project, inside=True, allocation=Allocation(2, 8))
    assert shape(plan) == (2, 1, None, None, None, 1)
    with pytest.raises(UserError, match="uses all GPUs of the current allocation, which has 3 nodes"):
        plan_of(resolved, desk.project, inside=True, allocation=Allocation(3, 8))


def test_accumulation_follows_on_the_nodes(desk: Desk) -> None:
    plan = desk.plan(LM_JOB, AUTO, *BATCH)
    assert plan.batch is not None and plan.batch == (64, 4, None, None)
    assert json.loads(job_json(plan, "id") or "")["batch"]["global"] == 64
    few = desk.plan(LM_JOB, AUTO, "train.batch.global=4").batch
    assert few is not None and few.micro == 4
    assert desk.plan(LM_JOB.replace("task: lm", "script: a.py").replace("  data: {path: /data/books}\n", ""), AUTO)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("train.batch.micro=4", "batch.global is not set"),
        ("train.batch={global: 64, accumulation: 2}", "accumulation cannot be chosen"),
        ("train.batch={micro: 4, accumulation: 2}", "accumulation cannot be chosen"),
        (
            "train.batch={global: 64, even: true}",
            "batch.even is true, but only the running job knows its ranks",
        ),
    ],
)
def test_what_would_need_the_number_of_ranks_is_refused(desk: Desk, option: str, message: str) -> None:
    job = LM_JOB if "{" not in option else LM_JOB + f"  batch: {option.partition('=')[2]}\n"
    options = (AUTO, option) if "{" not in option else (AUTO,)
    shown = refused(desk, job, *options)
    assert message in shown and "train.batch" in shown


def test_weights_leave_accumulation_to_the_nodes(desk: Desk) -> None:
    weights = LM_JOB + "  batch: {micro: 4, weights: {node1*: 2, '*A100*': 1.5}}\n"
    assert desk.plan(weights).batch == (16, 4, None, None)
    assert json.loads(job_json(desk.plan(weights), "id") or "")["batch"]["weights"] == {"node1*": 2.0, "*A100*": 1.5}
    even = weights.replace("micro: 4", "micro: 4, even: true")
    assert "batch.even is true, but batch.weights make the shares uneven" in refused(desk, even)


@pytest.mark.parametrize("value", ["0", "1025", "x", "Auto", "1.5", "-1", "9" * 5000, "true", "[1]"])
def test_neither_a_number_nor_auto(desk: Desk, value: str) -> None:
    shown = refused(desk, LM_JOB + f"resources: {{ranks_per_node: {value}}}\n")
    assert "must be a whole number from 1 to 1024, or auto" in shown


def test_auto_reads_back_from_the_resolved_job(desk: Desk) -> None:
    resolved = desk.resolve(LM_JOB, AUTO, *BATCH)
    plan = plan_of(resolved, desk.project)
    again = desk.resolve(job_yaml(resolved, plan))
    assert again.job.resources == resolved.job.resources
    assert plan_of(again, desk.project).nodes == plan.nodes
    assert plan_of(again, desk.project).layout == plan.layout


@pytest.mark.parametrize("nodes", ["2-4", "4+1"])
def test_nodes_that_may_be_fewer_need_a_number_of_ranks(desk: Desk, nodes: str) -> None:
    assert "set a fixed number of nodes" in refused(desk, LM_JOB, AUTO, f"resources.nodes={nodes}", *BATCH)
    assert desk.plan(CORES, AUTO, f"resources.nodes={nodes}").nodes.elastic, "cores are each node's own"
