"""Events of job.sh and the guard, of alerts and the watchdog, and of commands on the login node: see events.py.

A docstring says when the event is written, and comments say what its keys mean. docs/files.md is made of them.
"""

from typing import Mapping, NamedTuple, Optional, Tuple

#: Of `NodeExcluded`.
PREFLIGHT, NETWORK = "preflight", "network"
USER, EITHER = "user", "either"


class JobStarted(NamedTuple):
    """the batch script has started"""

    nodes: str  # a Slurm node list
    #: seconds that a script of your own has to exit after `slurmddp cancel`; null with `train.task`
    cancel_grace: Optional[int]
    step: Optional[int] = None  # steps that the run had done by then


class Preflight(NamedTuple):
    """the nodes were checked"""

    seconds: Optional[float]
    bad: str  # excluded nodes, separated by spaces
    checked: Optional[int]  # how many nodes
    warnings: Tuple[str, ...]  # list of texts, each with its node


class Measured(NamedTuple):
    """What the measurement of the network found."""

    #: ok, low (below `network.min_bandwidth`), groups (only the first process group works), tcp (the run fails), none
    #: (not measured)
    result: str
    backend: str = ""
    transport: str = ""
    devices: Tuple[str, ...] = ()
    bus_gb_s: Optional[float] = None
    speeds: Mapping[str, float] = {}  # GB/s by bytes
    nccl: Optional[str] = None  # version
    measure_seconds: Optional[float] = None


class Network(NamedTuple):
    """the network between the nodes was measured"""

    seconds: Optional[float]
    text: str  # for people
    measured: Optional[Measured]  # an object, see below


class NodeExcluded(NamedTuple):
    """a node will not be used again"""

    excluded: str  # the node
    reason: str
    check: str = ""  # what found it: preflight, network; absent: the attempt
    fault: str = ""  # user (what you have to correct), either (another node may be at fault); absent: that of the node


class Heartbeats(NamedTuple):
    """the supervisor gets heartbeats of the other nodes (`recovery.heartbeats`)"""

    nodes: Optional[int]  # how many send them
    silent: str  # nodes from which none came in the first minute, separated by spaces
    port: Optional[int]  # UDP, on the node of job.sh


class NoStandby(NamedTuple):
    """no other node can take over from job.sh's (`recovery.standby`)"""

    why: str


class AttemptStarted(NamedTuple):
    """torchrun will start on these nodes"""

    nodes: str  # separated by spaces


class AttemptEnded(NamedTuple):
    """the attempt has ended"""

    exit_code: Optional[int]
    cause: str
    node: str  # that failed; may be empty
    rank: Optional[int]  # that failed, or null
    decision: str  # done, stopped, failed, cancelled, requeue, next
    ended_by: str = ""  # what ended it from outside: time limit, preemption, node failure, requeued, cancelled
    not_requeued: str = ""  # why job.sh saw no use in another job
    kind: str = ""  # of the cause, such as exception, signal, hang; not found: nobody said why
    more: str = ""  # why this was the last attempt


class RanksTerminated(NamedTuple):
    """the ranks did not exit in time after `slurmddp cancel`: job.sh sends SIGTERM"""

    reason: str
    waited: Optional[float]  # seconds


class Cleaned(NamedTuple):
    """the sweep has run"""

    removed: str  # processes that it killed and files that it removed


class Requeued(NamedTuple):
    """the job is back in the queue"""

    how: str  # requeue, chain
    reason: str
    next_job: str  # its job id


class HoldReleased(NamedTuple):
    """Slurm's hold on the requeued job was ended"""


class JobEnded(NamedTuple):
    """the batch script has ended"""

    exit_code: Optional[int]
    signal: str  # empty: none
    slurm_state: str
    slurm_reason: str
    decision: str  # as above


class Alert(NamedTuple):
    """an alert was sent, or could not be sent"""

    kind: str  # started, requeued, recovered, hang, straggler, warning, stopping, failed, finished
    target: str
    delivered: Optional[bool]
    spooled: Optional[bool]  # whether it will be tried again


class Watchdog(NamedTuple):
    """the watchdog job has looked at the run's job"""

    watchdog: str  # its own job id
    outcome: str  # waits, not submitted, no alert, alerted
    state: str  # Slurm's


class CancelRequested(NamedTuple):
    """`slurmddp cancel`, or Ctrl-C in `slurmddp run`"""

    now: Optional[bool]  # whether it was killed without a save


OF_JOB = (
    JobStarted, Preflight, Network, NodeExcluded, Heartbeats, NoStandby, AttemptStarted, AttemptEnded, RanksTerminated,
    Cleaned, Requeued, HoldReleased, JobEnded,
)  # fmt: skip
OF_ALERTS = (Alert, Watchdog)
OF_COMMANDS = (CancelRequested,)
