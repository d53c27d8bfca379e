"""Ends of attempts, generated."""

from __future__ import annotations

from random import Random

from slurmddp.records.cause import CONSEQUENCE, EXCEPTION, SIGNAL, Cause
from slurmddp.records.marker import Marker, Signal
from slurmddp.records.progress import Failure, Progress
from slurmddp.records.refusal import Refusal
from slurmddp.supervisor.brain.types import Facts, Job, Ledger, Settings

NODES = ("node1", "node2", "node3")
SETUP = "setup line failed with exit code 3: module load x"
LOST = Cause("RuntimeError: Connection reset by peer", 2, "node2", CONSEQUENCE)
BOOM = Cause('ValueError: no "such\\" book', 1, "node1", EXCEPTION)
KILLED = Cause("killed by SIGKILL (out of memory?)", 0, "node1", SIGNAL)
TERMED = "SIGTERM received by rank 1 on node2"
FORGED = "somebody else changed the state of rendezvous 7 (not signed)"


def made(random: Random) -> tuple[Settings, Facts, Ledger]:
    """One end of an attempt, and what was known before."""
    pick, chance = random.choice, lambda share: random.random() < share
    policy = pick(("requeue", "requeue", "chain", "none"))
    settings = Settings(
        "RUN",
        scheduler=pick(("slurm", "slurm", "local")),
        own_script=chance(0.5),
        requeue_policy=policy,
        must_save=policy != "none" and chance(0.3),
        preflight=pick(("", "yes")),
        breaker=pick((1, 2, 3, 4)),
    )
    ending = pick(("cancelled", "time limit", "preemption", "node failure", "requeued")) if chance(0.1) else ""
    marker = None
    if chance(0.5):
        reason = pick((TERMED, TERMED, TERMED, "stop file", "time limit", ""))
        signalled = Signal("SIGTERM", 1, "node2") if reason == TERMED else None
        state = pick(("stopped", "stopped", "stopped", "done", "failed", "no progress", ""))
        cause = pick(("OSError: no space", "3 starts in a row crashed before step 1"))
        marker = Marker(state, reason, cause, signalled) if state else Marker()
    stop = pick(("stop file", "cancelled by the user", "time limit", "time limit", "preemption", "SIGTERM"))
    noted = pick((None, None, BOOM, KILLED, LOST))
    logged = None if noted in (BOOM, KILLED) else pick((None, BOOM, KILLED, *([LOST] if noted is None else [])))
    facts = Facts(
        attempt=4,
        exit_code=pick((0, 1, 1, 1, 137, 143)),
        job=Job(pick(("RUNNING", "RUNNING", "COMPLETING")), preempted=chance(0.2)),
        marker=marker,
        stop=stop if chance(0.3) else None,
        ending=ending,
        back=bool(ending) and chance(0.5),
        kept="nothing was saved" if ending and chance(0.5) else "",
        noted=noted,
        logged=logged,
        abandoned="the ranks did not restart within 45 s" if chance(0.2) else "",
        uncounted=pick((0, 0, 0, 1, 2, 3, 5)),
        saved=chance(0.5),
        chosen=NODES,
        silent=NODES[:1] if chance(0.1) else (),
        lost=NODES[: random.randint(1, 2)] if chance(0.1) else (),
        refused=dict.fromkeys(random.sample(NODES, random.randint(1, 3)), Refusal(SETUP, "user"))
        if chance(0.25)
        else {},
        unreached=(("node3", "Socket timed out"), ("node1", "Down"))[: random.randint(1, 2)] if chance(0.15) else (),
        killed_agents=("node2",) if chance(0.2) else (),
        signalled=random.randint(0, 3),
        stranger=Cause(FORGED, node="node1") if chance(0.15) else None,
    )
    step = pick((0, 10, 57, 57, 60))
    failures = tuple(sorted(Failure(3, pick((0, 10, 57))) for _ in range(random.randint(0, 4))))
    # The brain also compares with failed starts, and job.sh only with those that reached a limit.
    most = max((failure.step for failure in failures), default=None)
    best = most if most is not None else pick((None, 10, 57))
    progress = pick((None, Progress(step), Progress(step, 100), Progress(step, 100)))
    return settings, facts, Ledger(failures, progress, best, strangers=pick((0, 0, 9, 10)))
