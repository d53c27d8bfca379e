"""What `slurmddp check` shows of ranks that share something, and of what is not known yet."""

from slurmddp.report.plan import plan_report
from slurmddp.shared import mesh
from tests.helpers import LM_JOB, Desk, plan_of


def report(desk: Desk, job: str, *options: str) -> list[str]:
    resolved = desk.resolve(job, *options)
    return plan_report(plan_of(resolved, desk.project), resolved).splitlines()


def line(lines: list[str], start: str) -> str:
    (found,) = [text for text in lines if text.startswith(start)]
    return found.removeprefix(start).strip()


def test_groups_of_replicas_and_shards(desk: Desk) -> None:
    lines = report(desk, LM_JOB, "resources.nodes=2", "parallel.shard=4")
    assert line(lines, "parallel").startswith("HSDP: replicate 2 x shard 4")
    assert line(lines, "shard groups") == "0-3 | 4-7 (each inside a node)"
    assert line(lines, "replicate groups") == "0,4 | 1,5 | 2,6 | 3,7 (each across nodes)"


def test_they_are_those_of_the_runtime(desk: Desk) -> None:
    lines = report(desk, LM_JOB, "resources.nodes=1", "parallel.shard=2")
    groups = mesh.groups({"replicate": 2, "shard": 2})
    for name in ("shard", "replicate"):
        shown = line(lines, f"{name} groups").split(" (")[0].split(" | ")
        assert tuple(tuple(map(int, group.split(","))) for group in shown) == groups[name]


def test_one_group_of_shards(desk: Desk) -> None:
    lines = report(desk, LM_JOB, "resources.nodes=2", "parallel.shard=8")
    assert line(lines, "parallel").startswith("FSDP: replicate 1 x shard 8")
    assert line(lines, "shard groups") == "0-7 (across nodes)"
    assert not [text for text in lines if text.startswith("replicate groups")]
    assert any(text.startswith("note: shard groups of 8 ranks cross nodes of 4") for text in lines)


def test_shards_of_which_some_stay_inside(desk: Desk) -> None:
    lines = report(desk, LM_JOB, "resources.nodes=3", "parallel.shard=6", "resources.ranks_per_node=4")
    assert line(lines, "shard groups") == "0-5 | 6-11 (each across nodes)"
    lines = report(desk, LM_JOB, "resources.nodes=3", "parallel.shard=3")
    assert line(lines, "shard groups") == "0-2 | 3-5 | 6-8 | 9-11 (2 of 4 inside a node, the others across nodes)"


def test_a_large_world_is_short(desk: Desk) -> None:
    lines = report(desk, LM_JOB, "resources.nodes=64", "parallel.shard=4")
    assert line(lines, "shard groups") == "0-3 | 4-7 | 8-11 | 12-15 | ... 64 in all (each inside a node)"
    assert line(lines, "replicate groups").startswith("0,4,...,252 | 1,5,...,253 | ")
    assert max(map(len, lines)) < 200


def test_replicas_alone_are_one_line(desk: Desk) -> None:
    lines = report(desk, LM_JOB, "resources.nodes=2")
    assert line(lines, "parallel") == "DDP: every rank holds the whole model"
    assert not [text for text in lines if "groups" in text]
    script = LM_JOB.replace("task: lm", "script: a.py").replace("  data: {path: /data/books}\n", "")
    assert not [text for text in report(desk, script) if text.startswith("parallel")]


def test_ranks_that_only_the_nodes_know(desk: Desk) -> None:
    options = ("resources.ranks_per_node=auto", "resources.nodes=2", "train.batch.global=64", "train.batch.micro=4")
    lines = report(desk, LM_JOB, *options, "resources.time=1h")
    assert line(lines, "ranks") == "auto: a node starts one for each GPU that Slurm gives the node"
    assert line(lines, "global batch") == ("64, micro batch up to 4; accumulation follows from the ranks found")
    assert line(lines, "cost:") == "up to 2 node-hours (2 nodes, as many as Slurm gives, x 01:00:00)"
    assert not [text for text in lines if "None" in text]


def test_one_machine_and_one_node(desk: Desk) -> None:
    lines = report(desk, LM_JOB.replace("gpus", "here"), "resources.ranks_per_node=2")
    assert line(lines, "cores per node").startswith("all of this machine, ")
    options = ("resources.ranks_per_node=2", "train.batch.global=64", "train.batch.micro=4")
    lines = report(desk, LM_JOB.replace("gpus", "here"), *options)
    assert line(lines, "  more ranks per node 1 node x 4 =").startswith("4 ranks, ")


def test_a_warmup_that_does_not_end(desk: Desk) -> None:
    note = "note: train.schedule.warmup 11 is longer than train.steps 10: lr never reaches its peak"
    assert note in report(desk, LM_JOB, "train.schedule.warmup=11", "train.steps=10")
    assert not [text for text in report(desk, LM_JOB, "train.schedule.warmup=10", "train.steps=10") if "warmup" in text]


def test_weights_are_one_line(desk: Desk) -> None:
    lines = report(desk, LM_JOB + "  batch: {micro: 4, weights: {node1*: 2, '*A100*': 1.5}}\n")
    assert (
        line(lines, "share of a rank") == "node1* 2, *A100* 1.5, all others 1 (patterns match the node or device name)"
    )
    assert line(lines, "global batch").endswith("accumulation follows from the largest share")


def test_what_the_ranks_run_in(desk: Desk) -> None:
    bare = "container.runtime=none"
    for setup, text in (
        (["source '/home/a/my venv/bin/activate'"], "virtual environment /home/a/my venv, no container"),
        (["source /c/conda.sh", "conda activate torch"], "conda environment torch, no container"),
        (["module load x"], "python3, no container"),
    ):
        lines = report(desk, LM_JOB, bare, f"setup={setup}")
        assert line(lines, "runs in") == text
