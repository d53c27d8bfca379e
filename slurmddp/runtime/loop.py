"""The run of one attempt: resume, train, save, evaluate, end."""

import time
from collections.abc import Iterator
from itertools import chain

from slurmddp.records.events import keys_of
from slurmddp.records.marker import DONE, STOPPED, Marker
from slurmddp.records.rank_events import Finished, Stopping
from slurmddp.runtime import console, optimizer
from slurmddp.runtime.checkpointing import Checkpointing
from slurmddp.runtime.data.loading import Micro
from slurmddp.runtime.environment import Environment
from slurmddp.runtime.errors import RuntimeFailure
from slurmddp.runtime.evaluation import Evaluation, evaluate
from slurmddp.runtime.housekeeping import collector
from slurmddp.runtime.job import Job
from slurmddp.runtime.journal import Events, Journal
from slurmddp.runtime.measure import peak
from slurmddp.runtime.measure.timing import CHECKPOINT, OTHER
from slurmddp.runtime.parallel.replicas import Agreement
from slurmddp.runtime.precision import PRECISIONS
from slurmddp.runtime.profiling import Profiling
from slurmddp.runtime.reporting import Reporter
from slurmddp.runtime.resume import resume
from slurmddp.runtime.session import Session, announce, prepare
from slurmddp.runtime.step import Outcome, StepFlags
from slurmddp.runtime.watch import failures, marker
from slurmddp.runtime.watch.stop import Stop
from slurmddp.runtime.watch.watch import Watch
from slurmddp.runtime.world import World
from slurmddp.shared.mesh import REPLICATE, TENSOR, groups
from slurmddp.shared.run_folder import RunFolder
from slurmddp.shared.units import clock


def run(
    folder: RunFolder, job: Job, joined: World, env: Environment, events: Events, watch: Watch | None = None
) -> None:
    """Train until done or stopped, and leave the marker that says which. Errors pass through.

    `watch`: told of progress, and asked whether to stop; without it, only the stop file is.
    """
    if joined.on_main(lambda: marker.ended(folder.marker(joined.attempt))):
        # torchrun starts all ranks anew when one of them fails, even if that was after the clean end.
        console.Console(joined.is_main).say(f"attempt {joined.attempt} is already over: nothing to do")
        return
    nodes = joined.gather(joined.node)
    if joined.is_main:
        failures.note_ranks(folder.path, nodes)
    trainer(folder, job, joined, env, events, watch).run()


def trainer(
    folder: RunFolder, job: Job, joined: World, env: Environment, events: Events, watch: Watch | None = None
) -> "Trainer":
    """Return everything made, and resumed where there is something to resume from. As for `run`."""
    watch = watch or Watch(env, Stop(env.stop_file if env.local_rank == 0 else None))
    session = prepare(folder, job, joined, events, watch)
    announce(session)
    return Trainer(session)


