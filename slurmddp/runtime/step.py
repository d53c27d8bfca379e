"""One optimizer step over a global batch: accumulation, the exact gradient, clipping, the update."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from slurmddp.runtime import randomness
from slurmddp.runtime.checkpoint.state import Trained
from slurmddp.runtime.data.loading import Micro, to_device
from slurmddp.runtime.errors import NotFiniteError, RuntimeFailure
from slurmddp.runtime.job import Job
from slurmddp.runtime.measure.loss_accumulator import BAD, COUNT, LossAccumulator, Totals
from slurmddp.runtime.measure.timing import BACKWARD, DATA, FORWARD, NETWORK, OPTIMIZER, StepTimer
from slurmddp.runtime.nonfinite_report import Blame
from slurmddp.runtime.parallel.model import Parallel
from slurmddp.runtime.precision import PRECISIONS, autocast
from slurmddp.runtime.tasks.protocol import Loss, Task
from slurmddp.runtime.world import World

_MOST_SKIPPED = 50
_EPSILON = 1e-6  # As in torch's clip_grad_norm_.


class StepFlags(NamedTuple):
    """What a rank wants of all; what any rank wanted, once the step's sums are reduced.

    `give_up`: a checkpoint could not be written and there is none to fall back to. `probe`: measure the links.
    `profile`: profile the next steps.
    """

    stop: bool = False
    save: bool = False
    give_up: bool = False
    probe: bool = False
    profile: bool = False


_FILLED = len(StepFlags._fields)
_COMPUTED = _FILLED + 1
#: Where numbers are read late.
_NORM = _COMPUTED + 1


@dataclass(frozen=True)
class Outcome:
    """What a step gave, the same on every rank but for `ids`. `rate`: its learning rate.

    `means`: loss per target and metrics over the global batch. `targets`: how many. `computed`: tokens that the model
    computed, `padding` of which are padding; both 0 if the task does not tell. `skipped`: why the weights stayed
    as they were. `ids`: samples that this rank used.
    """

    step: int
    rate: float
    means: dict[str, float]
    targets: int
    computed: int
    padding: int
    grad_norm: float
    flags: StepFlags
    skipped: str | None
    ids: list[int]


class _Step(NamedTuple):
    """A step whose numbers are still on their way."""

    number: int
    rate: float
    totals: Totals
    used: list[tuple[Micro, torch.Tensor]]


class Stepper:
    """Runs steps. The gradient is d(sum of the global batch's losses)/d(weights) / its number of targets.

    Averaging over ranks is wrong where ranks have different numbers of targets. So each rank's sum is divided by an
    assumed number of targets for the whole batch (and multiplied by what the exchange of gradients divides by), which
    keeps gradients in a sane range for fp16; where the true number, reduced meanwhile, is another one, gradients are
    rescaled once.

    A GPU is not waited for in a step. Its numbers are read in the next one, with that one's passes in the GPU's queue
    and before that one's update: until then the GPU itself skips the update of a step that is not finite.
    """

    def __init__(
        self,
        world: World,
        task: Task,
        parallel: Parallel,
        trained: Trained,
        job: Job,
        timer: StepTimer,
        late: bool | None = None,
    ) -> None:
        """`late`: whether numbers are read a step late; by default on a GPU, where the optimizer can skip an update."""
        self._world = world
        # With gloo, a group of its own keeps the sums out of the gradients' way. A GPU's sums stay on it, with nccl.
        self._sums_group = world.coordination if world.device.type == "cpu" else None
        self._task = task
        self._parallel = parallel
        self._optimizer = trained.optimizer
        self._scaler = trained.scaler
        self._timer = timer
        self._precision = PRECISIONS[job.train.precision]
        self._policy = job.train.on_nonfinite or ("halve" if self._scaler.is_enabled() else "stop")
        self._clip = job.train.optimizer.clip or math.inf
        self._assumed = job.batch.total * task.targets_per_sample
        self._skipped_in_a_row = 0
        self._late = _can_be_late(world, parallel, trained) if late is None else late
        self._launched: _Step | None = None
        # Kept until the next step, as BucketSums keeps its tensors.
        self._reduction: Totals | None = None
        #: The last step that changed the weights; 0 before the first of this attempt.
        self.changed_in = 0

    def warm_up(self, micro: Micro) -> int:
        """Run forward and backward once for nothing, leaving weights, buffers and random states as they were.

        Returns the targets of the micro batch.

        DDP regroups its buckets after the first backward pass, and an all-reduce over more than two ranks adds up in
        an order that depends on the grouping. Without this, the first step after a resume would differ in its last
        bits from the same step of a run that was never interrupted.
        """
        states = randomness.states(self._world.device)
        buffers = [(buffer, buffer.clone()) for buffer in self._parallel.module.buffers()]
        with self._parallel.exchanging(last=True):
            loss = self._forward(micro)
            self._parallel.backward(loss.total * 0.0)
        self._parallel.clear_gradients()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        randomness.restore(states, self._world.device)
        return int(loss.count)

    def run(
        self, micros: Iterator[Micro], *, step: int, rate: float, flags: StepFlags, before_update: Callable[[], None]
    ) -> list[Outcome]:
        """Make step number `step` (the first is 1) with learning rate `rate`; `flags` are this rank's own.

        Returns the outcomes read by now: this step's, or where numbers are read late, that of the step before, if
        `settle` has not returned it. `before_update` is called right before the weights change. Raises NotFiniteError
        on all ranks, before that, where a loss or gradient is not finite and the job says to stop; StopIteration where
        the micro batches have run out.
        """
        self._timer.begin()
        self._parallel.clear_gradients()
        reduction, used = self._gradients(micros, flags)
        reduction.pending.arrive()
        self._timer.mark(NETWORK)
        self._scaler.unscale_(self._optimizer)
        unscaled = self._parallel.gradients_norm()
        made = _Step(step, rate, reduction, used)
        # Fused SGD makes its momentum in its first update, and leaves it undefined if it skips that one.
        if self._late and self.changed_in:
            outcomes = self._finish_late(made, unscaled, before_update)
        else:
            outcomes = [self._finish(made, unscaled, before_update)]
        self._timer.mark(OPTIMIZER)
        return outcomes

    def settle(self) -> list[Outcome]:
        """Return the last step's outcome, where that has not been returned yet, once it is there. Raises as `run`."""
        made, self._launched = self._launched, None
        return [] if made is None else [self._outcome(made, made.totals.wait().extra(_NORM))]

    def _finish(self, made: _Step, unscaled: torch.Tensor, before_update: Callable[[], None]) -> Outcome:
        """Read the numbers of a step, a GPU's only wait in it, and update the weights."""
        totals = made.totals.wait()
        scale = self._assumed / totals.count if totals.count else 1.0
        norm = scale * float(unscaled)
        outcome = self._outcome(made, norm)
        before_update()
        if outcome.skipped is None:
            # At their true scale, and clipped.
            factor = scale * min(1.0, self._clip / (norm + _EPSILON))
            if factor != 1.0:
                self._parallel.scale_gradients(factor)
            self._update(made.rate)
        return outcome

    def _finish_late(self, made: _Step, unscaled: torch.Tensor, before_update: Callable[[], None]) -> list[Outcome]:
        """Read the numbers of the step before, then have the device update the weights if this step is finite."""
        before, sums = self.settle(), made.totals.pending.vector
        # The same to the last bit. A number over a tensor would be the number times the reciprocal.
        scale = sums.new_full((), self._assumed) / sums[COUNT]
        norm = scale * unscaled.double()
        factor = scale * (sums.new_full((), self._clip) / (norm + _EPSILON)).clamp(max=1.0)
        self._parallel.scale_gradients(factor.float())
        optimizer: Any = self._optimizer
        # By it, fused optimizers skip an update, as torch's GradScaler has them do.
        optimizer.found_inf = (~norm.isfinite() | (sums[BAD] > 0)).float()
        before_update()
        self._update(made.rate)
        made.totals.pending.send(norm)
        self._launched = made
        return before

    def _update(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._scaler.step(self._optimizer)
        self._scaler.update()

    def _outcome(self, made: _Step, norm: float) -> Outcome:
        """Return what a step gave, once its numbers are read. Raises as `run`."""
        step, rate, totals, used = made
        if totals.count == 0 and not totals.not_finite:
            raise RuntimeFailure(f"step {step}: the global batch has no {self._task.unit} to train on", shared=True)
        finite = not totals.not_finite and math.isfinite(norm)
        skipped = None if finite else self._skip(step, totals, used)
        if skipped is None:
            self._skipped_in_a_row, self.changed_in = 0, step
        return Outcome(
            step=step,
            rate=rate,
            means=dict.fromkeys(totals.means(), math.nan) if totals.not_finite else totals.means(),
            targets=totals.count,
            computed=round(totals.extra(_COMPUTED)),
            padding=round(totals.extra(_COMPUTED) - totals.extra(_FILLED)),
            grad_norm=norm,
            flags=StepFlags(*(totals.extra(slot) > 0 for slot in range(len(StepFlags._fields)))),
            skipped=skipped,
            ids=[index for micro, _ in used for index in micro.ids],
        )

    def _forward(self, micro: Micro) -> Loss:
        with autocast(self._world.device, self._precision):
            return self._task.loss(self._parallel.model, to_device(micro.data, self._world.device))

    def _gradients(self, micros: Iterator[Micro], flags: StepFlags) -> tuple[Totals, list[tuple[Micro, torch.Tensor]]]:
        """Forward and backward over a step. Returns the sums on their way, and each real micro batch with its loss."""
        sums = LossAccumulator(self._task, self._world.device, extra=_COMPUTED + 1)
        for slot, flag in enumerate(flags):
            sums.add_extra(slot, float(flag))
        factor = self._parallel.divides_by / self._assumed
        used: list[tuple[Micro, torch.Tensor]] = []
        reduction = None
        while reduction is None:
            micro = next(micros)
            self._timer.mark(DATA)
            with self._parallel.exchanging(last=micro.last):
                loss = self._forward(micro)
                if micro.real:
                    if self._parallel.data.counts:
                        sums.add_loss(loss)
                        sums.add_extra(_COMPUTED, micro.computed)
                        sums.add_extra(_FILLED, micro.filled)
                    used.append((micro, loss.total.detach()))
                if micro.last:
                    # Before the last backward pass, which computes while the sums travel.
                    reduction = sums.reduce(self._sums_group)
                self._timer.mark(FORWARD)
                total = self._scaler.scale(loss.total * (factor if micro.real else 0.0))
                self._parallel.backward(total)
                self._timer.mark(BACKWARD)
        self._reduction = reduction
        return reduction, used

    def _skip(self, step: int, totals: Totals, used: list[tuple[Micro, torch.Tensor]]) -> str:
        """Handle a step that is not finite; all ranks call it, or none. Returns the message."""
        what = "loss" if totals.not_finite else "gradient"
        blame = Blame(self._world, self._task, self._parallel, self._precision, self._scaler)
        lines = blame.losses(used) if totals.not_finite else blame.gradients([micro for micro, _ in used])
        self._skipped_in_a_row += 1
        weights = f"the weights are those of step {step - self._skipped_in_a_row}"
        text = f"step {step}: the {what} is not finite; {weights}\n  " + "\n  ".join(lines)
        if self._policy == "stop":
            raise NotFiniteError(text, shared=True, culprit=blame.culprit)
        if self._skipped_in_a_row >= _MOST_SKIPPED:
            advice = "; use bf16 or fp32" if self._scaler.is_enabled() else ""
            text += f"\n{_MOST_SKIPPED} steps in a row were not finite{advice}"
            raise NotFiniteError(text, shared=True, culprit=blame.culprit)
        # Under "skip" the scale stays; told so, the scaler forgets what it has seen of this step.
        self._scaler.update(self._scaler.get_scale() / (2 if self._policy == "halve" else 1))
        return text


def _can_be_late(world: World, parallel: Parallel, trained: Trained) -> bool:
    """Return whether steps need not wait for their numbers: a GPU that can clip, and skip an update, by itself."""
    groups = trained.optimizer.param_groups
    return (
        world.device.type == "cuda"
        and not parallel.lockstep
        and not trained.scaler.is_enabled()
        and all(group["fused"] for group in groups)
        and all(item.dtype == torch.float32 for group in groups for item in group["params"])
    )
