"""Nodes, GPUs, ranks, cores, memory and time against what the partition has."""

import pytest

from slurmddp.errors import UserError
from slurmddp.job.plan.model import Allocation
from tests.helpers import GPU_SITE, LM_JOB, Desk, plan_of, refusal, shape

CORES = "site: cores\ntrain: {script: a.py}\n"


def refused(desk: Desk, job: str, *options: str) -> str:
    with pytest.raises(UserError) as caught:
        desk.plan(job, *options)
    return refusal(caught.value)


def notes(desk: Desk, *options: str) -> list[str]:
    return [note.text for note in desk.plan(LM_JOB, *options).notes]


def test_the_partition_s_own_values_are_the_default(desk: Desk) -> None:
    assert shape(desk.plan(LM_JOB, "resources.nodes=2")) == (2, 4, 4, 64, 480 * 1024, 16)
    assert shape(desk.plan(LM_JOB, "resources.partition=large")) == (1, 8, 8, 128, None, 16)


def test_a_part_of_a_node_gets_its_part_of_cores_and_memory(desk: Desk) -> None:
    assert shape(desk.plan(LM_JOB, "resources.gpus_per_node=1")) == (1, 1, 1, 16, 120 * 1024, 16)


def test_what_the_job_says_goes_first(desk: Desk) -> None:
    options = ("resources.gpus_per_node=2", "resources.cpus_per_node=10", "resources.mem_per_node=64G")
    assert shape(desk.plan(LM_JOB, *options)) == (1, 2, 2, 10, 65536, 5)


def test_ranks_on_cores(desk: Desk) -> None:
    assert shape(desk.plan(CORES)) == (1, 0, 1, 16, None, 16)
    assert shape(desk.plan(CORES, "resources.ranks_per_node=4", "resources.nodes=3")) == (3, 0, 4, 16, None, 4)
    assert desk.plan(CORES, "resources.ranks_per_node=32").layout.threads_per_rank == 1
    assert desk.plan(CORES, "resources.ranks_per_node=2").nodes.world == 2


def test_a_run_on_the_cores_of_a_gpu_node(desk: Desk) -> None:
    assert shape(desk.plan(LM_JOB, "resources.gpus_per_node=0")) == (1, 0, 1, 64, 480 * 1024, 64)


def test_a_partition_that_the_profile_does_not_know(desk: Desk) -> None:
    assert "has no partition other\n  -> use one of main, large" in refused(desk, LM_JOB, "resources.partition=other")
    found = desk.plan(LM_JOB, "resources.partition=other", "resources.gpus_per_node=2")
    assert shape(found) == (1, 2, 2, None, None, 1)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("resources.gpus_per_node=5", "5 GPUs per node are more than the 4 of partition main of site gpus"),
        ("resources.cpus_per_node=65", "65 cores per node are more than the 64 of partition main"),
        ("resources.mem_per_node=481G", "more than the 480G of partition main"),
        ("resources.time=25h", "1-01:00:00 is above the limit 1-00:00:00 of partition main"),
        ("resources.nodes=65", "65 nodes are more than the 64 per job that partition main"),
        ("resources.ranks_per_node=8", "8 ranks share 4 GPUs"),
    ],
)
def test_more_than_the_partition_has_is_refused_with_its_place(desk: Desk, option: str, message: str) -> None:
    shown = refused(desk, LM_JOB, option)
    assert message in shown
    assert f"--set {option.split('=')[0]}: " in shown


def test_the_limits_themselves_are_allowed(desk: Desk) -> None:
    options = ("gpus_per_node=4", "cpus_per_node=64", "mem_per_node=480G", "time=1-00:00:00", "nodes=64")
    assert desk.plan(LM_JOB, *(f"resources.{option}" for option in options)).nodes.world == 256


def test_gpus_at_a_site_that_has_none(desk: Desk) -> None:
    assert "site cores has no GPUs" in refused(desk, CORES, "resources.gpus_per_node=1")
    assert desk.plan(CORES, "resources.gpus_per_node=0").layout.gpus_per_node == 0


def test_one_machine_is_one_node(desk: Desk) -> None:
    assert "runs on this machine only, not on 2 nodes" in refused(
        desk, "site: here\ntrain: {script: a.py}\n", "resources.nodes=2"
    )


def test_fewer_nodes_are_faster_where_the_gpus_fit(desk: Desk) -> None:
    told = notes(desk, "resources.nodes=4", "resources.gpus_per_node=1")
    assert any("4 GPUs fit on 1 node of 4: using" in text for text in told)


@pytest.mark.parametrize("options", [("nodes=2", "gpus_per_node=3"), ("nodes=4",), ("gpus_per_node=1",)])
def test_no_such_note_where_no_node_is_saved(desk: Desk, options: tuple[str, ...]) -> None:
    assert not any("fewer nodes" in text for text in notes(desk, *(f"resources.{option}" for option in options)))


def test_gpus_without_a_rank_are_told(desk: Desk) -> None:
    assert "3 of 4 GPUs per node are unused: they get no rank" in notes(desk, "resources.ranks_per_node=1")


def test_an_allocation_bounds_nodes_and_cores(desk: Desk) -> None:
    resolved = desk.resolve(LM_JOB, "resources.nodes=2")
    plan = plan_of(resolved, desk.project, inside=True, allocation=Allocation(2, 8))
    assert (plan.nodes.max, plan.layout.cpus_per_node, plan.layout.mem_per_node) == (2, 8, None)
    with pytest.raises(UserError, match=r"has 1 node\(s\), the job needs 2"):
        plan_of(resolved, desk.project, inside=True, allocation=Allocation(1, 8))
    with pytest.raises(UserError, match="16 cores per node are more than the 8 of the current allocation"):
        resolved = desk.resolve(LM_JOB, "resources.cpus_per_node=16")
        plan_of(resolved, desk.project, inside=True, allocation=Allocation(2, 8))


def test_all_memory_of_whole_nodes(desk: Desk) -> None:
    desk.site(GPU_SITE.replace("name: gpus", "name: mine").replace("mem_per_node: 480G", "mem_per_node: all"))
    job = LM_JOB.replace("gpus", "mine")
    assert "--mem=0" in desk.plan(job).sbatch
    assert "--mem=65536M" in desk.plan(job, "resources.mem_per_node=64G").sbatch
    part = desk.plan(job, "resources.gpus_per_node=2").sbatch
    assert not any(line.startswith("--mem") for line in part), "the rest of the node is another job's"