class Trainer:
    """The loop and what it keeps from step to step. Make one, call `run` once."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._began = time.monotonic()
        self._steps = session.job.train.steps
        self._start = resume(session)
        self._step = self._start.step
        self._stopped = False
        self._agreement = Agreement(session.world, session.parallel.module, groups(session.parallel.mesh)[REPLICATE])
        self._checkpointing = Checkpointing(session, self._start, self._agreement)
        self._reporter = Reporter(session, self._start, self._began)
        self._profiling = Profiling(session)

    def run(self) -> None:
        """Train, evaluate, and write the marker once everything else is on disk."""
        session, watch = self.session, self.session.watch
        for _ in self.steps():
            pass
        self._profiling.close(self._step)
        validation: Evaluation | None = None
        if not self._stopped and (session.job.train.evaluate.at_end or self._evaluates_after(self._step)):
            validation = self._evaluate()
            if self._stopped:
                self._save()
        reason = "all steps are done"
        if self._stopped:
            reason = watch.stop.agreed_reason(session.world)
            session.console.say(f"stopping   at step {self._step} of {self._steps}: {reason}")
            session.record(Stopping(self._step, reason))
        watch.enter("checkpoint")
        self._checkpointing.finish(self._step)
        watch.enter("end")
        state = STOPPED if self._stopped else DONE
        finished = Finished(state, self._step, self._steps, reason, validation.record() if validation else None)
        self._reporter.close()
        attempt = session.world.attempt
        told = keys_of(finished)["validation"]
        ended = Marker(state, reason, "", watch.stop.signal, self._step, self._steps, told)
        session.world.on_main(lambda: marker.write(session.folder.marker(attempt), attempt, ended))
        session.record(finished)
        seconds = clock(time.monotonic() - self._began)
        session.console.say(f"{state:<10} step {self._step} of {self._steps}, {seconds} in all")

    def steps(self) -> Iterator[Outcome]:
        """Train to the last step or until asked to stop, one step a `next()`."""
        try:
            yield from self._train()
        except RuntimeFailure as error:
            if error.shared:  # All ranks are here: what is being written may be finished before the run ends.
                self._checkpointing.settle()
            raise
        finally:
            self._reporter.left()

    def _train(self) -> Iterator[Outcome]:
        session, start, train = self.session, self._start, self.session.job.train
        watch = session.watch
        if start.step >= self._steps:
            session.console.say(f"nothing to train: {start.step} steps are done, train.steps is {self._steps}")
            return
        self._stopped = watch.stop.agreed(session.world)
        if self._stopped:
            return
        trace = None
        if train.trace_samples:
            path = session.folder.rank_trace(session.world.attempt, session.world.rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            trace = Journal(path)
        micros = watch.follow(
            session.micro_batches(session.order(start.origin), first_step=start.step, position=start.samples)
        )
        first = next(micros)
        watch.enter("warm-up", start.step)
        self._reporter.begin(self._warm_up(first))
        micros = chain([first], micros)
        with collector(train.gc_every) as collect:
            for step in range(start.step + 1, self._steps + 1):
                watch.enter("step", step)
                rate = session.rate * optimizer.ratio(train.schedule, step - 1, self._steps)
                outcomes = session.stepper.run(
                    micros, step=step, rate=rate, flags=self._flags(), before_update=self._checkpointing.before_update
                )
                self._step = step
                # A request of the step before is one of this step, too: all of it is met here, once.
                if self._uses(step) or any(any(known.flags) for known in outcomes):
                    outcomes += session.stepper.settle()
                for outcome in outcomes:
                    if trace is not None:
                        trace.write({"step": outcome.step, "ids": outcome.ids})
                self._after(outcomes)
                collect(step)
                yield from outcomes
                if self._stopped:
                    return

    def _warm_up(self, first: Micro) -> peak.Utilisation:
        """A warm-up pass. It also counts the FLOPs per target.

        It runs uncompiled. A second one compiles the model, where that is wanted: the first step would take that long.
        """
        session, targets = self.session, 0

        def once() -> None:
            nonlocal targets
            targets = session.stepper.warm_up(first)

        if TENSOR in session.parallel.mesh:
            once()  # The first time, DTensor runs operators without data to learn shapes: they would be counted.
        flops = peak.count_flops(once, compiled=session.job.train.compile)
        if session.job.train.compile:
            once()
        targets = targets if session.parallel.data.counts else 0
        return peak.utilisation(session.world, PRECISIONS[session.job.train.precision], flops, targets)

    def _flags(self) -> StepFlags:
        return StepFlags(
            stop=self.session.watch.stop.wanted(),
            save=self._checkpointing.is_due(),
            give_up=self._checkpointing.lost is not None,
            probe=self._reporter.wants_probe,
            profile=self._profiling.wanted,
        )

    def _uses(self, step: int) -> bool:
        """Return whether a step is the last, or its state is to be saved or evaluated: its numbers are read at once."""
        return step == self._steps or self._checkpointing.wanted_after(step) or self._evaluates_after(step)

    def _after(self, outcomes: list[Outcome]) -> None:
        """Do what follows a step: compare the replicas, save, report, evaluate. `outcomes`: those that are new."""
        session, step = self.session, self._step
        flags = StepFlags(*map(any, zip(*(outcome.flags for outcome in outcomes), strict=True)))
        if flags.give_up:
            self._checkpointing.settle()
            why = self._checkpointing.lost
            raise RuntimeFailure(f"no checkpoint could be written, and no older one exists: {why}", shared=True)
        self._agreement.check()
        every = session.job.train.replica_check_every
        if every is not None and step % every == 0:
            self._agreement.begin(step)
        if step == self._start.step + 1:
            session.watch.enter("start")
            self._checkpointing.prepare()
            session.timer.mark(OTHER)
            session.watch.enter("step")
        self._stopped = flags.stop and step < self._steps
        if self._stopped or step == self._steps:
            if self._stopped or self._checkpointing.wanted_after(step):
                self._save()
        elif flags.save or self._checkpointing.wanted_after(step):
            self._save(changed_in=session.stepper.changed_in)
        self._checkpointing.poll()
        session.timer.mark(CHECKPOINT)
        session.timer.end()
        self._reporter.step(outcomes, last=self._stopped or step == self._steps)
        self._profiling.step(step, flags.profile)
        if not self._stopped and step < self._steps and self._evaluates_after(step):
            self._evaluate()
            if self._stopped:
                self._save()

    def _save(self, changed_in: int | None = None) -> None:
        self.session.watch.enter("checkpoint")
        self._reporter.pause(self._checkpointing.save(self._step, changed_in))

    def _evaluates_after(self, step: int) -> bool:
        every = self.session.job.train.evaluate.every_steps
        return every is not None and step % every == 0

    def _evaluate(self) -> Evaluation | None:
        """Evaluate on the whole validation set, or on `evaluate.batches` global batches of it.

        None without any, and where the ranks have given it up since they are asked to stop.
        """
        session, job = self.session, self.session.job
        count = len(session.data.validation)
        if job.train.evaluate.batches is not None:
            count = min(count, job.train.evaluate.batches * job.batch.total)
        if count == 0:
            session.console.say("validation the validation set is empty: no evaluation")
            return None
        result = evaluate(
            session.world,
            session.data.task,
            session.parallel.module,
            session.data.validation,
            count=count,
            micro=job.batch.micro,
            workers=job.train.workers,
            precision=PRECISIONS[job.train.precision],
            lockstep=session.parallel.lockstep,
            data=session.parallel.data,
            watch=session.watch,
        )
        session.parallel.rest()
        if result is None:
            self._stopped = True
        else:
            self._reporter.evaluated(self._step, result)
        return result
