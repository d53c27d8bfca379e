"""The values that the brain takes and gives."""

from typing import Any, List, Mapping, NamedTuple, Optional, Tuple, Union

from slurmddp.records import stop
from slurmddp.records.cause import Cause
from slurmddp.records.marker import Marker as Marker
from slurmddp.records.progress import Failure, Progress
from slurmddp.records.refusal import Refusal

#: Why a job is ended from outside.
CANCELLED, TIME_LIMIT, PREEMPTION = "cancelled", "time limit", "preemption"
NODE_FAILURE, REQUEUED = "node failure", "requeued"
#: The same: something has killed job.sh, which nobody but a guard survives.
KILLED = "job.sh was killed by SIGKILL (out of memory?)"
#: The reason in the stop file after `slurmddp cancel`.
CANCELLED_BY_USER = stop.CANCELLED
#: What comes after an attempt.
DONE, STOPPED, FAILED, REQUEUE, NEXT = "done", "stopped", "failed", "requeue", "next"


class Moment(NamedTuple):
    """The time, as the loop knows it. seconds: of a clock that nobody sets. unix: of the node's clock."""

    seconds: float
    unix: float


class Settings(NamedTuple):
    """Values of the job that never change."""

    run: str
    scheduler: str = "slurm"
    own_script: bool = False
    requeue_policy: str = "requeue"  # requeue, chain or none: how the job gets back into the queue
    #: whether an own script goes back at the time limit only with evidence that its next start continues
    must_save: bool = False
    preflight: str = ""
    breaker: int = 3  # starts in a row without progress that fail the run
    stop_lead: Optional[int] = None  # seconds before the time limit at which the ranks are asked to save; None: never
    cancel_grace: Optional[int] = None  # seconds from a cancel to SIGTERM, for an own script; None: never
    nodes_min: int = 1
    nodes_max: int = 1
    max_gpu_hours: Optional[float] = None  # of all starts of the run; None: no limit
    #: starts from step 1 after a fault that an own script may make; None: any number
    breaker_from_zero: Optional[int] = None
    checkpoints: Tuple[str, ...] = ()  # where an own script saves
    #: whether a killed rehearsal of the same code and arguments resumed; None: not rehearsed, or not known
    rehearsed: Optional[bool] = None


class Ledger(NamedTuple):
    """What all starts of the run, over all requeues, have come to."""

    failures: Tuple[Failure, ...] = ()  # the oldest first; the ranks' side adds some
    progress: Optional[Progress] = None
    best: Optional[int] = None  # the step of the best start that ended at its limit
    gpu_seconds: float = 0.0  # of all jobs so far, this one included
    from_zero: int = 0  # starts after a fault that began at step 1 again
    #: what all ranks of the newest failed start raised before their first step; empty: they did not
    last_error: str = ""
    strangers: int = 0  # attempts that somebody else has ended, and that count as no failure of the run
    started_again: bool = False  # whether an own script made steps in a start that followed another one with steps
    #: whether the newest of these starts went on behind the other's steps; None: not known
    went_on: Optional[bool] = None
    step_of_run: bool = False  # whether its steps count from the beginning of the run


class Job(NamedTuple):
    """What Slurm says of the job; where it did not answer, what it said last. On one machine without Slurm: RUNNING."""

    state: str = ""
    reason: str = ""
    preempted: bool = False
    restarts: int = 0  # how often Slurm has restarted it by now
    restarts_then: int = 0  # when this script began


class Facts(NamedTuple):
    """What is known when an attempt has ended."""

    attempt: int
    exit_code: int  # of the ranks' command (128 + N after signal N)
    job: Job = Job()
    marker: Optional[Marker] = None  # None if there is none
    stop: Optional[str] = None  # the first line of the stop file ("stop file" if that is empty); None if there is none
    ending: str = ""  # why the job is ended from outside; empty if it is not
    back: bool = False  # whether the job has been put back into the queue for it
    kept: str = ""  # why it was not, if this was looked at
    noted: Optional[Cause] = None  # noted, abandoned, uncounted, hopeless: of `Watch`
    #: what the search in the logs gives, with `noted` handed to it; None: nothing, or nobody looked
    logged: Optional[Cause] = None
    abandoned: str = ""
    uncounted: int = 0
    hopeless: str = ""
    saved: Optional[bool] = None  # whether a file was saved since the job began; None: not known
    chosen: Tuple[str, ...] = ()  # the nodes of the attempt
    silent: Tuple[str, ...] = ()  # those whose heartbeats have stopped in it
    lost: Tuple[str, ...] = ()  # those that Slurm has lost in it
    refused: Mapping[str, Refusal] = {}  # what node.sh said on nodes where it could not start the ranks
    unreached: Tuple[Tuple[str, str], ...] = ()  # nodes on which srun could start nothing, with its words
    killed_agents: Tuple[str, ...] = ()  # nodes of the tasks that srun names first as Killed
    signalled: int = 0  # nodes whose logs show that torchrun got SIGTERM
    stranger: Optional[Cause] = None  # what the first node said that got messages of somebody else


class Decision(NamedTuple):
    """What comes next, and what is to be written before it."""

    what: str  # DONE, STOPPED, FAILED, CANCELLED, REQUEUE or NEXT
    cause: Cause
    ledger: Ledger  # to be kept, if it differs from the one handed in
    ended_by: str = ""  # what ended the attempt from outside; empty: nothing did
    not_requeued: str = ""  # why another job would be of no use
    exclude: Tuple[Tuple[str, str], ...] = ()  # nodes never to use again, with the reason
    suspects: Tuple[str, ...] = ()  # nodes to use only where too few others are left
    marker: Optional[Marker] = None  # to be written for this attempt, so that ranks that start late do not train


class Around(NamedTuple):
    """What a look around has found. Where the run folder does not answer, what it said last."""

    marker: Optional[Marker] = None
    stop: Optional[str] = None
    #: the number of the newest start that torchrun made a folder for, in this attempt; None: none
    newest_start: Optional[int] = None
    failures: int = 0  # lines of this attempt in the file `failures`
    gpu_seconds: float = 0.0  # of all jobs of the run so far
    unreached: Tuple[Tuple[str, str], ...] = ()  # chosen nodes on which srun could start nothing, with its words


class Say(NamedTuple):
    """A line of job.log."""

    text: str


class Write(NamedTuple):
    """An event of the supervisor, one of slurmddp/records/events.py."""

    event: Any


class Terminate(NamedTuple):
    """SIGTERM to what runs on the nodes."""


class Kill(NamedTuple):
    """SIGKILL to it."""


class AskToStop(NamedTuple):
    """Make the stop file, unless there is one, and tell people about it."""

    reason: str


class AskEndTime(NamedTuple):
    """Ask Slurm for the job's time limit, and hand the answer to `Watch.end_time_is`."""


class FindCause(NamedTuple):
    """Search the logs of the attempt for what is better than this cause, and hand the answer to `Watch.cause_is`."""

    noted: Optional[Cause]


class Alert(NamedTuple):
    """A message to people. next: what follows. text: what they read; empty: the line of the cause."""

    kind: str
    state: str
    cause: Cause
    next: str
    text: str = ""


Action = Union[Say, Write, Terminate, Kill, AskToStop, AskEndTime, FindCause, Alert]
Actions = List[Action]
