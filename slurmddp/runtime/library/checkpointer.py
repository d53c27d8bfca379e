"""Checkpoints for a training script of the user."""

import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from slurmddp.runtime.checkpoint import reader, state
from slurmddp.runtime.checkpoint.saving import Failed
from slurmddp.runtime.checkpoint.writer import Writer
from slurmddp.runtime.environment import earlier_checkpoints
from slurmddp.runtime.errors import RuntimeFailure, UserError
from slurmddp.runtime.evaluation import share_buffers
from slurmddp.runtime.library import restoring, shared

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Checkpointer:
    """Save and load a model, its optimizer, scheduler, random states, and a few numbers. Every rank must create one.

    >>> import tempfile, torch
    >>> from slurmddp.runtime import Checkpointer
    >>> folder = tempfile.TemporaryDirectory()
    >>> def make():
    ...     model = torch.nn.Linear(2, 1)
    ...     return model, torch.optim.AdamW(model.parameters())
    >>> model, optimizer = make()
    >>> checkpointer = Checkpointer(model, optimizer, folder.name, every_steps=2)
    >>> checkpointer.load() is None
    True
    >>> for step in range(1, 4):
    ...     model(torch.ones(2)).sum().backward()
    ...     optimizer.step()
    ...     if checkpointer.due(step):
    ...         checkpointer.save(step, {"best": 0.5})
    ...         saved = model.weight.detach().clone()
    >>> checkpointer.finish()  # doctest: +ELLIPSIS
    checkpoint step-00000002, ...B in ... s, training waited ... s
    >>> model, optimizer = make()
    >>> state = Checkpointer(model, optimizer, folder.name).load()  # doctest: +ELLIPSIS
    resumed    step 2 from ...step-00000002, saved by 1 rank
    >>> state.step, state.extra, torch.equal(model.weight, saved)
    (2, {'best': 0.5}, True)

    `save` copies this rank's part of the state. A thread writes the copy while training continues: each file with its
    sha256, then it renames the folder, then it writes COMPLETE. A kill at any moment damages no older checkpoint.
    `load` takes the newest checkpoint that verifies, on any number of ranks, and prints why it rejects others. The
    model may be plain, in DDP, compiled, or sharded by FSDP2 (fully_shard); it may be another of these when it loads.

    A checkpoint restores weights, buffers, the optimizer's state and the options of its groups (such as the learning
    rate that a scheduler had set), and the scheduler. It restores random states if the number of ranks is the same.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        folder: str | Path | None = None,
        *,
        scheduler: state.Stateful | None = None,
        sampler: restoring.Positioned | None = None,
        scaler: torch.amp.GradScaler | None = None,
        keep: int = 3,
        keep_every: int | None = None,
        every_seconds: float | None = None,
        every_steps: int | None = None,
        asynchronous: bool = True,
        resume_from: Sequence[str | Path] = (),
    ) -> None:
        """Create a checkpointer.

        Args:
            model: the model, plain or in DDP, FSDP2 or torch.compile.
            optimizer: its optimizer.
            folder: folder for the checkpoints; default: that of the run in $SLURMDDP_RUN. Without slurmddp, under plain
                python or torchrun: ./checkpoints.
            scheduler: a learning-rate scheduler, or anything else with `state_dict` and `load_state_dict`: tensors and
                plain values, the same on all ranks.
            sampler: a GlobalSampler, whose position is saved and loaded, too.
            scaler: the gradient scaler of fp16.
            keep: number of newest checkpoints to keep.
            keep_every: also keep each checkpoint whose step is a multiple of this.
            every_seconds: seconds between checkpoints, for `due`, `after` and `follow`.
            every_steps: steps between checkpoints, for the same.
            asynchronous: write in a thread while training continues.
            resume_from: checkpoint folders of older runs, newest first, used if `folder` has no checkpoint; default:
                those in $SLURMDDP_RESUME_FROM, separated by colons.
        """
        self._shared = shared.get()
        self._root = restoring.folder(folder)
        self._older = [Path(path) for path in resume_from] or earlier_checkpoints()
        bare = restoring.bare(model)
        parameter = next(bare.parameters(), None)
        device = self._shared.world.device if parameter is None else parameter.device
        self._world = dataclasses.replace(self._shared.world, device=device)
        if scaler is None:
            scaler = torch.amp.GradScaler(device.type, enabled=False)
        self._trained = state.Trained(bare, optimizer, scaler, scheduler)
        self._sampler = sampler
        self._every_seconds, self._every_steps = every_seconds, every_steps
        self._rejected: list[Path] = []
        self._failed: list[Failed] = []
        self._writer = Writer(
            self._root,
            self._world,
            keep=keep,
            keep_every=keep_every,
            asynchronous=asynchronous,
            config=hashlib.sha256(json.dumps(sys.argv).encode()).hexdigest(),
            rejected=self._rejected,
            mesh=restoring.mesh_of(bare, self._world.size),
        )
        optimizer.register_step_pre_hook(lambda *_: self._writer.copied())
        optimizer.register_step_post_hook(self._updated)
        self._updates = 0
        self._shared.finishing.append(self.finish)
        self._last: int | None = None
        self._seen: tuple[int, Mapping[str, Any]] | None = None
        self._clock_from = time.monotonic()

    def load(self) -> restoring.State | None:
        """Load the newest checkpoint that verifies. Every rank must call it.

        Returns:
            Step and extra state of the checkpoint; None if there is no checkpoint.

        Raises:
            UserError: the checkpoint is of another model, or no checkpoint of the older runs is good.
        """
        world = self._world
        self._shared.enter("start")
        choice, rejected = reader.find(world, self._shared, self._root, self._older)
        self._rejected += rejected
        if choice is None:
            return None
        restoring.adopt(self._shared, world, self._trained, self._sampler, choice)
        self._last = choice.step
        self._shared.step = choice.step
        return restoring.State(choice.step, choice.data.get("extra", {}), choice.path, choice.world)

    def resume(self) -> int:
        """Load like `load`, and return the number of steps done; 0 if there is no checkpoint."""
        found = self.load()
        return 0 if found is None else found.step

    def due(self, step: int) -> bool:
        """Return whether to save after `step`. The answer is the same on all ranks, and every rank must call it.

        With `every_seconds`, rank 0's clock decides, in an all-reduce as small as that of should_stop. While a
        checkpoint is being written, the answer is no. `every_steps` alone needs no all-reduce.
        """
        self._shared.enter("step", step)
        self._poll()
        by_clock = self._every_seconds is not None and self._shared.agree(self._is_time())[0]
        return by_clock or self._by_step(step)

    def after(self, step: int, extra: Mapping[str, Any] | None = None) -> bool:
        """Save after `step` if a checkpoint is due, or if the ranks must stop. Every rank must call it after each step.

        It makes one small all-reduce, which replaces those of `should_stop` and `due`.

        Args:
            step: number of steps done.
            extra: JSON values to save, see `save`.

        Returns:
            True, on all ranks, if the ranks must stop: everything is on disk, and the loop must end.
        """
        self._shared.enter("step", step)
        self._poll()
        self._seen = (step, extra or {})
        stop, by_clock = self._shared.agree_to_stop(self._is_time())
        if stop or by_clock or self._by_step(step):
            self.save(step, extra)
        if stop:
            self.finish()
        return stop

    def follow(self, loader: "Sized[T]") -> "tuple[int, Followed[T]]":
        """Call `resume`, then `after` for each batch of `loader`: for a loop that makes one step per batch.

        A step counts as done when the loop asks for the next batch; after a `break`, if the optimizer has made a step.
        If the ranks must stop, the loop raises SystemExit(0) when it asks for the next batch. So use it inside of
        `distributed`. A scheduler must step once per batch. (If yours steps once per epoch, call `after` at the end of
        each epoch instead, and count epochs as steps.)

        Returns:
            The number of steps done, and the loader to iterate over instead, epoch by epoch.

        >>> import tempfile, torch
        >>> from slurmddp.runtime import Checkpointer
        >>> folder = tempfile.TemporaryDirectory()
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> checkpointer = Checkpointer(model, optimizer, folder.name, every_steps=2)
        >>> step, batches = checkpointer.follow([torch.ones(2), torch.zeros(2), torch.ones(2)])
        >>> for rows in batches:
        ...     model(rows).sum().backward()
        ...     optimizer.step()
        ...     step += 1
        >>> checkpointer.finish()  # doctest: +ELLIPSIS
        checkpoint step-00000002, ...B in ... s, training waited ... s
        checkpoint step-00000003, ...B in ... s, training waited ... s
        """
        step = self.resume()
        return step, Followed(self, loader, step)

    def save(self, step: int, extra: Mapping[str, Any] | None = None) -> None:
        """Start saving the state after `step`. Every rank must call it.

        It waits for the save before. A step that was just saved or loaded is not saved again. If writing fails, this is
        only a warning as long as an older checkpoint exists.

        Args:
            step: number of steps done.
            extra: JSON values to save; those of rank 0 count.

        Raises:
            RuntimeFailure: a save failed, and there is no older checkpoint.
            UserError: `extra` is not JSON.
        """
        data = self._data(step, extra or {})
        self._shared.enter("checkpoint", step)
        for failed in self._settle():
            if not failed.older:
                raise RuntimeFailure(
                    f"no checkpoint could be written, and no older one exists: {failed.message}", shared=True
                )
        if step != self._last:
            share_buffers(self._trained.model)
            self._writer.begin(self._trained, step=step, data=data)
            self._last = step
        self._clock_from = time.monotonic()
        self._shared.enter("step")

    def finish(self) -> None:
        """Save the last step that `after` got, and wait until everything is on disk. Call it before the script exits.

        `distributed` calls it, too.

        Raises:
            RuntimeFailure: the last checkpoint could not be written.
        """
        if self._seen is not None and self._seen[0] != self._last:
            self.save(*self._seen)
        self._shared.enter("checkpoint")
        failed = self._settle()
        self._shared.enter("step")
        if failed:
            raise RuntimeFailure(
                f"the checkpoint of step {failed[-1].step} could not be written: {failed[-1].message}", shared=True
            )

    def _updated(self, *_: object) -> None:
        self._updates += 1

    def _is_time(self) -> bool:
        every = self._every_seconds
        due = every is not None and time.monotonic() - self._clock_from >= every
        return self._world.is_main and due and not self._writer.busy

    def _by_step(self, step: int) -> bool:
        return self._every_steps is not None and step % self._every_steps == 0

    def _data(self, step: int, extra: Mapping[str, Any]) -> dict[str, Any]:
        """data.json: nothing in it belongs to one rank."""
        position = None if self._sampler is None else dict(self._sampler.state_dict(step))
        data = {
            "step": step,
            "world": self._world.size,
            "global_batch": (position or {}).get("global_batch"),
            "samples": (position or {}).get("samples"),
            "optimizer": type(self._trained.optimizer).__name__,
            "groups": restoring.groups_of(self._trained.optimizer),
            "scheduler": restoring.name_of(self._trained.scheduler),
            "sampler": position,
            "extra": dict(extra),
        }
        try:
            return dict(json.loads(json.dumps(data, allow_nan=False)))
        except (TypeError, ValueError) as error:
            raise UserError(f"extra state must be JSON values: {error}") from error

    def _settle(self) -> list[Failed]:
        """Wait for what is being written. Returns the failures since the last call, the same on all ranks."""
        self._failed += reader.ended(self._shared, self._writer.finish())
        failed, self._failed = self._failed, []
        return failed

    def _poll(self) -> None:
        """Say what has been written meanwhile. Ranks learn of it some steps apart, so nothing follows from it yet."""
        self._failed += reader.ended(self._shared, self._writer.poll())


class Sized(Protocol[T_co]):
    """A loader: its batches, and how many there are."""

    def __iter__(self) -> Iterator[T_co]: ...

    def __len__(self) -> int: ...


class Followed(Generic[T]):
    """A loader's batches, with what has to be done after each step between them. See Checkpointer.follow."""

    def __init__(self, checkpointer: Checkpointer, loader: Sized[T], step: int) -> None:
        self._checkpointer, self._loader, self._step = checkpointer, loader, step

    def __iter__(self) -> Iterator[T]:
        checkpointer = self._checkpointer
        for batch in self._loader:
            before = checkpointer._updates
            try:
                yield batch
            except GeneratorExit:  # `break`: the other ranks may be elsewhere, so this one is only noted.
                if checkpointer._updates > before:
                    self._step += 1
                    checkpointer._seen = (self._step, {})
                raise
            self._step += 1
            if checkpointer.after(self._step):
                raise SystemExit(0)

    def __len__(self) -> int:
        return len(self._loader)
