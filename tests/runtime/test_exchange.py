"""What ranks send each other is data: JSON, and DCP's plans as text."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from slurmddp.runtime.checkpoint import exchange
from slurmddp.runtime.errors import PeerError
from slurmddp.runtime.world import World, encode

from .harness import Ranks

VALUE = {"a": [1, 2.5, None, True], "b": "ä\udcff"}


def _send(world: World) -> None:
    assert world.broadcast(VALUE if world.is_main else object()) == VALUE
    assert world.gather((world.rank, "x" * world.rank)) == [[0, ""], [1, "x"]]
    assert world.on_main(lambda: (1, [2])) == [1, [2]]
    with pytest.raises((TypeError, PeerError), match="ranks exchange"):
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
    with pytest.raises(TypeError, match="ranks exchange"):
        encode(value)


def test_plans_and_results_of_dcp_survive_the_way(tmp_path: Path) -> None:
    planner, writer = DefaultSavePlanner(), FileSystemWriter(tmp_path)
    tensors = {"a": torch.zeros(3, 4), "b": {"c": [torch.ones(2, dtype=torch.bfloat16)]}, "n": 7}
    planner.set_up_planner(tensors, is_coordinator=True)
    plan = planner.create_local_plan()
    assert exchange.load(exchange.dump(plan)) == plan
    (plan,), _ = planner.create_global_plan([plan])
    (plan,) = writer.prepare_global_plan([plan])
    assert exchange.load(exchange.dump(plan)) == plan
    writing = writer.write_data(planner.finish_plan(plan), planner)
    writing.wait()
    assert exchange.load(exchange.dump(writing.value())) == writing.value()


@pytest.mark.parametrize("text", ['["c","save"]', '["o","system",["a",1]]', '["x"]', '["o","SavePlan",["a",1]]', "{"])
def test_a_forged_plan_makes_nothing_but_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        exchange.load(text)
