"""One optimizer step over a global batch: accumulation, the exact gradient, clipping, the update."""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch.nn.parallel import DistributedDataParallel

from slurmddp.runtime import batch, optimizer, randomness
from slurmddp.runtime.checkpoint.state import Trained
from slurmddp.runtime.errors import NotFiniteError, RuntimeFailure
from slurmddp.runtime.job import Job
from slurmddp.runtime.loading import Micro, to_device
from slurmddp.runtime.sums import Sums, Totals
from slurmddp.runtime.tasks.protocol import Loss, Task
from slurmddp.runtime.world import World

_STOP, _SAVE = 0, 1
_MOST_SKIPPED = 50

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Outcome:
    """What a step gave, the same on every rank but for `ids`.

    `means`: loss per target and metrics over the global batch. `targets`: how many. `stop`, `save`: whether
    any rank asked. `skipped`: fp16 gradients overflowed, so the weights stayed. `ids`: samples that this
    rank used.
    """

    means: dict[str, float]
    targets: int
    grad_norm: float
    stop: bool
    save: bool
    skipped: bool
    ids: list[int]


class Stepper:
    """Runs steps. The gradient is d(sum of the global batch's losses)/d(weights) / its number of targets.

    DDP averages over ranks, which is wrong where ranks have different numbers of targets. So each rank's sum
    is divided by an assumed number of targets for the whole batch (and multiplied by the ranks that DDP
    divides by), which keeps gradients in a sane range for fp16; where the true number, reduced meanwhile, is
    another one, gradients are rescaled once.
    """

    def __init__(
        self,
        world: World,
        task: Task,
        model: DistributedDataParallel,
        trained: Trained,
        job: Job,
    ) -> None:
        self._world = world
        self._task = task
        self._model = model
        self._optimizer = trained.optimizer
        self._scaler = trained.scaler
        self._precision = PRECISIONS[job.train.precision]
        self._clip = job.train.optimizer.clip or math.inf
        self._assumed = job.batch.total * task.targets_per_sample
        parts = batch.micro_batches(job.batch.total, job.batch.micro, world.size, world.rank)
        # As loading.training_lists gives them: empty ones left out, but for the last, which has weight 0
        # then.
        self._real = [bool(part) for number, part in enumerate(parts) if part or number == len(parts) - 1]
        self._skipped_in_a_row = 0

    def autocast(self) -> torch.autocast:
        """The context in which the model runs."""
        return autocast(self._world.device, self._precision)

    def warm_up(self, micro: Micro) -> None:
        """Run forward and backward once for nothing, leaving weights, buffers and random states as they were.

        DDP regroups its buckets after the first backward pass, and an all-reduce over more than two ranks
        adds up in an order that depends on the grouping. Without this, the first step after a resume would
        differ in its last bits from the same step of a run that was never interrupted.
        """
        states = randomness.states(self._world.device)
        buffers = [(buffer, buffer.clone()) for buffer in self._model.module.buffers()]
        _backward(self._forward(micro).total * 0.0)
        self._optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        randomness.restore(states, self._world.device)

    def run(self, micros: Iterator[Micro], *, step: int, rate: float, stop: bool, save: bool) -> Outcome:
        """Make step number `step` (the first is 1) with learning rate `rate`; `stop` and `save` are this
        rank's wishes.

        Raises NotFiniteError on all ranks, before the weights change, where a loss or gradient is not
        finite; StopIteration where the micro batches have run out.
        """
        self._optimizer.zero_grad(set_to_none=True)
        totals, used = self._gradients(micros, stop=stop, save=save)
        if totals.not_finite:
            self._refuse(step, used)
        if totals.count == 0:
            raise RuntimeFailure(f"step {step}: the global batch has no {self._task.unit} to learn from", shared=True)
        norm = self._finish_gradients(totals.count)
        skipped = not math.isfinite(norm)
        self._check_skipped(step, skipped)
        optimizer.set_rate(self._optimizer, rate)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return Outcome(
            means=totals.means(),
            targets=totals.count,
            grad_norm=norm,
            stop=totals.extra(_STOP) > 0,
            save=totals.extra(_SAVE) > 0,
            skipped=skipped,
            ids=[index for ids, _ in used for index in ids],
        )

    def _forward(self, micro: Micro) -> Loss:
        with self.autocast():
            return self._task.loss(self._model, to_device(micro.data, self._world.device))

    def _gradients(
        self, micros: Iterator[Micro], *, stop: bool, save: bool
    ) -> tuple[Totals, list[tuple[list[int], torch.Tensor]]]:
        """Forward and backward over all micro batches. Returns the reduced sums, and ids and loss of each
        real one.
        """
        sums = Sums(self._task, self._world.device, extra=2)
        sums.add_extra(_STOP, float(stop))
        sums.add_extra(_SAVE, float(save))
        factor = self._world.size / self._assumed
        used: list[tuple[list[int], torch.Tensor]] = []
        reduction = None
        for number, real in enumerate(self._real):
            last = number == len(self._real) - 1
            micro = next(micros)
            with nullcontext() if last else self._model.no_sync():
                loss = self._forward(micro)
                if real:
                    sums.add_loss(loss)
                    used.append((micro.ids, loss.total.detach()))
                if last:
                    # Started before the last backward pass, it travels while that computes, and costs next
                    # to nothing.
                    reduction = sums.reduce()
                _backward(self._scaler.scale(loss.total * (factor if real else 0.0)))
        assert reduction is not None
        return reduction.wait(), used

    def _finish_gradients(self, count: int) -> float:
        """Bring gradients to their true scale, clip them, and return their norm before clipping."""
        self._scaler.unscale_(self._optimizer)
        parameters = [parameter for parameter in self._model.parameters() if parameter.grad is not None]
        if count != self._assumed:
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad.mul_(self._assumed / count)
        return float(torch.nn.utils.clip_grad_norm_(parameters, self._clip))

    def _check_skipped(self, step: int, skipped: bool) -> None:
        """Gradients are the same on all ranks, so all raise, or none."""
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if not skipped:
            return
        if not self._scaler.is_enabled():
            raise NotFiniteError(
                f"step {step}: the gradient is not finite, though the loss is; the weights are those of "
                f"step {step - 1}",
                shared=True,
            )
        if self._skipped_in_a_row >= _MOST_SKIPPED:
            raise NotFiniteError(
                f"step {step}: fp16 gradients have overflowed in {_MOST_SKIPPED} steps running; use bf16 or fp32",
                shared=True,
            )

    def _refuse(self, step: int, used: list[tuple[list[int], torch.Tensor]]) -> None:
        own = [(ids, value.item()) for ids, value in used if not torch.isfinite(value)]
        lines = [
            f"rank {rank} on {node}: loss {value} for the samples {_shortened(ids)}"
            for rank, (node, bad) in enumerate(self._world.gather((self._world.node, own)))
            for ids, value in bad
        ]
        raise NotFiniteError(
            f"step {step}: the loss is not finite; the weights are those of step {step - 1}\n  " + "\n  ".join(lines),
            shared=True,
        )


def autocast(device: torch.device, precision: torch.dtype) -> torch.autocast:
    """The context in which a model runs in `precision`; for fp32 it does nothing."""
    reduced = precision != torch.float32
    return torch.autocast(device.type, dtype=precision if reduced else None, enabled=reduced)


def _backward(total: torch.Tensor) -> None:
    total.backward()  # type: ignore[no-untyped-call]


def _shortened(ids: list[int]) -> str:
    return str(ids) if len(ids) <= 16 else f"{str(ids[:16])[:-1]}, ... {len(ids)} in all]"
