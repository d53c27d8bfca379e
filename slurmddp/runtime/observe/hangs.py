"""Hangs of a script of the user's own: which rank did not join, on which node, and where all of them stand."""

import contextlib
import faulthandler
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from slurmddp.records.rank_events import Hang, HangOver, HangReported
from slurmddp.runtime import torch_private
from slurmddp.runtime.environment import Environment
from slurmddp.runtime.journal import Events
from slurmddp.runtime.observe.beats import Beats
from slurmddp.runtime.observe.signs import Steps
from slurmddp.runtime.watch.blame import Beat, Verdict, blame
from slurmddp.runtime.watch.process_exit import leave, leave_within, say
from slurmddp.runtime.watch.progress import Patience, Progress
from slurmddp.shared.units import listed

#: Seconds that a step takes at most where no step was that long so far, ...
_STEP = 600.0
#: ... and that a rank may compute without a sign: an evaluation, or a checkpoint that one rank writes.
_COMPUTES = 1800.0
#: Share of the time from which on the main thread counts as computing.
_BUSY = 0.1
#: Seconds to wait for the stacks of the other ranks, and until a process that is to exit does so in any case.
_STACKS, _LAST_RESORT = 5.0, 15.0


class Waiting:
    """How long this rank has shown no progress, and whether that is too long."""

    def __init__(self, steps: Steps, shortest: float, *, patient: bool) -> None:
        """patient: a rank whose main thread computes gets more time."""
        self._steps = steps
        self._progress = Progress("start")
        self._patience = Patience(self._progress, shortest=shortest, collective=_STEP)
        self._patient = patient
        self._clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        self._computed = time.clock_gettime(self._clock)
        self.step, self.collectives = 0, dict[str, int]()

    def pass_time(self, seconds: float) -> None:
        """So many seconds have passed since the last call."""
        step, issued = self._steps.done, torch_private.collectives()
        if (step, issued) != (self.step, self.collectives):
            self.step, self.collectives = step, issued
            self._progress.enter(self.phase, step)
            if step > 1:  # A second one was seen, however quick.
                self._progress.left.add("step")
            self._computed = time.clock_gettime(self._clock)
        self._patience.pass_time(seconds)

    @property
    def phase(self) -> str:
        return "step" if self.step else "start"

    @property
    def seconds(self) -> float:
        return self._patience.waited

    @property
    def deadline(self) -> float:
        """Return how long that may be. It is learned: five times the longest so far."""
        return self._patience.deadline()

    @property
    def late(self) -> bool:
        """Return whether it is too long. A script that has never shown a sign is not late: it may need no torch."""
        return self._progress.state.entries > 0 and self._patience.over

    @property
    def over(self) -> bool:
        """Return whether it is too long for a rank that computes, too, if it does."""
        busy = time.clock_gettime(self._clock) - self._computed > _BUSY * self.seconds
        return self.late and not (self._patient and busy and self.seconds <= _COMPUTES)


