"""The order of the measurements. All are of rank 0's choice, which the others hear of when they join it."""

import json
from collections.abc import Mapping

import torch

from slurmddp.records.events import keys_of
from slurmddp.records.marker import DONE, Marker
from slurmddp.records.rank_events import Finished
from slurmddp.records.tuning import REQUEST, RESULT, Order, Point, Trial, Tuned, read_order
from slurmddp.runtime import console
from slurmddp.runtime.environment import Environment
from slurmddp.runtime.errors import RuntimeFailure, UserError
from slurmddp.runtime.job import Job
from slurmddp.runtime.journal import Events
from slurmddp.runtime.session import Session, prepare
from slurmddp.runtime.tune import memory, steps
from slurmddp.runtime.tune.worlds import Worlds
from slurmddp.runtime.watch import marker
from slurmddp.runtime.watch.watch import Watch
from slurmddp.runtime.world import World
from slurmddp.shared import batch, tuning
from slurmddp.shared.files import write_whole
from slurmddp.shared.mesh import kind
from slurmddp.shared.run_folder import RunFolder
from slurmddp.shared.units import human

#: Seconds of a step beyond which no larger micro batch is tried.
_SLOWEST = 15.0
#: Passes of a step that is tried: gradients add up, as they do in training.
_PASSES = 2
_OFF_ON = {False: "off", True: "on"}


