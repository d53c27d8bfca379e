"""Saving: each rank copies its part of the state, and a thread writes it while training continues."""

import atexit
import dataclasses
import datetime
import secrets
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slurmddp.runtime import randomness
from slurmddp.runtime.checkpoint import saving, shards, state
from slurmddp.runtime.checkpoint.saving import Failed, Saved
from slurmddp.runtime.checkpoint.staging import Staging
from slurmddp.runtime.watch.process_exit import say
from slurmddp.runtime.world import World
from slurmddp.shared.checkpoint.checkpoints import Checkpoints

# A wait here is for somebody's disk, and gloo notices a peer that is gone without any limit.
_TIMEOUT = datetime.timedelta(minutes=60)

#: How long the end of a process waits for saves that were begun and not finished.
_AT_EXIT = 10.0

#: The threads that write, each with the warning for a process that ends before its thread does.
_writing: "weakref.WeakKeyDictionary[threading.Thread, str]" = weakref.WeakKeyDictionary()


@atexit.register
def _wait_at_exit() -> None:
    """Wait a little for saves under way, for a script that did not.

    A thread that returns from torch's C++ to an interpreter that has ended aborts the process (exit code -6). One that
    hangs in a disk, or waits for a rank that is gone, does not return: nobody has to wait for that to the end.
    """
    limit = time.monotonic() + _AT_EXIT
    for thread, warning in list(_writing.items()):
        thread.join(max(limit - time.monotonic(), 0))
        if thread.is_alive():
            say(warning)


class Writer:
    """Writes the checkpoints of one attempt. Every rank has to make one, and to close it.

    `root`: the folder of checkpoints. `keep`, `keep_every`, `rejected`: see Checkpoints.prune. `asynchronous`: whether
    training continues while a thread writes. `config`: hash of the job's description. `mesh`: ranks by dimension, for
    the manifest.
    """

    def __init__(
        self,
        root: Path,
        world: World,
        *,
        keep: int,
        keep_every: int | None = None,
        asynchronous: bool = True,
        config: str,
        rejected: list[Path],
        mesh: Mapping[str, int] | None = None,
    ) -> None:
        # It takes a second or more: here, so that the first save does not.
        import torch.distributed.checkpoint  # noqa: F401

        # A group of its own: the thread's collectives may meet neither the gradients' nor the main thread's.
        group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        assert group is not None  # None is for ranks outside the group; all are in it.
        self._world = dataclasses.replace(world, coordination=group)
        dimensions = dict(mesh or {"replicate": world.size})
        self._place = saving.Destination(Checkpoints(root), self._world, keep, keep_every, rejected, config, dimensions)
        self._asynchronous = asynchronous
        self._signature: list[object] | None = None
        self._plan: shards.Plan | None = None
        self._staging: Staging | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._ended: list[Saved | Failed] = []

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def prepare(self, trained: state.Trained) -> None:
        """Plan who writes what, and take the memory for the copies, once; every rank has to call it.

        Best after the first optimizer step, when all states exist: then no later step pays for it. `begin`
        does it where it was not done, or the tensors are other ones now.
        """
        self._join()
        tensors = self._world.together(lambda: state.collect(trained))
        self._prepare(tensors)

    def begin(self, trained: state.Trained, *, step: int, data: Mapping[str, Any]) -> float:
        """Start the checkpoint of `step`; every rank has to call it. `data`: the content of data.json.

        Waits for the one before. Returns the seconds that it took: a thread does the rest, unless the
        writer is synchronous. On a GPU the weights are still being copied: `copied` before they change.
        A failure to write is no exception: `poll` and `finish` tell of it.
        """
        began = time.monotonic()
        self._join()
        world = self._world
        tensors, scheduler = world.together(lambda: (state.collect(trained), state.pack_scheduler(trained)))
        changed = self._signature != _signature(tensors)
        looked = world.gather((changed, secrets.token_hex(4)))
        if any(other for other, _ in looked):
            self._prepare(tensors)
        assert self._plan is not None and self._staging is not None
        random = randomness.states(world.device)
        self._staging.fill(tensors, {f"model.{name}" for name, _ in trained.model.named_buffers()})
        task = saving.Task(step, dict(data), looked[0][1], random, scheduler, self._plan, self._staging, began)
        stall: list[float] = []
        # A daemon: the end of the process does not wait long for a disk, or for a rank that is gone.
        self._thread = threading.Thread(target=self._run, args=(task, stall), name=f"save-{step}", daemon=True)
        _writing[self._thread] = (
            f"rank {world.rank} on {world.node}: warning: the checkpoint of step {step} was still being written when "
            "the script ended, so it is not complete: call finish() of the Checkpointer before the end\n"
        )
        with self._lock:  # The thread needs it to tell how it ended, and how long we took.
            self._thread.start()
            stall.append(time.monotonic() - began)
        if self._asynchronous:
            return stall[0]
        self._join()
        return time.monotonic() - began

    def copied(self) -> None:
        """Let the weights change: waits for the copies. Call it between `begin` and the next change.

        On a GPU it is the stream that waits, not the caller; on CPU there is nothing to wait for.
        """
        if self._staging is not None:
            self._staging.hold()

    def poll(self) -> list[Saved | Failed]:
        """Return what has ended since it was last asked; no collectives. Ranks may learn of it some steps apart."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def finish(self) -> list[Saved | Failed]:
        """Wait for the save under way; then as `poll`."""
        self._join()
        return self.poll()

    def close(self) -> None:
        """Give memory and process group back, unless a save is still under way: that one is left to itself."""
        if self.busy:
            return
        self._drop_staging()
        dist.destroy_process_group(self._world.coordination)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _prepare(self, tensors: dict[str, torch.Tensor]) -> None:
        self._drop_staging()
        plan = shards.plan(tensors, self._world)
        self._staging = self._world.together(lambda: Staging(plan.own, tensors, self._world.device))
        self._plan, self._signature = plan, _signature(tensors)

    def _drop_staging(self) -> None:
        """Before new memory is taken, the old is given back."""
        if self._staging is not None:
            self._staging.close()
        self._plan = self._staging = self._signature = None

    def _run(self, task: saving.Task, stall: list[float]) -> None:
        ended = saving.save(self._place, task)
        with self._lock:
            if isinstance(ended, Saved):
                ended = dataclasses.replace(ended, stall=stall[0] if self._asynchronous else ended.seconds)
            self._ended.append(ended)


def _signature(tensors: Mapping[str, torch.Tensor]) -> list[object]:
    return [
        (name, tuple(value.shape), value.dtype, str(getattr(value, "placements", None)))
        for name, value in tensors.items()
    ]
