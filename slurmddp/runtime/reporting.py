"""What a run tells of its steps: metrics.jsonl, the console, stragglers."""

import time

from slurmddp.records.metrics import Metrics
from slurmddp.records.rank_events import Evaluated, FirstStep, LinksProbed, StepSkipped, Timing
from slurmddp.runtime import console
from slurmddp.runtime.evaluation import Evaluation
from slurmddp.runtime.journal import Journal
from slurmddp.runtime.measure import timing
from slurmddp.runtime.measure.peak import Utilisation
from slurmddp.runtime.measure.straggler_detection import Notice
from slurmddp.runtime.measure.stragglers import Stragglers
from slurmddp.runtime.resume import Position
from slurmddp.runtime.session import Session
from slurmddp.runtime.step import Outcome
from slurmddp.runtime.watch.failures import ProgressFile
from slurmddp.shared import batch

_SHOWN = 3


class Reporter:
    """Made on every rank, which all call `step` after each step; what is written, rank 0 writes."""

    def __init__(self, session: Session, start: Position, began: float) -> None:
        """`began`: time.monotonic() when the attempt began."""
        job, here = session.job, session.world
        self._session = session
        self._start = start
        self._began = began
        self._progress = ProgressFile(session.folder.progress, job.train.steps) if here.is_main else None
        self._tell(start.step)
        self._metrics = Journal(session.folder.metrics) if here.is_main else None
        mine = session.parallel.data
        share = len(batch.share(job.batch.total, mine.size, mine.rank, session.weights))
        self._stragglers = Stragglers(here, session.timer, samples=share * mine.size / job.batch.total)
        self._all = session.timer.reader()
        self._speed = console.Speed()
        self._utilisation = Utilisation(None, None, None)
        self._evaluation_seconds = 0.0
        self._computed = self._padding = self._skipped = self._row = 0
        self._total: dict[str, float] = {}
        self._trains_since = time.time()

    @property
    def wants_probe(self) -> bool:
        """Return whether rank 0 would like all ranks to time the links between hosts."""
        return self._stragglers.wants_probe

    def begin(self, utilisation: Utilisation) -> None:
        """Training begins: what it takes is counted from here. `utilisation`: what the machine could do."""
        self._utilisation = utilisation
        self._speed = console.Speed()
        self._trains_since = time.time()
        self._session.record(utilisation.event(self._start.step))

    def pause(self, seconds: float) -> None:
        """Seconds that have just passed count for no speed."""
        self._speed.pause(seconds)

    def step(self, outcomes: list[Outcome], *, last: bool) -> None:
        """After a step's `timer.end()`. Every rank has to call it.

        `outcomes`: those read since the last call, in order. `last`: the attempt ends with the last of them.
        """
        self._say(self._stragglers.step())
        if any(outcome.flags.probe for outcome in outcomes):
            report, notices = self._stragglers.probe()
            self._session.record(LinksProbed(report.host, round(report.factor, 2), report.text()))
            self._say(notices)
        for outcome in outcomes:
            self._outcome(outcome, last=last and outcome is outcomes[-1])

    def _outcome(self, outcome: Outcome, *, last: bool) -> None:
        session, step = self._session, outcome.step
        self._speed.add(session.job.batch.total, outcome.targets)
        self._computed += outcome.computed
        self._padding += outcome.padding
        if outcome.skipped:
            self._skipped += 1
            # After the first few of a row, a line each: the events have the rest.
            self._row += 1
            shown = outcome.skipped if self._row <= _SHOWN else f"{outcome.skipped.splitlines()[0]} (see events.jsonl)"
            session.console.warn(f"step skipped: {shown}")
            session.record(StepSkipped(step, outcome.skipped))
        else:
            self._row = 0
        self._tell(step)
        if self._metrics is not None:
            self._log(self._metrics, outcome, last=last)

    def left(self) -> None:
        """Training is left, however it ends: the breaker has to know how far it came."""
        if self._progress is not None:
            self._progress.flush()

    def evaluated(self, step: int, result: Evaluation) -> None:
        """Say what an evaluation gave."""
        session, unit = self._session, self._session.data.task.unit
        self._speed.pause(result.seconds)
        self._evaluation_seconds += result.seconds
        counted = f"over {result.count} {unit}"
        if result.count != result.samples:
            counted += f" in {result.samples} samples"
        session.console.say(
            f"validation step {step}: loss {result.loss:.4f}{console.figures(result.figures)}, {counted}"
        )
        session.record(Evaluated(step, round(result.seconds, 3), *result.record()))

    def close(self) -> None:
        """At a clean end, on every rank: each writes where its own time went."""
        self._stragglers.close()
        self._add_up()
        parts = {part: round(seconds, 3) for part, seconds in self._total.items()}
        self._session.events.write(Timing(parts))

    def _tell(self, step: int) -> None:
        if self._progress is not None:
            self._progress.tell(step)

    def _add_up(self) -> None:
        """Add the seconds by part since last time to the totals."""
        sums = self._all.window().sums
        if self._evaluation_seconds:
            sums[timing.EVALUATION] = sums.get(timing.EVALUATION, 0.0) + self._evaluation_seconds
            self._evaluation_seconds = 0.0
        for part, seconds in sums.items():
            self._total[part] = self._total.get(part, 0.0) + seconds

    def _say(self, notices: list[Notice]) -> None:
        for notice in notices:
            self._session.console.warn(f"straggler: {notice.text()}")
            self._session.record(notice.event())

    def _log(self, metrics: Journal, outcome: Outcome, *, last: bool) -> None:
        """Log every log_every steps, and the attempt's first and last; on rank 0."""
        session, steps, step = self._session, self._session.job.train.steps, outcome.step
        if step == self._start.step + 1:
            session.record(FirstStep(step, round(time.monotonic() - self._began, 3)))
        elif step % session.job.train.log_every and not last:
            return
        unit = session.data.task.unit
        samples_speed, targets_speed = self._speed.read()
        samples = self._start.samples_at(step, session.job.batch.total)
        self._add_up()
        facts: dict[str, object] = {
            "epoch": round(samples / session.data.length, 6),
            **outcome.means,
            "lr": outcome.rate,
            "grad_norm": outcome.grad_norm,
            "samples": samples,
            "samples_per_second": round(samples_speed, 3),
            f"{unit}_per_second": round(targets_speed, 3),
            **{name: round(value, 5) for name, value in self._utilisation.of(targets_speed).items()},
        }
        if self._computed:
            facts["padding"] = round(self._padding / self._computed, 5)
            self._computed = self._padding = 0
        if self._skipped:
            facts["skipped"] = self._skipped
            self._skipped = 0
        told = Metrics(step, time.time(), session.world.attempt, self._trains_since, self._total, facts)
        metrics.write(told.write())
        progress = console.progress(
            step=step,
            steps=steps,
            loss=outcome.means["loss"],
            rate=outcome.rate,
            speed=targets_speed,
            unit=unit,
            eta=self._speed.eta(steps - step),
        )
        session.console.say(progress)
