"""`parallel: {replicate, shard}` against the ranks, and shards against nodes."""

import pytest

from slurmddp.errors import UserError
from tests.helpers import LM_JOB, Desk, refusal

SCRIPT = "site: gpus\ntrain: {script: a.py}\n"


def refused(desk: Desk, job: str, *options: str) -> str:
    with pytest.raises(UserError) as caught:
        desk.plan(job, *options)
    return refusal(caught.value)


def crossing(desk: Desk, *options: str) -> list[str]:
    return [note.text for note in desk.plan(LM_JOB, *options).notes if "cross nodes" in note.text]


@pytest.mark.parametrize(
    ("options", "key", "message", "fits"),
    [
        (("nodes=3", "shard=5"), "shard", "12 ranks cannot be divided into groups of 5", "1, 2, 3, 4, 6 or 12"),
        (("nodes=2", "shard=16"), "shard", "8 ranks cannot be divided into groups of 16", "1, 2, 4 or 8"),
        (("nodes=3", "shard=4", "replicate=2"), "replicate", "replicate 2 x shard 4 is 8", "remove replicate"),
        (("nodes=1", "replicate=3"), "replicate", "replicate 3 x shard 1 is 3", "1, 2 or 4"),
        (("nodes=60", "shard=7"), "shard", "240 ranks", "1, 2, 3, 4, 5, 6, 8, ... or 240"),
    ],
)
def test_what_does_not_make_up_the_ranks(
    desk: Desk, options: tuple[str, ...], key: str, message: str, fits: str
) -> None:
    nodes, *rest = options
    shown = refused(desk, LM_JOB, f"resources.{nodes}", *(f"parallel.{option}" for option in rest))
    assert message in shown and fits in shown
    assert shown.startswith(f"--set parallel.{key}: {message.split(' ')[0]}")


@pytest.mark.parametrize(
    "options", [("shard=4",), ("shard=8", "replicate=1"), ("replicate=8",), ("shard=2", "replicate=4")]
)
def test_what_does(desk: Desk, options: tuple[str, ...]) -> None:
    assert desk.plan(LM_JOB, "resources.nodes=2", *(f"parallel.{option}" for option in options))


def test_a_script_of_one_s_own_is_not_sharded(desk: Desk) -> None:
    assert "your own script must wrap its model itself" in refused(desk, SCRIPT, "parallel.shard=2")
    assert desk.plan(SCRIPT, "parallel.shard=1")


@pytest.mark.parametrize(
    ("options", "message", "fits"),
    [
        (("tensor=3",), "would cross nodes: 3 does not divide 4 ranks per node", "1, 2 or 4"),
        (("tensor=8",), "would cross nodes: 8 does not divide 4 ranks per node", "1, 2 or 4"),
        (("tensor=4", "heads=6", "width=12"), "4 does not divide train.model.heads 6", "use 1 or 2"),
        (("tensor=2", "context=9"), "2 does not divide train.data.context 9", "use 1,"),
        (("tensor=2", "vocabulary=50257"), "2 does not divide train.model.vocabulary 50257", "change the model"),
        (("tensor=2", "ranks_per_node=auto", "global=8"), "with ranks_per_node: auto they may differ", "to a number"),
        (("tensor=2", "shard=3"), "4 groups of tensor 2 cannot be divided into groups of 3", "shard 1, 2 or 4"),
        (("tensor=2", "shard=2", "replicate=4"), "replicate 4 x shard 2 x tensor 2 is 16", "remove replicate"),
        (("tensor=2", "shard=4", "nodes=1-2"), "parallel.shard 4 x tensor 2 does not divide", "resources.nodes"),
        (("pipeline=2",), "unknown key", "needs your own script"),
    ],
)
def test_what_no_tensor_group_can_be(desk: Desk, options: tuple[str, ...], message: str, fits: str) -> None:
    given = {"resources.nodes": "2"}
    for option in options:
        key, _, value = option.partition("=")
        model = {"heads": "train.model", "width": "train.model", "vocabulary": "train.model", "context": "train.data"}
        other = {"nodes": "resources", "ranks_per_node": "resources", "global": "train.batch"}
        given[f"{(model | other).get(key, 'parallel')}.{key}"] = value
    shown = refused(desk, LM_JOB, *(f"{key}={value}" for key, value in given.items()))
    assert message in shown and fits in shown
    assert shown.startswith("--set parallel.")


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (SCRIPT, "your own script must wrap its model itself"),
        ("site: gpus\ntrain: {task: images, data: {path: a}}\n", "works only with the task lm, not images"),
        ("site: gpus\ntrain: {task: 'my.tasks:own'}\n", "works only with the task lm, not my.tasks:own"),
    ],
)
def test_only_lm_has_tensor_groups(desk: Desk, job: str, said: str) -> None:
    assert said in refused(desk, job, "parallel.tensor=2", "resources.nodes=1", "resources.ranks_per_node=1")
    assert desk.plan(job, "parallel.tensor=1")


def test_a_tensor_group_takes_samples_as_one_rank(desk: Desk) -> None:
    plan = desk.plan(
        LM_JOB, "resources.nodes=2", "parallel.tensor=4", "train.batch.micro=3", "train.batch.accumulation=2"
    )
    assert plan.nodes.world == 8
    assert plan.batch is not None and (plan.batch.total, plan.batch.accumulation, plan.batch.even) == (12, 2, True)
    wanted = ("resources.nodes=2", "train.batch.global=8", "train.batch.micro=4")
    assert [desk.plan(LM_JOB, *wanted, f"parallel.tensor={size}").batch.even for size in (1, 4)] == [False, True]


def test_ranks_that_only_the_nodes_know(desk: Desk) -> None:
    auto = ("resources.ranks_per_node=auto", "train.batch.global=8")
    told = [note.text for note in desk.plan(LM_JOB, *auto, "parallel.shard=5").notes]
    assert any("the nodes check" in text for text in told)
    assert not any("parallel" in note.text for note in desk.plan(LM_JOB, *auto).notes)


@pytest.mark.parametrize(
    ("nodes", "shard", "better"),
    [(2, 8, "parallel.shard 4 would"), (3, 6, "parallel.shard 2 would"), (3, 3, None)],
)
def test_shards_that_cross_nodes_are_told(desk: Desk, nodes: int, shard: int, better: str | None) -> None:
    (text,) = crossing(desk, f"resources.nodes={nodes}", f"parallel.shard={shard}")
    assert f"shard groups of {shard} ranks cross nodes of 4" in text
    assert (better in text) if better else "would stay" not in text


@pytest.mark.parametrize(("nodes", "shard"), [(1, 4), (2, 4), (2, 2), (64, 1)])
def test_shards_inside_nodes_need_no_word(desk: Desk, nodes: int, shard: int) -> None:
    assert not crossing(desk, f"resources.nodes={nodes}", f"parallel.shard={shard}")
