"""Where a run continues: at the newest good checkpoint, or at step 0."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmddp.records.rank_events import WeightsLoaded
from slurmddp.runtime.checkpoint import init_weights, reader
from slurmddp.runtime.data.order import window_origin
from slurmddp.runtime.session import Session


@dataclass(frozen=True)
class Position:
    """Where an attempt starts: steps done before it, and samples used by them over all ranks.

    `samples` is not step * global batch where the global batch has been changed on the way. `rejected`:
    checkpoints that were refused. `origin`: the position from which windows of samples sorted by length count.
    """

    step: int
    samples: int
    rejected: tuple[Path, ...]
    origin: int = 0

    def samples_at(self, step: int, global_batch: int) -> int:
        """Samples used after `step`, counted from the run's beginning through all epochs."""
        return self.samples + (step - self.step) * global_batch

    def data_state(self, session: Session, step: int) -> dict[str, Any]:
        """data.json: where in the data the run is after `step`. Nothing in it belongs to one rank."""
        samples = self.samples_at(step, session.job.batch.total)
        return {
            "step": step,
            "epoch": samples // session.data.length,
            "samples": samples,
            "seed": session.job.train.seed,
            "length": session.data.length,
            "fingerprint": session.data.fingerprint,
            "global_batch": session.job.batch.total,
            "by_length": session.job.batch.by_length,
            "origin": self.origin,
            "world": session.world.size,
            "optimizer": session.job.train.optimizer.name,
        }


def resume(session: Session) -> Position:
    """Load the newest checkpoint that verifies, of this run's or else of the folders in resume_from.

    Where there is none, the weights that the job names to start from, if any. Every rank has to call it. Raises
    UserError where the checkpoint or the weights do not fit the job, and where another run was to be resumed of which
    no checkpoint is good.
    """
    here = session.world
    choice, rejected = reader.find(here, session, session.folder.checkpoints, [*map(Path, session.job.resume_from)])
    if choice is None:
        _load_given(session)
        return Position(0, 0, tuple(rejected))
    for remark in reader.check_data(choice, Position(0, 0, ()).data_state(session, 0)):
        session.console.warn(remark)
    origin = window_origin(
        choice.data["samples"],
        saved=(choice.data["global_batch"], choice.data.get("by_length"), choice.data.get("origin", 0)),
        total=session.job.batch.total,
        by_length=session.job.batch.by_length,
        where="train.batch: ",
    )
    todo = ". Restore train.model, or start a new run without --resume"
    reader.load(choice, session.trained, here, todo=todo)
    restored = reader.restore_randomness(choice, here, session.job.train.seed)
    reader.resumed(session, here, choice, restored=restored)
    return Position(choice.step, choice.data["samples"], tuple(rejected), origin)


def _load_given(session: Session) -> None:
    """The weights that the job names to start from. A run that continues has its own."""
    wanted = session.job.train.init_from
    if wanted is None:
        return
    here, module = session.world, session.parallel.module
    source = Path(here.on_main(lambda: str(init_weights.resolve_given(Path(wanted)))))
    loaded = here.together(lambda: init_weights.load_given(source, module, verify=False))
    session.console.say(f"weights    {loaded.tensors} tensors from {loaded.path}")
    for remark in loaded.remarks:
        session.console.say(f"           {remark}")
    session.record(WeightsLoaded(str(loaded.path), loaded.tensors))
