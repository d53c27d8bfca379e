"""The run of one attempt: resume, train, save, evaluate, end."""

import hashlib
import time
from itertools import chain

from slurmddp.runtime import console, schedule
from slurmddp.runtime.checkpoint import layout
from slurmddp.runtime.checkpoint.writer import Writer
from slurmddp.runtime.environment import Environment
from slurmddp.runtime.evaluation import Evaluation, evaluate, share_buffers
from slurmddp.runtime.folder import RunFolder
from slurmddp.runtime.job import Job
from slurmddp.runtime.journal import Events, JsonLines
from slurmddp.runtime.resume import resume
from slurmddp.runtime.session import Session, announce, prepare
from slurmddp.runtime.step import PRECISIONS, Outcome
from slurmddp.runtime.stop import StopFile
from slurmddp.runtime.world import World


def run(folder: RunFolder, job: Job, joined: World, place: Environment, events: Events) -> None:
    """Train until done or stopped, and leave the marker that says which. Errors pass through."""
    began = time.monotonic()
    if joined.on_main(folder.marker(joined.attempt).exists):
        # torchrun starts all ranks anew when one of them fails, even if that was after the clean end.
        console.Console(joined.is_main).say(f"attempt {joined.attempt} has already ended cleanly: nothing to do")
        return
    session = prepare(folder, job, joined, events)
    announce(session)
    Trainer(session, place, began).run()


