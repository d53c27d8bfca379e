"""Which rank and which samples made a loss or gradient that is not finite. Slow, and for that case alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from slurmddp.runtime.data.loading import Micro, to_device
from slurmddp.runtime.precision import autocast
from slurmddp.runtime.tasks.protocol import Task
from slurmddp.runtime.world import World

if TYPE_CHECKING:
    from slurmddp.runtime.parallel.model import Parallel


@dataclass
class Blame:
    """Every rank has to call the same method; all get the same lines."""

    world: World
    task: Task
    parallel: "Parallel"
    precision: torch.dtype
    scaler: torch.amp.GradScaler
    #: Rank and node of the first rank that made what is not finite; None if all did, or nobody knows.
    culprit: tuple[int, str] | None = None

    def losses(self, used: Sequence[tuple[Micro, torch.Tensor]]) -> list[str]:
        own = [(micro.ids, f"loss {float(value)}") for micro, value in used if not torch.isfinite(value)]
        return self._lines(own, blame=True)

    def gradients(self, micros: Sequence[Micro]) -> list[str]:
        """Micro batches whose own gradient is not finite: each is computed once more, by itself.

        Under sharding no rank can do that alone; the ranks' samples of the step are listed instead.
        """
        if self.parallel.lockstep:
            lines = self._lines([(micro.ids, "had") for micro in micros])
            return [
                "with a sharded model, the ranks cannot tell which rank caused it. The samples of the step:",
                *lines,
            ]
        own = [(micro.ids, f"gradient of {name}") for micro in micros if (name := self._bad(micro))]
        lines = self._lines(own, blame=True)
        return lines or ["the gradient of each micro batch is finite (computed again), but their sum is not"]

    def _bad(self, micro: Micro) -> str | None:
        named = [(name, p) for name, p in self.parallel.module.named_parameters() if p.requires_grad]
        with autocast(self.world.device, self.precision):
            loss = self.task.loss(self.parallel.module, to_device(micro.data, self.world.device))
        total = self.scaler.scale(loss.total)
        gradients = torch.autograd.grad(total, [parameter for _, parameter in named], allow_unused=True)
        bad = [
            name
            for (name, _), gradient in zip(named, gradients, strict=True)
            if gradient is not None and not torch.isfinite(gradient).all()
        ]
        return bad[0] if bad else None

    def _lines(self, own: list[tuple[list[int], str]], *, blame: bool = False) -> list[str]:
        ranks = self.world.gather((self.world.node, own))
        guilty = [(rank, node) for rank, (node, bad) in enumerate(ranks) if bad]
        self.culprit = guilty[0] if blame and 0 < len(guilty) < len(ranks) else None
        return [
            f"rank {rank} on {node}: {what} for the samples {_shortened(ids)}"
            for rank, (node, bad) in enumerate(ranks)
            for ids, what in bad
        ]


def _shortened(ids: list[int]) -> str:
    return str(ids) if len(ids) <= 16 else f"{str(ids[:16])[:-1]}, ... {len(ids)} in all]"
