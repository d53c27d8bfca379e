"""Checkpoints of a script's own training."""

import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn

from slurmddp.runtime import console, mesh
from slurmddp.runtime.checkpoint import layout, reader, shards, state
from slurmddp.runtime.checkpoint.writer import Failed, Saved, Writer
from slurmddp.runtime.errors import RuntimeFailure, UserError
from slurmddp.runtime.evaluation import share_buffers
from slurmddp.runtime.library import groups, shared


@dataclass(frozen=True)
class State:
    """What was loaded beside the tensors. `ranks`: how many had saved it."""

    step: int
    extra: dict[str, Any]
    path: Path
    ranks: int


class Positioned(Protocol):
    """What knows where in the data a step is: GlobalSampler does."""

    def state_dict(self, step: int) -> Mapping[str, Any]:
        """JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        ...


class Checkpointer:
    """Saves and loads a model, its optimizer, random states, and a few numbers. Every rank has to make one.

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
    checkpoint step-00000002, ...B in ... s, the step held up for ... s
    >>> model, optimizer = make()
    >>> state = Checkpointer(model, optimizer, folder.name).load()  # doctest: +ELLIPSIS
    resumed    step 2 from ...step-00000002, saved by 1 rank
    >>> state.step, state.extra, torch.equal(model.weight, saved)
    (2, {'best': 0.5}, True)

    `save` copies this rank's part of the state, and a thread writes it while training goes on: each file with its
    sha256, then the folder gets its name, then COMPLETE. A kill at any moment leaves the older ones as they were.
    `load` takes the newest one that verifies, on any number of ranks, and says why it refuses others. The model may be
    plain, in DDP, compiled, or sharded by FSDP2 (fully_shard), and another of these when it is loaded.

    Weights, buffers, the optimizer's state and its groups' options (as they were, with the learning rate that a
    scheduler had set) come back; so do random states where the number of ranks is the same. A scheduler of your own:
    `save(step, {"scheduler": scheduler.state_dict()})`, and `load_state_dict` of it afterwards.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        folder: str | Path | None = None,
        *,
        sampler: Positioned | None = None,
        scaler: torch.amp.GradScaler | None = None,
        keep: int = 3,
        keep_every: int | None = None,
        every_seconds: float | None = None,
        every_steps: int | None = None,
        asynchronous: bool = True,
        resume_from: Sequence[str | Path] = (),
    ) -> None:
        """`folder`: of the checkpoints; by default that of the run, in $SLURMDDP_RUN. `sampler`: saved and loaded with
        the rest. `keep`: the newest so many stay, and `keep_every`: each whose step is a multiple of it.
        `resume_from`: older runs' folders of checkpoints, newest first, to load from while there is none in `folder`;
        by default those in $SLURMDDP_RESUME_FROM (a colon between them).

        Raises UserError without a folder.
        """
        self._shared = shared.get()
        self._root = _folder(folder)
        self._older = [Path(path) for path in resume_from] or _resume_from()
        bare = _bare(model)
        parameter = next(bare.parameters(), None)
        device = self._shared.world.device if parameter is None else parameter.device
        self._world = dataclasses.replace(self._shared.world, device=device)
        if scaler is None:
            scaler = torch.amp.GradScaler(device.type, enabled=False)
        self._trained = state.Trained(bare, optimizer, scaler)
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
            mesh=_mesh(bare, self._world.size),
        )
        optimizer.register_step_pre_hook(lambda *_: self._writer.copied())
        self._shared.finishing.append(self.finish)
        self._last: int | None = None
        self._clock_from = time.monotonic()

    def load(self) -> State | None:
        """Load the newest checkpoint that verifies; None where there is none. Every rank has to call it.

        Raises UserError where the model is another one.
        """
        world = self._world
        self._shared.enter("start")
        world.on_main(lambda: layout.remove_leftovers(self._root, world.attempt))
        choice, rejected = world.on_main(self._choose)
        self._rejected += rejected
        if choice is None:
            if rejected:
                self._shared.console.warn("no good checkpoint is left: starting from the beginning")
            return None
        self._adopt(choice)
        self._last = choice.step
        self._shared.step = choice.step
        return State(choice.step, choice.data.get("extra", {}), choice.path, choice.world)

    def resume(self) -> int:
        """`load`, and the number of steps that are done: 0 where there is no checkpoint."""
        found = self.load()
        return 0 if found is None else found.step

    def due(self, step: int) -> bool:
        """Whether to save after `step`, the same on all ranks, which all have to ask.

        With `every_seconds`, rank 0's clock decides, in a reduction as small as that of should_stop; not before the
        one that is being written is done. `every_steps` alone needs none.
        """
        self._shared.enter("step", step)
        self._poll()
        by_clock = self._every_seconds is not None and self._shared.agree(self._is_time())[0]
        return by_clock or self._by_step(step)

    def after(self, step: int, extra: Mapping[str, Any] | None = None) -> bool:
        """What a loop has to do after each step: save where it is due, or where the ranks were asked to stop.

        True in that case, on all ranks: everything is on disk then, and the loop has to end. One small reduction, in
        place of those of `should_stop` and `due`.
        """
        self._shared.enter("step", step)
        self._poll()
        stop, by_clock = self._shared.agree_to_stop(self._is_time())
        if stop or by_clock or self._by_step(step):
            self.save(step, extra)
        if stop:
            self.finish()
        return stop

    def save(self, step: int, extra: Mapping[str, Any] | None = None) -> None:
        """Begin to save the state after `step`, with rank 0's `extra`: JSON values. Every rank has to call it.

        Waits for the save before this one. A step that was saved or loaded last is not saved again. A failure to write
        is a warning while an older checkpoint is there, and RuntimeFailure where none is. Raises UserError where
        `extra` is no JSON.
        """
        data = self._data(step, extra or {})
        self._shared.enter("checkpoint", step)
        for failed in self._settle():
            if not failed.older:
                raise RuntimeFailure(f"no checkpoint could be written, and there is no older one: {failed.message}")
        if step != self._last:
            share_buffers(self._trained.model)
            self._writer.begin(self._trained, step=step, data=data)
            self._last = step
        self._clock_from = time.monotonic()
        self._shared.enter("step")

    def finish(self) -> None:
        """Wait until everything is on disk: before the script ends. `distributed` does it, too.

        Raises RuntimeFailure where the last checkpoint could not be written.
        """
        self._shared.enter("checkpoint")
        failed = self._settle()
        self._shared.enter("step")
        if failed:
            raise RuntimeFailure(
                f"the checkpoint of step {failed[-1].step} could not be written: {failed[-1].message}", shared=True
            )

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
            "groups": groups.options(self._trained.optimizer),
            "sampler": position,
            "extra": dict(extra),
        }
        try:
            return dict(json.loads(json.dumps(data, allow_nan=False)))
        except (TypeError, ValueError) as error:
            raise UserError(f"what is saved beside the tensors has to be JSON values: {error}") from error

    def _choose(self) -> tuple[reader.Choice | None, list[Path]]:
        """On rank 0."""
        rejected: list[Path] = []

        def note(one: layout.Rejected) -> None:
            rejected.append(one.folder)
            self._shared.console.warn(f"checkpoint refused: {one}; looking for the one before")
            self._shared.record("checkpoint_rejected", path=str(one.folder), file=one.file, why=one.why)

        return reader.choose([self._root, *self._older], note), rejected

    def _adopt(self, choice: reader.Choice) -> None:
        """Load in place, and say so."""
        world, trained = self._world, self._trained
        stored = world.together(lambda: shards.stored(choice.path))
        try:
            state.check(trained, stored)
            groups.check(trained.optimizer, choice.data)
            if self._sampler is not None and choice.data.get("sampler") is not None:
                self._sampler.load_state_dict(choice.data["sampler"])
        except UserError as error:
            raise UserError(f"cannot resume from {choice.path}: {error}", shared=True) from error
        tensors = state.prepare(trained, stored)
        world.together(lambda: shards.read(choice.path, tensors))
        state.adopt(trained, tensors)
        groups.restore(trained.optimizer, choice.data)
        restored = reader.restore_randomness(choice, world, 0)
        say, were = self._shared.console.say, choice.world
        say(f"resumed    step {choice.step} from {choice.path}, saved by {were} rank{'s' * (were > 1)}")
        if not restored:
            say(f"           the ranks were {were} and are {world.size}: their random states are new ones")
        self._shared.record(
            "resumed",
            step=choice.step,
            path=str(choice.path),
            from_world=were,
            samples=choice.data.get("samples"),
            random_states_restored=restored,
        )

    def _settle(self) -> list[Failed]:
        """Wait for what is being written, and say how it went. Returns the failures since the last call: the same on
        all ranks.
        """
        self._report(self._writer.finish())
        failed, self._failed = self._failed, []
        return failed

    def _poll(self) -> None:
        """Say what has been written meanwhile. Ranks learn of it some steps apart, so nothing follows from it yet."""
        self._report(self._writer.poll())

    def _report(self, results: Sequence[Saved | Failed]) -> None:
        now = self._shared
        for result in results:
            if isinstance(result, Saved):
                now.console.say(
                    f"checkpoint {result.path.name}, {console.short(result.bytes)}B in {result.seconds:.2f} s, "
                    f"the step held up for {result.stall:.2f} s"
                )
                facts = {"seconds": round(result.seconds, 3), "stall": round(result.stall, 4), "bytes": result.bytes}
                now.record("checkpoint_saved", step=result.step, **facts, path=str(result.path))
                continue
            if result.fatal:
                raise RuntimeFailure(f"the checkpoint of step {result.step} could not be written: {result.message}")
            self._failed.append(result)
            now.console.warn(f"the checkpoint of step {result.step} could not be written: {result.message}")
            now.record("checkpoint_failed", step=result.step, why=result.message, older=result.older)


def _folder(given: str | Path | None) -> Path:
    if given is not None:
        return Path(given)
    run = shared.run_folder()
    if run is None:
        raise UserError(
            "Checkpointer: there is no run that it belongs to (SLURMDDP_RUN is not set): name a folder, "
            "Checkpointer(model, optimizer, folder=...)"
        )
    return run.checkpoints


def _resume_from() -> list[Path]:
    return [Path(path) for path in os.environ.get("SLURMDDP_RESUME_FROM", "").split(":") if path]


def _bare(model: nn.Module) -> nn.Module:
    """The script's own module, without DDP and torch.compile around it."""
    inner: Any = model
    while True:
        if isinstance(inner, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = inner.module
        elif hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        else:
            return cast(nn.Module, inner)


def _mesh(model: nn.Module, size: int) -> dict[str, int]:
    """How the parameters lie over the ranks, for the manifest."""
    shapes = [tuple(item.device_mesh.shape) for item in model.parameters() if hasattr(item, "device_mesh")]
    return mesh.sizes(size, None, shapes[0][-1] if shapes and size % shapes[0][-1] == 0 else 1)