class Trainer:
    """The loop and what it keeps from step to step. Make one, call `run` once."""

    def __init__(self, session: Session, place: Environment, began: float) -> None:
        """Resumes. `began`: time.monotonic() of the process's start."""
        self._session = session
        self._began = began
        self._place = place
        self._steps = session.job.train.steps
        self._start = resume(session)
        self._step = self._start.step
        self._writer = Writer(
            session.folder.checkpoints,
            session.world,
            keep=session.job.checkpoint.keep,
            config=hashlib.sha256(session.folder.job.read_bytes()).hexdigest(),
            rejected=list(self._start.rejected),
        )
        self._saved_at = time.monotonic()
        self._speed = console.Speed()

    def run(self) -> None:
        """Train, evaluate, and write the marker once everything else is on disk."""
        session = self._session
        stopped = self._train()
        held_out: Evaluation | None = None
        if stopped:
            reason = session.world.on_main(StopFile(self._place.stop_file).reason)
            session.console.say(f"stopping   at step {self._step} of {self._steps}: {reason}")
            session.record("stopping", step=self._step, reason=reason)
        else:
            reason = "all steps are done"
            if session.job.train.evaluate.at_end or self._evaluates_after(self._step):
                held_out = self._evaluate()
        state = "stopped" if stopped else "done"
        facts = {"state": state, "step": self._step, "steps": self._steps, "reason": reason}
        record = {**facts, "held_out": held_out.record() if held_out else None}
        session.world.on_main(lambda: self._write_marker(record))
        session.record("finished", **record)
        seconds = console.clock(time.monotonic() - self._began)
        session.console.say(f"{state:<10} step {self._step} of {self._steps}, {seconds} in all")

    def _train(self) -> bool:
        """Train to the last step or until asked to stop: whether it was that."""
        session, start, train = self._session, self._start, self._session.job.train
        if start.step >= self._steps:
            session.console.say(f"nothing to train: {start.step} steps are done, and {self._steps} are asked for")
            return False
        # One rank a node looks at the shared file system.
        stop = StopFile(self._place.stop_file if self._place.local_rank == 0 else None)
        trace = None
        if train.trace_samples:
            trace = JsonLines(session.folder.trace(session.world.attempt, session.world.rank))
        metrics = JsonLines(session.folder.metrics) if session.world.is_main else None
        micros = session.micro_batches(first_step=start.step, position=start.samples)
        first = next(micros)
        session.stepper.warm_up(first)
        micros = chain([first], micros)
        self._saved_at = time.monotonic()
        self._speed = console.Speed()
        for step in range(start.step + 1, self._steps + 1):
            rate = train.optimizer.lr * schedule.ratio(train.schedule, step - 1, self._steps)
            outcome = session.stepper.run(micros, step=step, rate=rate, stop=stop.seen(), save=self._save_is_due())
            self._step = step
            if trace is not None:
                trace.write({"step": step, "ids": outcome.ids})
            self._speed.add(session.job.batch.total, outcome.targets)
            if metrics is not None:
                self._log(metrics, rate, outcome)
            if self._saves_after(outcome):
                self._save()
            if outcome.stop and step < self._steps:
                return True
            if step < self._steps and self._evaluates_after(step):
                self._evaluate()
        return False

    def _log(self, metrics: JsonLines, rate: float, outcome: Outcome) -> None:
        """On rank 0: every log_every steps, and at the attempt's first and last."""
        session, step, unit = self._session, self._step, self._session.data.task.unit
        if step == self._start.step + 1:
            session.record("first_step", step=step, seconds=round(time.monotonic() - self._began, 3))
        elif step % session.job.train.log_every and step != self._steps and not outcome.stop:
            return
        samples_speed, targets_speed = self._speed.read()
        samples = self._start.samples_at(step, session.job.batch.total)
        metrics.write(
            {
                "time": round(time.time(), 3),
                "attempt": session.world.attempt,
                "step": step,
                "epoch": round(samples / session.data.length, 6),
                **outcome.means,
                "lr": rate,
                "grad_norm": outcome.grad_norm,
                "samples": samples,
                "samples_per_second": round(samples_speed, 3),
                f"{unit}_per_second": round(targets_speed, 3),
                **({"skipped": True} if outcome.skipped else {}),
            }
        )
        eta = self._speed.eta(self._steps - step)
        loss = outcome.means["loss"]
        session.console.say(
            console.progress(
                step=step, steps=self._steps, loss=loss, rate=rate, speed=targets_speed, unit=unit, eta=eta
            )
        )

    def _save_is_due(self) -> bool:
        """Whether the clock asks for a checkpoint. Rank 0's clock decides for all."""
        every = self._session.job.checkpoint.every_seconds
        return self._session.world.is_main and every is not None and time.monotonic() - self._saved_at >= every

    def _saves_after(self, outcome: Outcome) -> bool:
        wanted = self._session.job.checkpoint
        by_step = wanted.every_steps is not None and self._step % wanted.every_steps == 0
        return outcome.stop or outcome.save or by_step or (wanted.at_end and self._step == self._steps)

    def _save(self) -> None:
        session = self._session
        share_buffers(session.trained.model)
        data = self._start.data_state(session, self._step)
        saved = self._writer.save(session.trained, step=self._step, data=data)
        self._saved_at = time.monotonic()
        self._speed.pause(saved.seconds)
        session.console.say(f"checkpoint {saved.path.name}, {console.short(saved.bytes)}B in {saved.seconds:.2f} s")
        seconds = round(saved.seconds, 3)
        session.record("checkpoint_saved", step=self._step, seconds=seconds, bytes=saved.bytes, path=str(saved.path))

    def _evaluates_after(self, step: int) -> bool:
        every = self._session.job.train.evaluate.every
        return every is not None and step % every == 0

    def _evaluate(self) -> Evaluation | None:
        """Evaluate on all held-out samples, or those of `evaluate.batches` global batches; None without
        any.
        """
        session, job = self._session, self._session.job
        count = len(session.data.held_out)
        if job.train.evaluate.batches is not None:
            count = min(count, job.train.evaluate.batches * job.batch.total)
        if count == 0:
            session.console.say("held out   nothing is held out: no evaluation")
            return None
        result = evaluate(
            session.world,
            session.data.task,
            session.trained.model,
            session.data.held_out,
            count=count,
            micro=job.batch.micro,
            workers=job.train.workers,
            precision=PRECISIONS[job.train.precision],
        )
        self._speed.pause(result.seconds)
        unit = session.data.task.unit
        counted = f"over {result.count} {unit}"
        if result.count != result.samples:
            counted += f" in {result.samples} samples"
        session.console.say(
            f"held out   step {self._step}: loss {result.loss:.4f}{console.figures(result.figures)}, {counted}"
        )
        session.record("evaluated", step=self._step, seconds=round(result.seconds, 3), **result.record())
        return result

    def _write_marker(self, record: dict[str, object]) -> None:
        attempt = self._session.world.attempt
        marker = self._session.folder.marker(attempt)
        marker.parent.mkdir(parents=True, exist_ok=True)
        layout.write_json(marker, {**record, "attempt": attempt, "time": round(time.time(), 3)})
