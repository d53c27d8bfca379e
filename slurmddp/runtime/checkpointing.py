"""When checkpoints are made, and what is said of them."""

import hashlib
import time
from collections.abc import Sequence

from slurmddp.runtime.checkpoint import reader
from slurmddp.runtime.checkpoint.saving import Failed, Saved
from slurmddp.runtime.checkpoint.writer import Writer
from slurmddp.runtime.errors import RuntimeFailure
from slurmddp.runtime.evaluation import share_buffers
from slurmddp.runtime.parallel.replicas import Agreement
from slurmddp.runtime.resume import Position
from slurmddp.runtime.session import Session


class Checkpointing:
    """The checkpoints of one attempt. All ranks call its methods at the same steps, but for `poll` and `is_due`."""

    def __init__(self, session: Session, start: Position, agreement: Agreement) -> None:
        wanted = session.job.checkpoint
        self._session = session
        self._start = start
        self._agreement = agreement
        self._writer = Writer(
            session.folder.checkpoints,
            session.world,
            keep=wanted.keep,
            keep_every=wanted.keep_every,
            asynchronous=wanted.asynchronous,
            config=hashlib.sha256(session.folder.job_json.read_bytes()).hexdigest(),
            rejected=list(start.rejected),
            mesh=session.parallel.mesh,
        )
        self._begun = self._safe = start.step
        self._clock_from = time.monotonic()
        self.lost: str | None = None
        """Why a checkpoint could not be written, where there is no older one either: the run has to end."""

    def prepare(self) -> None:
        """After the first step: what a save needs once, so that no later step waits for it."""
        self._writer.prepare(self._session.trained)
        self._clock_from = time.monotonic()

    def before_update(self) -> None:
        """Before weights change: what is still being copied from them has to be done."""
        self._writer.copied()

    def is_due(self) -> bool:
        """Return whether the clock asks for a checkpoint: rank 0's, which puts off while one is being written."""
        every = self._session.job.checkpoint.every_seconds
        due = every is not None and time.monotonic() - self._clock_from >= every
        return self._session.world.is_main and due and not self._writer.busy

    def wanted_after(self, step: int) -> bool:
        """Return whether the job asks for a checkpoint after this step, whatever the clock says."""
        wanted, steps = self._session.job.checkpoint, self._session.job.train.steps
        by_step = wanted.every_steps is not None and step % wanted.every_steps == 0
        return by_step or (wanted.at_end and step == steps)

    def save(self, step: int, changed_in: int | None = None) -> float:
        """Begin a checkpoint of the state after `step`. Returns the seconds that it held up the training.

        `changed_in`: the last step that changed the weights, all later ones having been skipped; nothing is saved where
        the last checkpoint has it: the same state again and again would push out the good ones from before.
        Raises ReplicasDifferError, and saves nothing, where the ranks' parameters are not the same.
        """
        if step == self._begun or (changed_in is not None and changed_in <= self._begun):
            return 0.0
        began = time.monotonic()
        session = self._session
        if session.job.train.replica_check_every is not None:
            self._agreement.begin(step)
            self._agreement.check()
        share_buffers(session.trained.model)
        self._writer.begin(session.trained, step=step, data=self._start.data_state(session, step))
        self._begun = step
        self._clock_from = time.monotonic()
        self.poll()
        return time.monotonic() - began

    def poll(self) -> None:
        """Say what has been written, or could not be, since last time."""
        self._report(self._writer.poll())

    def settle(self) -> None:
        self._report(self._writer.finish())

    def finish(self, step: int) -> None:
        """Wait for what is being written. Where the last save failed, save the present state, of `step`, instead.

        Raises RuntimeFailure on all ranks where that fails, too.
        """
        self.settle()
        if self._safe == self._begun:
            return
        self._begun = self._safe
        self.save(step)  # under its own step: the state that could not be written has changed since
        self.settle()
        if self._safe != step:
            raise RuntimeFailure(f"the last state, of step {step}, could not be written (see above)", shared=True)

    def _report(self, results: Sequence[Saved | Failed]) -> None:
        for failed in reader.ended(self._session, results):
            if not failed.older:
                self.lost = self.lost or failed.message
        for result in results:
            if isinstance(result, Saved):
                self._safe = result.step
