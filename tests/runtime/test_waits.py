"""Sharded models tell the wait for other ranks from computing."""

import time
from typing import Any

import pytest
import torch

from slurmddp.runtime import job
from slurmddp.runtime.measure.timing import BACKWARD, FORWARD, NETWORK, PARTS, StepTimer
from slurmddp.runtime.parallel.wrap import wrap
from slurmddp.runtime.tasks.gpt import GPT
from slurmddp.runtime.world import World

from .harness import Ranks, make_job
from .test_parallel import CONTEXT, loss_of, tokens

STEPS, SLEEP = 4, 0.2


def passes(joined: World, mark: Any, steps: int, **options: Any) -> None:
    """Forward and backward; in one block of rank 1, each takes SLEEP longer."""

    def sleep(*_: Any) -> None:
        time.sleep(SLEEP)

    torch.manual_seed(0)
    bare = GPT(context=CONTEXT, layers=2, heads=2, width=16, dropout=0.0, tied=True)
    if joined.rank == 1:
        last = bare.blocks[1].get_submodule("out")
        last.register_forward_hook(sleep)
        last.register_forward_hook(lambda module, args, output: output.register_hook(sleep) and None)
    parallel = wrap(bare, job.parse(make_job(**options)), joined, mark)
    for step in range(steps):
        mark("begin")
        parallel.clear_gradients()
        with parallel.exchanging(last=True):
            loss = loss_of(parallel.model, "gpt", tokens(step)[:2])
            mark(FORWARD)
            parallel.backward(loss)
            mark(BACKWARD)
        mark("end")


def marks(joined: World, options: dict[str, Any]) -> list[str]:
    seen: list[str] = []
    passes(joined, seen.append, 2, **options)
    return seen[seen.index("end") + 1 :]  # in the first step, FSDP sets itself up


def seconds(joined: World, options: dict[str, Any]) -> dict[str, float]:
    timer = StepTimer()
    ends = {"begin": timer.begin, "end": timer.end}
    passes(joined, lambda part: ends[part]() if part in ends else timer.mark(part), STEPS, **options)
    return dict.fromkeys(PARTS, 0.0) | timer.window().sums


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"train__activation_checkpointing": True}], ids=["plain", "recomputed"])
def test_each_hook_of_fsdp_is_marked(ranks: Ranks, options: dict[str, Any]) -> None:
    """Two blocks and the model: gathered before forward and before backward; reduced after it, the model's own at
    last.
    """
    gathers, reduces = 3 * [FORWARD, NETWORK], 2 * [BACKWARD, NETWORK]
    backward = [BACKWARD, NETWORK, *reduces, *reduces, BACKWARD, NETWORK]
    for seen in ranks(2, marks, {"parallel__shard": 2, **options}):
        assert seen == ["begin", *gathers, FORWARD, *backward, BACKWARD, "end"]


@pytest.mark.ranks(2)
def test_ddps_wait_at_the_end_of_the_pass_is_marked(ranks: Ranks) -> None:
    assert ranks(2, marks, {}) == 2 * [["begin", FORWARD, BACKWARD, NETWORK, BACKWARD, "end"]]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shard", [1, 2])
def test_the_wait_for_a_slow_rank_is_network(ranks: Ranks, shard: int) -> None:
    """It is the fast rank's: it cannot gather or reduce before the slow one does."""
    fast, slow = ranks(2, seconds, {"parallel__shard": shard})
    slept = 2 * SLEEP * STEPS
    assert slow[FORWARD] + slow[BACKWARD] >= slept
    assert fast[NETWORK] > 0.75 * slept > fast[FORWARD] + fast[BACKWARD]
    assert slow[NETWORK] < 0.25 * slept
