"""One start of the ranks: what rank 0 told of it, and what that says about its time."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from slurmddp.records.events import Event, newest, of
from slurmddp.records.job_events import Heartbeats, NoStandby
from slurmddp.records.metrics import Metrics
from slurmddp.records.rank_events import (
    AgentPaused,
    CheckpointSaved,
    Error,
    Evaluated,
    Finished,
    FirstStep,
    Hang,
    ImageNotProtected,
    NoProcessGroup,
    NotForked,
    NotWarm,
    ProcessGroupMade,
    RankStarted,
    Ready,
    Restarted,
    Resumed,
    SaveKept,
    Stopping,
    StoreOpen,
    Timing,
)
from slurmddp.run.timeline import Mark, milliseconds

#: Parts of a metrics line's `seconds` -> kind. A part that is not known here is "other".
_PARTS = {
    "data": "data", "checkpoint": "checkpoint", "evaluation": "evaluation", "preflight": "preflight",
    "forward": "training", "backward": "training", "overlap": "training", "optimizer": "training",
    "network": "network",
    "compute": "training", "unmeasured": "run",  # of a script of the user's own
}  # fmt: skip
FAILURES = (Error, Hang)
#: What a node did without, by its event.
_WITHOUT = {
    NotForked: "recovery.fork: no forked ranks",
    NotWarm: "recovery.spares_warm: no warm agent",
    NoStandby: "recovery.standby: no other node can replace job.sh",
    StoreOpen: "network.store_tls: the store is open to others",
    ImageNotProtected: "scancel and requeues leave the ranks no time to save: Slurm's SIGTERM ends the image's mount",
}
#: What `restarted` says of a start of a script of the user's own.
WENT_ON, FROM_ZERO, UNKNOWN = "went on", "from zero", "unknown"
#: Events of rank 0 that tell that it was training.
TRAINING = (Metrics, FirstStep, CheckpointSaved, Evaluated, Stopping, Finished)


@dataclass(frozen=True)
class Stretch:
    """Time between two metrics lines: the steps in it, and milliseconds of their training and of its waits."""

    begin_step: int
    end_step: int
    spent: Mapping[str, int]


@dataclass
class RankStart:
    """One start of the ranks: what rank 0 told, and what was found out of it.

    ended_by: what ended it from outside (cancelled, time limit, preemption): that is no failure of it.
    """

    attempt: int
    marks: list[Mark]
    finished: bool = False
    alive: bool = False
    ended_by: str = ""
    stretches: list[Stretch] = field(default_factory=list)

    @property
    def resumed(self) -> int | None:
        """The step that this start began after, 0 if that is unknown; None if it did not come so far."""
        for kind, before in ((Resumed, 0), (Ready, 0), (Restarted, 1), (FirstStep, 1), (Metrics, 1)):
            if kind is FirstStep and self.how == UNKNOWN:
                return 0
            steps = (mark.step for mark in self.marks if isinstance(mark.facts, kind))
            step = next((step for step in steps if step is not None), None)
            if step is not None:
                return step - before
        return None

    @property
    def how(self) -> str | None:
        """What a script of the user's own began from, if its ranks saw that; the newest word counts."""
        if any(isinstance(mark.facts, Resumed) for mark in self.marks):
            return WENT_ON
        told = [mark.facts.how for mark in self.marks if isinstance(mark.facts, Restarted)]
        return told[-1] if told else None

    @property
    def failed(self) -> bool:
        """Return whether rank 0 told of an error, or of a hang that it ended."""
        return any(isinstance(mark.facts, FAILURES) for mark in self.marks)

    @property
    def died(self) -> bool:
        """Return whether it neither finished, nor runs, nor was ended from outside."""
        return not (self.finished or self.alive or self.ended_by)

    @property
    def reached(self) -> int | None:
        """The highest step that rank 0 told of."""
        steps = (mark.step for mark in self.marks if isinstance(mark.facts, TRAINING))
        return max((step for step in steps if step is not None), default=None)

    @property
    def saved(self) -> list[int]:
        """Steps of its checkpoints."""
        saves = (mark.step for mark in self.marks if isinstance(mark.facts, CheckpointSaved))
        return [step for step in saves if step is not None]


def split(marks: Iterable[Mark]) -> list[list[Mark]]:
    """Return the marks of each start of the ranks."""
    starts: list[list[Mark]] = []
    for mark in marks:
        if not starts or isinstance(mark.facts, RankStarted):
            starts.append([])
        starts[-1].append(mark)
    return starts


def process_start(start: RankStart) -> int | None:
    """Return when the ranks' processes started; None if nothing tells."""
    told = (mark.at - milliseconds(mark.facts.seconds) for mark in start.marks if isinstance(mark.facts, RankStarted))
    return next(told, None)


