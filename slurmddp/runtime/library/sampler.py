"""The samples of each rank: the same global batches on any number of ranks."""

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from slurmddp.runtime.data.loading import training_lists
from slurmddp.runtime.data.order import SampleOrder
from slurmddp.runtime.errors import UserError
from slurmddp.runtime.measure.meter import reduction_device
from slurmddp.shared import batch


class GlobalSampler:
    """Sample this rank's part of each global batch, as lists of sample ids: a batch sampler for torch's DataLoader.

    All epochs form one endless sequence, each in its own order, computed from (seed, epoch). Step n of a run takes the
    n-th `global_batch` samples of the sequence, on any number of ranks. No sample is padded, dropped or repeated, and a
    batch may span two epochs.

    >>> import torch
    >>> from torch.utils.data import DataLoader
    >>> from slurmddp.runtime import GlobalSampler
    >>> samples = torch.arange(10)
    >>> sampler = GlobalSampler(len(samples), global_batch=4, seed=1)
    >>> loader = DataLoader(samples, batch_sampler=sampler)
    >>> step = 0
    >>> for epoch in range(2):
    ...     sampler.set_epoch(epoch)
    ...     for rows in loader:
    ...         step += 1
    ...         print(step, epoch, rows.tolist())
    1 0 [1, 5, 2, 6]
    2 0 [4, 0, 9, 7]
    3 0 [3, 8, 3, 0]
    4 1 [5, 1, 7, 8]
    5 1 [4, 9, 6, 2]

    The position is a few numbers, the same for all ranks. Two ranks continue with the same samples after step 3:

    >>> state = sampler.state_dict(step=3)
    >>> for rank in range(2):
    ...     again = GlobalSampler(10, global_batch=4, seed=1, rank=rank, ranks=2)
    ...     again.load_state_dict(state)
    ...     print(again.step, again.epoch, list(again))
    3 1 [[5, 1], [4, 9]]
    3 1 [[7, 8], [6, 2]]

    One iteration ends with the epoch of `set_epoch` (it is empty if that epoch is done), or with the current epoch.
    Then the position is at its end. An iteration that you leave early does not count, since only the script knows how
    many of the loader's batches it has used: set the position with `start_at`.

    **Accumulation.** With `micro`, lists have at most that many ids, and `accumulation` of them make one step:

    >>> sampler = GlobalSampler(10, global_batch=8, micro=3, rank=0, ranks=2)
    >>> sampler.accumulation, [len(ids) for ids in sampler]
    (2, [2, 2, 2, 2])

    **Uneven shares.** If the ranks do not divide the global batch, shares differ by one sample. DDP and FSDP average
    the gradients of the ranks. So backward() of each rank's mean loss would be wrong, also with micro batches of
    different sizes. Use the sum of the samples' losses times `weight`, which is ranks / global_batch. It is right for
    even shares, too:

        loss = torch.nn.functional.mse_loss(model(rows), wanted, reduction="sum") * sampler.weight

    If samples have different numbers of targets, such as tokens, see `mean_over_ranks`.
    """

    def __init__(
        self,
        length: int,
        *,
        global_batch: int,
        seed: int = 0,
        micro: int | None = None,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        """Create a sampler that starts at the first sample.

        Args:
            length: number of samples in the dataset.
            global_batch: samples per optimizer step over all ranks.
            seed: seed of the order.
            micro: maximum samples per list; default: all of this rank's share. With `micro` 1, `accumulation` may
                differ by one between ranks; sharded models (FSDP) need the same number on all.
            rank: this rank; default: from the process group, else from torchrun's variables.
            ranks: number of ranks; default: the same.

        Raises:
            UserError: some rank would get no samples, or a number is below 1.
        """
        if ranks is None or rank is None:
            rank, ranks = _own_place()
        if length < 1 or global_batch < 1 or (micro is not None and micro < 1):
            raise UserError(
                f"GlobalSampler: length {length}, global_batch {global_batch} and micro {micro} must be at least 1"
            )
        if global_batch < ranks:
            raise UserError(
                f"GlobalSampler: a global batch of {global_batch} leaves some of {ranks} ranks without samples: "
                f"increase it, or use fewer ranks",
                shared=True,
            )
        self.length, self.global_batch, self.seed = length, global_batch, seed
        self._rank, self._ranks = rank, ranks
        self._micro = micro or -(-global_batch // ranks)
        self._step, self._samples = 0, 0
        self._epoch: int | None = None
        self._restore: Callable[[], None] | None = None

    @property
    def step(self) -> int:
        """Return the steps done before the next iteration."""
        return self._step

    @property
    def samples(self) -> int:
        """Return the samples used by these steps, over all ranks and epochs."""
        return self._samples

    @property
    def epoch(self) -> int:
        """Return the epoch of the next iteration, from 0."""
        return self._samples // self.length if self._epoch is None else self._epoch

    @property
    def accumulation(self) -> int:
        """Return the number of lists per step on this rank."""
        parts = batch.micro_batches(self.global_batch, self._micro, self._ranks, self._rank)
        return sum(len(part) > 0 for part in parts)

    @property
    def weight(self) -> float:
        """Return the factor for the sum of a micro batch's losses: ranks / global_batch."""
        return self._ranks / self.global_batch

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration end with this epoch. It has the rest of the epoch, which may be empty.

        Raises:
            UserError: the epochs before it are not done.
        """
        if epoch * self.length > self._samples:
            raise UserError(
                f"GlobalSampler: epoch {epoch} was set after {self._samples} samples, in the middle of epoch "
                f"{self._samples // self.length}; to skip samples, call start_at(samples)"
            )
        self._epoch = epoch

    def start_at(self, samples: int, step: int | None = None) -> None:
        """Let the next iteration start after these samples.

        Args:
            samples: samples used so far, over all ranks and epochs.
            step: steps done so far; default: samples // global_batch.

        Raises:
            UserError: `samples` is negative.
        """
        if samples < 0:
            raise UserError(f"GlobalSampler: it cannot start after {samples} samples")
        self._samples = samples
        self._step = samples // self.global_batch if step is None else step
        self._epoch = None

    def state_dict(self, step: int | None = None) -> dict[str, int]:
        """Return the position after `step` optimizer steps, as JSON values.

        Args:
            step: steps that the script has done, one global batch each; default: those of the last complete iteration.
                The loader may be ahead of the script, so only the script knows this number.
        """
        step = self._step if step is None else step
        return {
            "step": step,
            "samples": self._samples + (step - self._step) * self.global_batch,
            "seed": self.seed,
            "length": self.length,
            "global_batch": self.global_batch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position of `state_dict`. The global batch may have changed.

        Raises:
            UserError: length or seed has changed, so samples would be lost or repeated.
        """
        for name, now in (("length", self.length), ("seed", self.seed)):
            if state[name] != now:
                raise UserError(
                    f"GlobalSampler: {name} was {state[name]} and is now {now}, so training cannot continue "
                    f"with the same samples. Restore it, or start a new run",
                    shared=True,
                )
        self.start_at(state["samples"], state["step"])

    def restore_with(self, restore: Callable[[], None]) -> None:
        """Let `restore` restore the random states once more, where the next iteration continues with the samples.

        Checkpointer calls it when it has loaded. Until the first batch, a resumed script draws numbers that the
        undisturbed run drew before the checkpoint: a DataLoader draws one in each iteration, also in an empty one.
        """
        self._restore = restore

    def __len__(self) -> int:
        """Return the number of lists in the next iteration."""
        return self._steps() * self.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the lists of sample ids of one iteration."""
        # A DataLoader calls this, draws its number, perhaps calls this again, and then asks for the first list. So the
        # undisturbed run drew the number after the checkpoint if this is the first step of an epoch, else before it.
        if self._restore is not None and self.epoch * self.length > self._samples - self.global_batch:
            self._restore()
            self._restore = None
        return self._lists()

    def _lists(self) -> Iterator[list[int]]:
        if self._restore is not None:
            self._restore()
            if (
                self.epoch + 1
            ) * self.length > self._samples - self.global_batch:  # No earlier epoch than the last step's.
                self._restore = None
        steps, began = self._steps(), (self._samples, self._step)
        lists = training_lists(
            SampleOrder(self.length, self.seed),
            start=self._samples,
            steps=steps,
            total=self.global_batch,
            micro=self._micro,
            world=self._ranks,
            rank=self._rank,
        )
        for wanted in lists:
            yield wanted.ids
        if (self._samples, self._step) == began:
            self.start_at(self._samples + steps * self.global_batch, self._step + steps)

    def _steps(self) -> int:
        return max(0, -(-((self.epoch + 1) * self.length - self._samples) // self.global_batch))


def mean_over_ranks(total: torch.Tensor, count: torch.Tensor | float) -> torch.Tensor:
    """Return the loss for backward(), so that DDP's mean over ranks is the gradient of the mean loss of all targets.

    Every rank must call it: it makes an all-reduce of one number. With nccl, this runs on the GPU, and the host does
    not wait for it. If counts are known in advance, use GlobalSampler.weight instead, which needs no all-reduce.

    Args:
        total: scalar tensor, the sum of this rank's losses.
        count: number of targets in `total`; with accumulation, of all micro batches of this step.

    Returns:
        Scalar tensor: total * ranks / (sum of the counts of all ranks).

    >>> import torch
    >>> from slurmddp.runtime import mean_over_ranks
    >>> losses = torch.tensor([1.0, 2.0, 6.0], requires_grad=True)
    >>> mean_over_ranks(losses.sum(), len(losses)).item()
    3.0
    """
    if not dist.is_available() or not dist.is_initialized():
        return total / count
    # Under gloo the host's memory is as good, and the GPU's may not be possible.
    counts = torch.as_tensor(count, dtype=torch.float64).detach().to(reduction_device(), copy=True)
    dist.all_reduce(counts)
    return total * (dist.get_world_size() / counts).to(total.device)


def _own_place() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
