"""Events of the ranks and of torchrun's agents: see events.py. The docstrings are as in job_events.py."""

from typing import Any, Mapping, NamedTuple, Optional, Tuple


class RankStarted(NamedTuple):
    """rank 0 has started

    seconds: since its process started
    """

    seconds: Optional[float]


class RanksStopped(NamedTuple):
    """torchrun has stopped the ranks of this node to start them again"""


class RankExited(NamedTuple):
    """a rank failed, and its agent saw how; not those that torchrun then ends

    exit_code: null with a signal
    signal: SIGKILL and so on, or null
    """

    rank: Optional[int]
    exit_code: Optional[int]
    signal: Optional[str]


class Forged(NamedTuple):
    """an agent got a message that somebody else wrote, did not read it, and ended its ranks

    text: for people
    """

    text: str


class Started(NamedTuple):
    """all ranks have joined

    world: ranks
    nodes: how many
    """

    world: Optional[int]
    nodes: Optional[int]
    parallel: str
    torch: str
    device: str
    backend: str
    parameters: Optional[int]


class WeightsLoaded(NamedTuple):
    """weights of `init_from` were loaded

    tensors: how many
    """

    path: str
    tensors: Optional[int]


class CheckpointRejected(NamedTuple):
    """a checkpoint did not verify"""

    path: str
    file: str
    why: str


class Resumed(NamedTuple):
    """a checkpoint was loaded

    from_world: ranks that saved it
    """

    step: Optional[int]
    path: str
    from_world: Optional[int]
    samples: Optional[int]
    random_states_restored: Optional[bool]


class Ready(NamedTuple):
    """the first step is next

    peak_tflops: measured, all ranks
    sheet_tflops: by the data sheet
    """

    step: Optional[int]
    flops_per_target: Optional[float]
    peak_tflops: Optional[float]
    sheet_tflops: Optional[float]
    lower_bound: Optional[bool]
    not_counted: Tuple[str, ...]


class FirstStep(NamedTuple):
    """the first step of this start is done

    seconds: since the start
    """

    step: Optional[int]
    seconds: Optional[float]


class StepSkipped(NamedTuple):
    """a step was skipped: its loss or gradient was not finite"""

    step: Optional[int]
    why: str


class Evaluated(NamedTuple):
    """an evaluation is done

    count_: targets
    figures: the task's own figures
    """

    step: Optional[int]
    seconds: Optional[float]
    loss: Optional[float]
    count_: Optional[int]
    samples: Optional[int]
    figures: Mapping[str, Any]


class Validation(NamedTuple):
    """The figures of a validation set, as in Evaluated."""

    loss: Optional[float]
    count_: Optional[int]
    samples: Optional[int]
    figures: Mapping[str, Any]


class CheckpointSaved(NamedTuple):
    """a checkpoint is complete

    stall: seconds that training waited
    """

    step: Optional[int]
    seconds: Optional[float]
    stall: Optional[float]
    bytes: Optional[int]
    path: str


class CheckpointFailed(NamedTuple):
    """a checkpoint could not be written

    older: whether an older one is there
    """

    step: Optional[int]
    why: str
    older: Optional[bool]


class StragglerBegins(NamedTuple):
    """a host is slower than the others

    part: data, compute, network
    factor: times the others
    seconds_a_step: more per step
    """

    host: str
    slow_rank: Optional[int]
    part: str
    factor: Optional[float]
    seconds_a_step: Optional[float]


class StragglerEnds(NamedTuple):
    """it is no longer slower

    seconds_a_step: as at its beginning
    """

    host: str
    slow_rank: Optional[int]
    part: str
    factor: Optional[float]
    seconds_a_step: Optional[float]


class LinksProbed(NamedTuple):
    """pairs of hosts were timed

    host: with slow links, or null
    """

    host: Optional[str]
    factor: Optional[float]
    text: str


class Profiled(NamedTuple):
    """traces of torch.profiler were written (`slurmddp debug profile`)

    step: the first step in them
    last: the last one
    error: of the first rank that failed, or empty
    """

    step: Optional[int]
    last: Optional[int]
    files: Tuple[str, ...]
    error: str


class Hang(NamedTuple):
    """a rank made no progress before the deadline

    kind: silent, behind, all
    nodes: of these ranks
    waited: seconds
    deadline: seconds
    """

    kind: str
    ranks: Tuple[int, ...]
    nodes: Tuple[str, ...]
    phase: str
    step: Optional[int]
    waited: Optional[float]
    deadline: Optional[float]


class HangReported(NamedTuple):
    """a rank of your own script made no progress before the deadline; nothing was stopped

    phase: start, step
    stacks: folder; also has the dumps of the flight recorder
    """

    kind: str
    ranks: Tuple[int, ...]
    nodes: Tuple[str, ...]
    phase: str
    step: Optional[int]
    waited: Optional[float]
    deadline: Optional[float]
    stacks: str


class HangOver(NamedTuple):
    """the ranks make progress again

    nodes: as reported
    """

    ranks: Tuple[int, ...]
    nodes: Tuple[str, ...]


class NoProcessGroup(NamedTuple):
    """several ranks of your own script make steps, and no process group was made

    world: ranks
    text: for people
    """

    world: Optional[int]
    text: str


class Restarted(NamedTuple):
    """your own script has made its first steps after an earlier start of its ranks

    how: went on, from zero, unknown
    step: the first of this start, or null
    before: the last that was seen before, or null
    best: the highest that was seen, or null
    lost: at least so many steps, if from zero
    text: for people
    """

    how: str
    step: Optional[int]
    before: Optional[int]
    best: Optional[int]
    lost: Optional[int]
    text: str


class KeepingSave(NamedTuple):
    """the newest save of a script of your own is being copied, before the ranks start again

    path: the save
    seconds: that it may take
    """

    path: str
    bytes: Optional[int]
    seconds: Optional[float]


class SaveKept(NamedTuple):
    """that save was copied, or could not be

    path: the save
    kept: its copy; empty: there is none
    why: it was not copied
    """

    path: str
    kept: str
    bytes: Optional[int]
    why: str


class ProcessGroupMade(NamedTuple):
    """after that: they made one"""


class Error(NamedTuple):
    """a rank failed

    kind: the exception
    """

    kind: str
    message: str


class Stopping(NamedTuple):
    """the ranks agreed to stop"""

    step: Optional[int]
    reason: str


class Timing(NamedTuple):
    """a clean exit, from every rank

    seconds: an object: seconds by part, as in metrics.jsonl, since it was ready
    """

    seconds: Mapping[str, float]


class Finished(NamedTuple):
    """a clean exit

    state: done, stopped
    steps: asked for
    validation: the validation set: loss and so on as in evaluated, or null
    """

    state: str
    step: Optional[int]
    steps: Optional[int]
    reason: str
    validation: Optional[Validation]


OF_RANKS = (
    RankStarted, RanksStopped, RankExited, Forged, Started, WeightsLoaded, CheckpointRejected, Resumed, Ready,
    FirstStep, StepSkipped, Evaluated, CheckpointSaved, CheckpointFailed, StragglerBegins, StragglerEnds, LinksProbed,
    Profiled, Hang, HangReported, HangOver, NoProcessGroup, Restarted, KeepingSave, SaveKept, ProcessGroupMade, Error,
    Stopping, Timing, Finished,
)  # fmt: skip