def cost_of(mark: Mark) -> dict[str, float]:
    """Milliseconds that training stood still for what an event tells of: its `stall`, else its `seconds`."""
    kind, seconds = "", None
    if isinstance(mark.facts, CheckpointSaved):
        kind, seconds = "checkpoint", mark.facts.seconds if mark.facts.stall is None else mark.facts.stall
    elif isinstance(mark.facts, Evaluated):
        kind, seconds = "evaluation", mark.facts.seconds
    return {kind: seconds * 1000} if seconds and seconds > 0 else {}


def parts_of(mark: Mark) -> dict[str, float]:
    """Milliseconds by kind, from a line's `seconds`; empty if it has none."""
    parts: dict[str, float] = {}
    for name, seconds in mark.facts.seconds.items() if isinstance(mark.facts, Metrics | Timing) else ():
        kind = _PARTS.get(name, "other")
        if seconds > 0:
            parts[kind] = parts.get(kind, 0) + seconds * 1000
    return parts


#: Characters of a text that is shown.
_LONGEST = 2000


def newest_restarts(events: Iterable[Event]) -> list[Event]:
    """Return what each start of the ranks told of what it went on from, oldest first: its newest word."""
    return [start.event for start in _starts(events) if start.event]


def start_notices(events: Iterable[Event]) -> tuple[str, ...]:
    """Return texts for people: that the newest start of the ranks has no process group, or began from an unknown step;
    and that starts began from step 1 again, and where what they may have written over is kept.
    """
    events = list(events)
    starts, saves = _starts(events), [facts for _, facts in of(events, SaveKept)]
    found = [starts[-1].alone] if starts[-1].alone else []
    restarts = [start.restarted for start in starts]
    if zero := [facts for facts in restarts if facts and facts.how == FROM_ZERO]:
        often = f" ({len(zero)} times in this run: {sum(facts.lost or 0 for facts in zero)} steps)"
        kept = next((f"; what it had saved is kept in {facts.kept}" for facts in saves if facts.kept), "")
        found.append(zero[-1].text[:_LONGEST] + (often if len(zero) > 1 else "") + kept)
    if (last := restarts[-1]) and (last.how == UNKNOWN or (last.how == WENT_ON and last.step is None)):
        found.append(last.text[:_LONGEST])
    if saves and saves[-1].why and not (last and last.how == WENT_ON):
        found.append(f"the script may write over {saves[-1].path}, of which there is no copy: {saves[-1].why}")
    return tuple(found)


def pause_notices(events: Iterable[Event]) -> tuple[str, ...]:
    """Return a text for each node whose agent did not run for a while: the longest pause of the run."""
    longest: dict[str, float] = {}
    for event, facts in of(events, AgentPaused):
        node = event.node or "an unknown node"
        longest[node] = max(longest.get(node, 0), facts.seconds or 0)
    return tuple(
        f"the agent on {node} did not run for {seconds:.0f} s: it was stopped (SIGSTOP), or its node hung"
        for node, seconds in longest.items()
    )


def without_notices(events: Iterable[Event]) -> tuple[str, ...]:
    """Return a text for each reason for which nodes did without one of these, with the nodes."""
    nodes: dict[tuple[str, str], set[str]] = {}
    for event in events:
        if isinstance(event.facts, NotForked | NotWarm | NoStandby | StoreOpen | ImageNotProtected):
            what = _WITHOUT[type(event.facts)]
            nodes.setdefault((what, event.facts.why), set()).add(event.node or "an unknown node")
    return tuple(f"{what} on {', '.join(sorted(on))}: {why}" for (what, why), on in nodes.items())


def heartbeat_notices(events: Iterable[Event]) -> tuple[str, ...]:
    """Return a text for the nodes that send no heartbeats, if there are any."""
    facts = newest(list(events), Heartbeats)
    if facts is None or not facts.silent:
        return ()
    return (f"recovery.heartbeats: none from {facts.silent} (UDP port {facts.port}): only Slurm reports its loss",)


@dataclass
class _Start:
    """A start of the ranks: its newest `restarted`, and the text of `no_process_group` while that holds."""

    event: Event | None = None
    restarted: Restarted | None = None
    alone: str = ""


def _starts(events: Iterable[Event]) -> list[_Start]:
    starts = [_Start()]
    for event in events:
        if isinstance(event.facts, RankStarted):
            starts.append(_Start())
        elif isinstance(event.facts, ProcessGroupMade):
            starts[-1].alone = ""
        elif isinstance(event.facts, NoProcessGroup):
            starts[-1].alone = event.facts.text[:_LONGEST]
        elif isinstance(event.facts, Restarted):
            starts[-1].event, starts[-1].restarted = event, event.facts
    return starts