class Hangs:
    """Judges, reports, and answers a verdict of another rank with this one's stacks.

    Rank 0 judges. Where it is silent itself, the rank that is first to notice does.
    """

    def __init__(
        self, env: Environment, events: Events, beats: Beats, folder: Path, *, restart: bool, patience: float
    ) -> None:
        """folder: for verdicts and stacks. patience: seconds after which a rank without a new beat is silent."""
        self._env, self._events, self._beats, self._folder = env, events, beats, folder
        self._restart, self._patience = restart, patience
        self._heard: dict[int, tuple[int, float]] = {}  # rank -> number of its newest beat, and when that was new
        self._answered: set[str] = set()
        self._reported: Hang | None = None

    def judge(self, beats: Mapping[int, Beat], waiting: Waiting) -> None:
        """Report a hang and who did not join, or its end; on rank 0."""
        verdict = blame(beats, self._silent(beats))
        late = any(beat.late for beat in beats.values())
        if self._reported is not None and not late:
            self._over(self._reported)
        elif self._reported is None and verdict is not None:
            self._report(verdict, beats, waiting)

    def close(self, waiting: Waiting) -> None:
        """The script exits: a hang is over if there was progress since."""
        if self._reported is not None and not waiting.late:
            self._over(self._reported)

    def look(self, waiting: Waiting) -> None:
        """Write this rank's stacks if a hang was found; called on each rank while it is late."""
        for path in sorted(self._folder.glob("hang-*.json")):
            if path.name not in self._answered:
                with contextlib.suppress(OSError, ValueError, KeyError):
                    told = json.loads(path.read_bytes())
                    # One of before this rank stopped is an older one.
                    if told["time"] > time.time() - waiting.seconds:
                        lost = len(told["ranks"]) if told["kind"] == "silent" else 0
                        self._answer(path, waiting, self._env.world - lost)
                    self._answered.add(path.name)
        if self._env.rank != 0 and self._reported is None and self.listen() and self._claim():
            self.judge(self._beats.all(), waiting)

    def listen(self) -> bool:
        """Return whether rank 0 is silent; called on the others with each beat, too, so that it is known at once."""
        main = self._beats.read(0)
        return 0 in self._silent({} if main is None else {0: main}, [0])

    def _over(self, hang: Hang) -> None:
        self._reported = None
        self._events.write(HangOver(hang.ranks, hang.nodes))
        say("slurmddp: the ranks make progress again\n")

    def _silent(self, beats: Mapping[int, Beat], ranks: range | list[int] | None = None) -> list[int]:
        now = time.monotonic()
        for rank in range(self._env.world) if ranks is None else ranks:
            number = beats[rank].number if rank in beats else -1
            if self._heard.get(rank, (None, 0.0))[0] != number:
                self._heard[rank] = number, now
        return [rank for rank, (_, since) in self._heard.items() if now - since > self._patience]

    def _claim(self) -> bool:
        """Return whether this rank is to judge in rank 0's place: the first one that asks."""
        with contextlib.suppress(OSError):
            path = self._folder / "judge"
            try:
                path.open("x").write(str(self._env.rank))
            except FileExistsError:
                return path.read_text() == str(self._env.rank)
            return True
        return False

    def _report(self, verdict: Verdict, beats: Mapping[int, Beat], waiting: Waiting) -> None:
        name = f"hang-{len(list(self._folder.glob('hang-*.json'))) + 1}"
        nodes = [beats[rank].node if rank in beats else "an unknown node" for rank in verdict.ranks]
        late = [beat for beat in beats.values() if beat.late]
        waited = max(beat.waited for beat in late)
        stacks = self._folder / name
        hang = Hang(
            kind=verdict.kind,
            ranks=tuple(verdict.ranks),
            nodes=tuple(nodes),
            phase=verdict.phase,
            step=verdict.step,
            waited=round(waited, 1),
            deadline=round(waiting.deadline, 1),
        )
        self._reported = hang
        message = f"{_culprits(verdict, nodes)}: no progress for {waited:.1f} s at step {verdict.step}"
        then = "the ranks restart" if self._restart else "nothing is stopped"
        say(f"slurmddp: hang: {message} (deadline: {waiting.deadline:.1f} s); {then}. Stacks of the ranks: {stacks}\n")
        self._events.write(hang if self._restart else HangReported(*hang, stacks=str(stacks)))
        stacks.mkdir(exist_ok=True)
        (self._folder / f"{name}.json").write_text(json.dumps({"time": time.time(), **asdict(verdict)}))
        self.look(waiting)

    def _answer(self, verdict: Path, waiting: Waiting, ranks: int) -> None:
        """Write the stacks of all threads and the newest collectives; then exit, where the job wants that.

        ranks: how many answer, this one among them.
        """
        stacks = verdict.with_suffix("")
        if self._restart:
            leave_within(_LAST_RESORT, 1)
        path = stacks / f"rank-{self._env.rank:05d}.txt"
        with path.open("w") as file:
            about = f"rank {self._env.rank} on {self._env.node}, step {waiting.step}, no progress for"
            file.write(f"{about} {waiting.seconds:.1f} s; process groups: {waiting.collectives}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        files = 1 + dump_recorder(path.with_suffix(".pickle"))
        if self._restart:
            # The first process that exits takes the others with it: not before they have said where they are.
            until = time.monotonic() + _STACKS
            while time.monotonic() < until and len(list(stacks.iterdir())) < files * ranks:
                time.sleep(0.1)
            leave(1)


def _culprits(verdict: Verdict, nodes: list[str]) -> str:
    if not verdict.ranks:
        return "no rank is behind the others, and a collective does not complete"
    names = [f"rank {rank} on {node}" for rank, node in zip(verdict.ranks, nodes, strict=True)]
    return f"{listed(names, 8)} did not join the others" + (
        " and sends no heartbeats" if verdict.kind == "silent" else ""
    )


def dump_recorder(path: Path) -> bool:
    """Write the newest collectives of this rank, for `slurmddp doctor`; return whether torch has recorded any."""
    try:
        found = torch_private.flight_recorder()
        if found is None:
            return False
        path.write_bytes(found)
    except Exception as error:  # noqa: BLE001 - the stacks are there, and the ranks may have to restart
        say(f"slurmddp: warning: {path.name}: no dump of the flight recorder: {type(error).__name__}: {error}\n")
        return False
    return True