class Tuner:
    """Make one on each rank, call `run` once. What rank 0 has measured so far is written after each part."""

    def __init__(self, folder: RunFolder, job: Job, env: Environment, events: Events, watch: Watch) -> None:
        self._folder, self._job, self._env, self._events, self._watch = folder, job, env, events, watch
        self._order: Order = read_order((folder.path / REQUEST).read_text(encoding="utf-8"))
        self._worlds = Worlds(env, timeout=job.timeouts.collective)
        self._say = console.Console(env.rank == 0).say
        self._found = Tuned("", job.batch.total, self._order.margin)

    def run(self) -> World:
        """Measure, and leave result and marker behind. Returns the group of all ranks, which is still joined."""
        everybody = self._join(self._env.world)
        assert everybody is not None
        nodes = everybody.gather(everybody.node)
        sizes = _sizes(nodes)
        if (alone := self._join(1)) is not None:
            self._alone(alone, most=-(-self._job.batch.total // sizes[0]))
        for size in sizes:
            if (world := self._join(size)) is not None:
                self._together(world, len(set(nodes[:size])), nodes, last=size == sizes[-1])
        assert world is not None
        self._end(world)
        return world

    def _join(self, size: int) -> World | None:
        if self._watch.stop.wanted():
            raise RuntimeFailure("asked to stop before everything was measured")
        self._watch.enter("tune", size)
        return self._worlds.join(size)

    def _session(self, world: World, *, recompute: bool, shard: int = 1, compiled: bool = True) -> Session:
        job = steps.shaped(self._job, recompute=recompute, shard=shard, compiled=compiled)
        return prepare(self._folder, job, world, self._events, self._watch)

    def _add(self, **found: object) -> None:
        """Keep what was measured; on rank 0 in the file, too."""
        self._found = self._found._replace(**found)  # type: ignore[arg-type]
        if self._env.rank == 0:
            write_whole(self._folder.path / RESULT, json.dumps(self._found.write()) + "\n")

    def _note(self, text: str) -> None:
        self._say(f"note       {text}")
        self._add(notes=(*self._found.notes, text))

    # --- rank 0 alone

    def _alone(self, world: World, most: int) -> None:
        """Find the largest micro batch, without activation checkpointing and with it; and how fast the loader is."""
        meter = memory.Meter(world.device, self._order.memory)
        self._add(device=_device(world), limit=meter.limit)
        if meter.limit is None:
            self._note(
                "the largest micro batch that fits is not known: a CPU has no memory of its own; set --memory SIZE"
            )
        for recompute in (False, True):
            try:
                self._try_all(world, meter, most, recompute=recompute)
            except UserError as error:
                self._note(str(error))
            except RuntimeError as error:
                if not memory.is_out_of_memory(error):
                    raise
                self._note("the model itself does not fit into the memory of one rank")
                return
            meter.reset()
        if not any(trial.fits for trial in self._found.trials):
            self._note("not even a micro batch of 1 fits into the free memory of one rank")

    def _describe(self, session: Session) -> None:
        chosen = self._job.train.optimizer
        size = memory.parameters(session)
        self._add(parameters=size, state=tuning.state_bytes(size, chosen.name, chosen.momentum))
        loading = steps.resized(session, self._job.batch.total, min(self._job.batch.micro, self._job.batch.total))
        self._add(loader=steps.loader_speed(loading))
        self._say(f"loader     {self._found.loader:.4g} samples/s on rank 0 alone")

    def _try_all(self, world: World, meter: memory.Meter, most: int, *, recompute: bool) -> None:
        """Raises RuntimeError if not even the model fits, UserError if it has nothing to recompute."""
        session = self._session(world, recompute=recompute, compiled=False)
        if not recompute:
            self._describe(session)
        tried: list[Trial] = []
        slow = False

        def fits(micro: int) -> bool:
            nonlocal slow, session
            if slow or self._beyond(tried, micro, meter.limit):
                return False
            trial = self._try(session, meter, micro, recompute=recompute)
            tried.append(trial)
            self._add(trials=(*self._found.trials, trial))
            if trial.samples_per_second is None:
                # DDP takes no further pass after one that failed.
                del session
                meter.reset()
                session = self._session(world, recompute=recompute, compiled=False)
            elif micro * _PASSES / trial.samples_per_second > _SLOWEST:
                slow = True
                self._note(f"no micro batch above {micro} was tried: a step of two takes more than {_SLOWEST:.0f} s")
            return trial.fits

        if tuning.largest(fits, most) > 1:
            one, two = (next(steps.same_again(session, micro, 1)) for micro in (1, 2))
            kept = memory.activations(session, one, two)
            self._add(activations={**self._found.activations, _OFF_ON[recompute]: kept})

    def _beyond(self, tried: list[Trial], micro: int, limit: int | None) -> bool:
        """Return whether memory would run out if it grows on: a CPU's process would be killed, not told."""
        peaks = [(trial.micro, trial.peak) for trial in tried if trial.peak is not None]
        if self._found.device != "cpu" or limit is None or len(peaks) < 2:
            return False
        (less, low), (more, high) = sorted(peaks)[-2:]
        return high + (micro - more) * (high - low) / (more - less) > limit

    def _try(self, session: Session, meter: memory.Meter, micro: int, *, recompute: bool) -> Trial:
        """Make some steps with a micro batch, and look at the memory that they needed."""
        meter.reset()
        trial = Trial(micro, recompute, False)
        try:
            session = steps.resized(session, _PASSES * micro, micro)
            micros = steps.same_again(session, micro, _PASSES)
            steps.run(session, micros, range(1, 3))
            once = steps.run(session, micros, range(3, 4))
            more = min(10, int(0.5 / once))
            seconds = (once + steps.run(session, micros, range(4, 4 + more))) / (1 + more)
        except RuntimeError as error:
            if not memory.is_out_of_memory(error):
                raise
        else:
            needed = meter.needed()
            fits = meter.limit is None or needed <= (1 - self._order.margin) * meter.limit
            trial = Trial(micro, recompute, fits, _PASSES * micro / seconds, meter.peak())
        session.parallel.clear_gradients()
        speed = f"{trial.samples_per_second:.4g} samples/s" if trial.samples_per_second else "out of memory"
        size = f", {human(trial.peak)}" if trial.peak is not None else ""
        self._say(f"micro {micro:<5}activation checkpointing {_OFF_ON[recompute]}: {speed}{size}")
        return trial

    # --- several ranks

    def _together(self, world: World, count: int, nodes: list[str], *, last: bool) -> None:
        """Train with the whole global batch on some nodes; on all of them also sharded, and for the noise scale."""
        trials = [Trial(*each) for each in world.broadcast([list(each) for each in self._found.trials])]
        micro, recompute = choice(trials, self._job.batch.total, world.size)
        if micro:
            self._measure(world, count, micro, recompute=recompute, noise=last)
        if last and world.size > 1:
            inside = nodes.count(nodes[0])
            shard = inside if inside > 1 and world.size % inside == 0 else world.size
            self._measure(world, count, micro or 1, recompute=recompute, shard=shard)

    def _measure(
        self, world: World, count: int, micro: int, *, recompute: bool, shard: int = 1, noise: bool = False
    ) -> None:
        total = self._job.batch.total
        memory.release(world.device)  # the model before
        session = steps.resized(self._session(world, recompute=recompute, shard=shard), total, micro)
        meter = memory.Meter(world.device, None)
        meter.reset()
        seconds, parts = steps.timed(session)
        peak = max(world.gather(meter.peak() if world.device.type == "cuda" else 0)) or None
        point = Point(
            nodes=count,
            ranks=world.size,
            samples_per_second=total / seconds,
            parallel=kind(session.parallel.mesh),
            micro=micro,
            accumulation=batch.accumulation(total, micro, world.size, session.weights),
            recompute=recompute,
            parts={part: round(value, 6) for part, value in parts.items()},
            peak=peak,
            all_reduce=steps.all_reduce(world, memory.parameters(session)),
        )
        self._add(points=(*self._found.points, point))
        self._say(
            f"{point.parallel:<11}ranks {world.size}, nodes {count}: {point.samples_per_second:.4g} samples/s, "
            f"micro {micro} x accumulation {point.accumulation}"
        )
        if noise:
            self._noise(session)

    def _noise(self, session: Session) -> None:
        if session.job.train.precision == "fp16":
            self._note("the gradient noise scale is not known: small gradients of fp16 are lost without their scale")
            return
        norms, small, big = steps.gradient_norms(session, self._found.points[-1].samples_per_second)
        self._add(noise=tuple(norms), noise_batches=(small, big))

    def _end(self, world: World) -> None:
        attempt, why = world.attempt, "all is measured"
        finished = Finished(DONE, 0, 0, why, None)
        ended = Marker(DONE, why, "", self._watch.stop.signal, 0, 0, keys_of(finished)["validation"])
        world.on_main(lambda: marker.write(self._folder.marker(attempt), attempt, ended))
        if world.is_main:
            self._events.write(finished)


def choice(trials: list[Trial], total: int, ranks: int) -> tuple[int, bool]:
    """Return the micro batch and whether to recompute activations, for the whole global batch on so many ranks.

    The fastest, or a smaller micro batch that is about as fast; 0 if none fits.
    """
    best: dict[bool, Mapping[int, float]] = {}
    for each in trials:
        if each.fits and each.samples_per_second and each.micro <= -(-total // ranks):
            best[each.recompute] = {**best.get(each.recompute, {}), each.micro: each.samples_per_second}
    if not best:
        return 0, True
    recompute = max(best, key=lambda each: max(best[each].values()))
    return tuning.balanced(tuning.fast_enough(best[recompute]), total, ranks), recompute


def _sizes(nodes: list[str]) -> list[int]:
    """Return the numbers of ranks to measure: of 1, 2, 4, ... nodes and all; of a single node 1, 2, 4, ... ranks."""
    names = list(dict.fromkeys(nodes))
    steps_of = [nodes.count(name) for name in names] if len(names) > 1 else [1] * len(nodes)
    return [sum(steps_of[:number]) for number in tuning.sizes(len(steps_of))]


def _device(world: World) -> str:
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
