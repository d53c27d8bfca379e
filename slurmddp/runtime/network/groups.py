"""Process groups besides the first one, as FSDP and tensor parallelism make them: on some networks only these hang
(lumi-ai-factory/laifs-container-recipes#44).
"""

import datetime
from collections.abc import Callable, Set
from typing import Any

import torch
import torch.distributed as dist

from slurmddp.runtime.network.settings import Settings
from slurmddp.shared.units import listed

_BEGUN, _DONE = "begun", "done"


def _groups(own: Settings) -> dict[str, range]:
    """All ranks, and some: one rank per node, or every other node. Fewer than two ranks need no group."""
    groups = {"all ranks": range(own.world), "some ranks": range(0, own.world, max(2, own.ranks))}
    return {name: ranks for name, ranks in groups.items() if len(ranks) > 1}


def use(own: Settings, store: Any, device: torch.device, limit: float) -> None:
    """Make each group and reduce in it once. Notes in the store how far this rank has come. May hang, or raise."""
    timeout = datetime.timedelta(seconds=limit)
    for name, ranks in _groups(own).items():
        store.set(f"{_BEGUN}/{name}/{own.rank}", "1")
        group = dist.new_group(list(ranks), timeout=timeout)
        if own.rank in ranks:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            if device.type == "cuda":
                torch.cuda.synchronize()
        store.set(f"{_DONE}/{name}/{own.rank}", "1")


def trouble(own: Settings, noted: Callable[[str], bool], why: str) -> tuple[str, dict[str, str]]:
    """Return what hangs, and the nodes whose fault it is, each with the reason. `noted`: is this in the store?"""
    for name, ranks in _groups(own).items():
        came = {rank for rank in range(own.world) if noted(f"{_BEGUN}/{name}/{rank}")}
        done = {rank for rank in ranks if noted(f"{_DONE}/{name}/{rank}")}
        if len(done) < len(ranks):
            return _told(own, f"a further process group of {name} does not work ({why})", came, done, ranks)
    return "", {}


def _told(own: Settings, what: str, came: Set[int], done: Set[int], ranks: range) -> tuple[str, dict[str, str]]:
    absent, waiting = _nodes(own, set(range(own.world)) - came), _nodes(own, set(ranks) - done)
    if absent:
        return f"{what}: {listed(absent, 3)} did not come", dict.fromkeys(absent, f"{what}: it did not come")
    if done:
        return f"{what}: no result on {listed(waiting, 3)}", {}
    return f"{what}: no result on any node", {}


def _nodes(own: Settings, ranks: Set[int]) -> list[str]:
    return list(dict.fromkeys(own.nodes[rank // own.ranks] for rank in sorted(ranks)))
