"""Events of the ranks and of torchrun's agents: see events.py. Docstrings and comments are as in job_events.py."""

from typing import Any, Mapping, NamedTuple, Optional, Tuple


class RankStarted(NamedTuple):
    """rank 0 has started"""

    seconds: Optional[float]  # since its process started


class RanksStopped(NamedTuple):
    """torchrun has stopped the ranks of this node to start them again"""


class RankExited(NamedTuple):
    """a rank failed, and its agent saw how; not those that torchrun then ends"""

    rank: Optional[int]
    exit_code: Optional[int]  # null with a signal
    signal: Optional[str]  # SIGKILL and so on, or null


class NotForked(NamedTuple):
    """the ranks of a node were started, not forked (recovery.fork)"""

    why: str


class NotWarm(NamedTuple):
    """an agent was started, not forked (recovery.spares_warm)"""

    why: str


class StoreOpen(NamedTuple):
    """the store between the nodes is open to others (network.store_tls)"""

    why: str


class ImageNotProtected(NamedTuple):
    """Slurm's SIGTERM would end the image's mount and the node's ranks"""

    why: str


class AgentPaused(NamedTuple):
    """an agent did not run for a while: somebody stopped it, or its node hung"""

    seconds: Optional[float]


class Forged(NamedTuple):
    """an agent got a message that somebody else wrote, did not read it, and ended its ranks"""

    text: str  # for people


class Started(NamedTuple):
    """all ranks have joined"""

    world: Optional[int]  # ranks
    nodes: Optional[int]  # how many
    parallel: str
    torch: str
    device: str
    backend: str
    parameters: Optional[int]


class WeightsLoaded(NamedTuple):
    """weights of `init_from` were loaded"""

    path: str
    tensors: Optional[int]  # how many


class CheckpointRejected(NamedTuple):
    """a checkpoint did not verify"""

    path: str
    file: str
    why: str


class Resumed(NamedTuple):
    """a checkpoint was loaded"""

    step: Optional[int]
    path: str
    from_world: Optional[int]  # ranks that saved it
    samples: Optional[int]
    random_states_restored: Optional[bool]


class Ready(NamedTuple):
    """the first step is next"""

    step: Optional[int]
    flops_per_target: Optional[float]
    peak_tflops: Optional[float]  # measured, all ranks
    sheet_tflops: Optional[float]  # by the data sheet
    lower_bound: Optional[bool]
    not_counted: Tuple[str, ...]


class FirstStep(NamedTuple):
    """the first step of this start is done"""

    step: Optional[int]
    seconds: Optional[float]  # since the start


class StepSkipped(NamedTuple):
    """a step was skipped: its loss or gradient was not finite"""

    step: Optional[int]
    why: str


class Evaluated(NamedTuple):
    """an evaluation is done"""

    step: Optional[int]
    seconds: Optional[float]
    loss: Optional[float]
    count_: Optional[int]  # targets
    samples: Optional[int]
    figures: Mapping[str, Any]  # the task's own figures


class Validation(NamedTuple):
    """The figures of a validation set, as in Evaluated."""

    loss: Optional[float]
    count_: Optional[int]
    samples: Optional[int]
    figures: Mapping[str, Any]


class CheckpointSaved(NamedTuple):
    """a checkpoint is complete"""

    step: Optional[int]
    seconds: Optional[float]
    stall: Optional[float]  # seconds that training waited
    bytes: Optional[int]
    path: str


class CheckpointFailed(NamedTuple):
    """a checkpoint could not be written"""

    step: Optional[int]
    why: str
    older: Optional[bool]  # whether an older one is there


class StragglerBegins(NamedTuple):
    """a host is slower than the others"""

    host: str
    slow_rank: Optional[int]
    part: str  # data, compute, network
    factor: Optional[float]  # times the others
    seconds_a_step: Optional[float]  # more per step


class StragglerEnds(NamedTuple):
    """it is no longer slower"""

    host: str
    slow_rank: Optional[int]
    part: str
    factor: Optional[float]
    seconds_a_step: Optional[float]  # as at its beginning


class LinksProbed(NamedTuple):
    """pairs of hosts were timed"""

    host: Optional[str]  # with slow links, or null
    factor: Optional[float]
    text: str


class Profiled(NamedTuple):
    """traces of torch.profiler were written (`slurmddp debug profile`)"""

    step: Optional[int]  # the first step in them
    last: Optional[int]  # the last one
    files: Tuple[str, ...]
    error: str  # of the first rank that failed, or empty


class Hang(NamedTuple):
    """a rank made no progress before the deadline"""

    kind: str  # silent, behind, all
    ranks: Tuple[int, ...]
    nodes: Tuple[str, ...]  # of these ranks
    phase: str
    step: Optional[int]
    waited: Optional[float]  # seconds
    deadline: Optional[float]  # seconds


class HangReported(NamedTuple):
    """a rank of your own script made no progress before the deadline; nothing was stopped"""

    kind: str
    ranks: Tuple[int, ...]
    nodes: Tuple[str, ...]
    phase: str  # start, step
    step: Optional[int]
    waited: Optional[float]
    deadline: Optional[float]
    stacks: str  # folder; also has the dumps of the flight recorder


class HangOver(NamedTuple):
    """the ranks make progress again"""

    ranks: Tuple[int, ...]
    nodes: Tuple[str, ...]  # as reported


class NoProcessGroup(NamedTuple):
    """several ranks of your own script make steps, and no process group was made"""

    world: Optional[int]  # ranks
    text: str  # for people


class Restarted(NamedTuple):
    """your own script has made its first steps after an earlier start of its ranks"""

    how: str  # went on, from zero, unknown
    step: Optional[int]  # the first of this start, or null
    before: Optional[int]  # the last that was seen before, or null
    best: Optional[int]  # the highest that was seen, or null
    lost: Optional[int]  # at least so many steps, if from zero
    text: str  # for people


class KeepingSave(NamedTuple):
    """the newest save of a script of your own is being copied, before the ranks start again"""

    path: str  # the save
    bytes: Optional[int]
    seconds: Optional[float]  # that it may take


class SaveKept(NamedTuple):
    """that save was copied, or could not be"""

    path: str  # the save
    kept: str  # its copy; empty: there is none
    bytes: Optional[int]
    why: str  # it was not copied


class ProcessGroupMade(NamedTuple):
    """after that: they made one"""


class Error(NamedTuple):
    """a rank failed"""

    kind: str  # the exception
    message: str


class Stopping(NamedTuple):
    """the ranks agreed to stop"""

    step: Optional[int]
    reason: str


class Timing(NamedTuple):
    """a clean exit, from every rank"""

    seconds: Mapping[str, float]  # an object: seconds by part, as in metrics.jsonl, since it was ready


class Finished(NamedTuple):
    """a clean exit"""

    state: str  # done, stopped
    step: Optional[int]
    steps: Optional[int]  # asked for
    reason: str
    validation: Optional[Validation]  # the validation set: loss and so on as in evaluated, or null


OF_RANKS = (
    RankStarted, RanksStopped, RankExited, NotForked, NotWarm, StoreOpen, ImageNotProtected, AgentPaused, Forged,
    Started, WeightsLoaded, CheckpointRejected, Resumed, Ready, FirstStep, StepSkipped, Evaluated, CheckpointSaved,
    CheckpointFailed, StragglerBegins, StragglerEnds, LinksProbed, Profiled, Hang, HangReported, HangOver,
    NoProcessGroup, Restarted, KeepingSave, SaveKept, ProcessGroupMade, Error, Stopping, Timing, Finished,
)  # fmt: skip
