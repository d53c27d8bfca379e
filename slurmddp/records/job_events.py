"""Events of job.sh and the guard, of alerts and the watchdog, and of commands on the login node: see events.py.

The first sentence of a docstring says when the event is written; what follows explains keys. docs/files.md is made of
them.
"""

from typing import Mapping, NamedTuple, Optional, Tuple

#: Of `NodeExcluded`.
PREFLIGHT, NETWORK = "preflight", "network"
USER, EITHER = "user", "either"


class JobStarted(NamedTuple):
    """the batch script has started

    nodes: a Slurm node list
    cancel_grace: seconds that a script of your own has to exit after `slurmddp cancel`; null with `train.task`
    step: steps that the run had done by then
    """

    nodes: str
    cancel_grace: Optional[int]
    step: Optional[int] = None


class Preflight(NamedTuple):
    """the nodes were checked

    bad: excluded nodes, separated by spaces
    checked: how many nodes
    warnings: list of texts, each with its node
    """

    seconds: Optional[float]
    bad: str
    checked: Optional[int]
    warnings: Tuple[str, ...]


class Measured(NamedTuple):
    """What the measurement of the network found.

    result: ok, low (below `network.min_bandwidth`), groups (only the first process group works), tcp (the run fails),
    none (not measured). speeds: GB/s by bytes. nccl: version.
    """

    result: str
    backend: str = ""
    transport: str = ""
    devices: Tuple[str, ...] = ()
    bus_gb_s: Optional[float] = None
    speeds: Mapping[str, float] = {}
    nccl: Optional[str] = None
    measure_seconds: Optional[float] = None


class Network(NamedTuple):
    """the network between the nodes was measured

    text: for people
    measured: an object, see below
    """

    seconds: Optional[float]
    text: str
    measured: Optional[Measured]


class NodeExcluded(NamedTuple):
    """a node will not be used again

    excluded: the node
    check: what found it: preflight, network; absent: the attempt
    fault: user (what you have to correct), either (another node may be at fault); absent: that of the node
    """

    excluded: str
    reason: str
    check: str = ""
    fault: str = ""


class AttemptStarted(NamedTuple):
    """torchrun will start on these nodes

    nodes: separated by spaces
    """

    nodes: str


class AttemptEnded(NamedTuple):
    """the attempt has ended

    node: that failed; may be empty
    rank: that failed, or null
    decision: done, stopped, failed, cancelled, requeue, next
    ended_by: what ended it from outside: time limit, preemption, node failure, requeued, cancelled
    not_requeued: why job.sh saw no use in another job
    kind: of the cause, such as exception, signal, hang; not found: nobody said why
    more: why this was the last attempt
    """

    exit_code: Optional[int]
    cause: str
    node: str
    rank: Optional[int]
    decision: str
    ended_by: str = ""
    not_requeued: str = ""
    kind: str = ""
    more: str = ""


class RanksTerminated(NamedTuple):
    """the ranks did not exit in time after `slurmddp cancel`: job.sh sends SIGTERM

    waited: seconds
    """

    reason: str
    waited: Optional[float]


class Cleaned(NamedTuple):
    """the sweep has run

    removed: processes that it killed and files that it removed
    """

    removed: str


class Requeued(NamedTuple):
    """the job is back in the queue

    how: requeue, chain
    next_job: its job id
    """

    how: str
    reason: str
    next_job: str


class HoldReleased(NamedTuple):
    """Slurm's hold on the requeued job was ended"""


class JobEnded(NamedTuple):
    """the batch script has ended

    signal: empty: none
    decision: as above
    """

    exit_code: Optional[int]
    signal: str
    slurm_state: str
    slurm_reason: str
    decision: str


class Alert(NamedTuple):
    """an alert was sent, or could not be sent

    kind: started, requeued, recovered, hang, straggler, warning, stopping, failed, finished
    spooled: whether it will be tried again
    """

    kind: str
    target: str
    delivered: Optional[bool]
    spooled: Optional[bool]


class Watchdog(NamedTuple):
    """the watchdog job has looked at the run's job

    watchdog: its own job id
    outcome: waits, not submitted, no alert, alerted
    state: Slurm's
    """

    watchdog: str
    outcome: str
    state: str


class CancelRequested(NamedTuple):
    """`slurmddp cancel`, or Ctrl-C in `slurmddp run`

    now: whether it was killed without a save
    """

    now: Optional[bool]


OF_JOB = (
    JobStarted, Preflight, Network, NodeExcluded, AttemptStarted, AttemptEnded, RanksTerminated, Cleaned, Requeued,
    HoldReleased, JobEnded,
)  # fmt: skip
OF_ALERTS = (Alert, Watchdog)
OF_COMMANDS = (CancelRequested,)
