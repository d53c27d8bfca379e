"""What ranks send each other is data: JSON, and the plan of a checkpoint is made from it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from slurmddp.runtime.checkpoint import shards
from slurmddp.runtime.errors import PeerError
from slurmddp.runtime.world import World, encode

from .harness import Ranks

VALUE = {"a": [1, 2.5, None, True], "b": "ä\udcff"}


def _send(world: World) -> None:
    assert world.broadcast(VALUE if world.is_main else object()) == VALUE
    assert world.gather((world.rank, "x" * world.rank)) == [[0, ""], [1, "x"]]
    assert world.on_main(lambda: (1, [2])) == [1, [2]]
    with pytest.raises((TypeError, PeerError), match="exchange"):
        world.on_main(lambda: Path("/x"))  # on both, and neither is left waiting
    world.gather(None)


@pytest.mark.ranks(2)
def test_values_that_json_holds_arrive_as_they_were(ranks: Ranks) -> None:
    ranks(2, _send)


@pytest.mark.parametrize(
    "value",
    [b"x", Path("/x"), {1: 2}, [{"a": object()}], torch.zeros(1), {"a": {1}}],
    ids=lambda value: type(value).__name__,
)
def test_any_other_value_is_refused_before_it_is_sent(value: Any) -> None:
    with pytest.raises(TypeError, match="exchange"):
        encode(value)


#: What ranks say of the blocks that they hold: (name, type, size of the tensor, the block's beginning and size).
SAME = ("a", "float32", [4], [0], [4])
FIRST, SECOND = ("b", "float32", [3, 2], [0, 0], [2, 2]), ("b", "float32", [3, 2], [2, 0], [1, 2])


def test_each_block_is_dealt_to_one_rank_that_holds_it() -> None:
    held = [[SAME, FIRST], [SAME, SECOND, ("c", "int64", [], [], [])]]
    first, second = (shards.deal(held, rank) for rank in range(2))
    assert (first.own, second.own) == ([("a", (0,)), ("b", (0, 0))], [("b", (2, 0)), ("c", ())])
    assert first.metadata == second.metadata
    stored = first.metadata.state_dict_metadata
    assert [(name, item.properties.dtype, *item.size) for name, item in stored.items()] == [
        ("a", torch.float32, 4), ("b", torch.float32, 3, 2), ("c", torch.int64),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "held",
    [
        [[SAME, FIRST], [SAME]],
        [[SAME], [("a", "float32", [4], [2], [2])]],
        [[("a", "save", [4], [0], [4])]],
        [[("a", "float32", [4], [0], ["4"])]],
        [["a"]],
        [[{}]],
    ],
    ids=["a missing block", "an overlap", "no type", "no number", "a name", "nothing"],
)
def test_a_forged_plan_makes_nothing_but_an_error(held: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        shards.deal(held, 0)
