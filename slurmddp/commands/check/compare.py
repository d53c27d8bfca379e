"""What the starts of a rehearsal have in common: where each began, and whether it then did the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from slurmddp.records.rehearsal import Line

#: Relative difference up to which parameters and losses are the same but for rounding.
_ROUNDING = 1e-5
#: Up to this, two undisturbed starts are the same but for what their GPUs or libraries do in another order.
_ALIKE = 1e-3
_DIFFERS = ", but went on differently"


class Outcome(NamedTuple):
    """resumes: whether the start went on from a save; None: not known. not_compared: what could not be, and why.
    differs: whether it then did other things than before. failed: it made no step, for a reason that is known.
    """

    resumes: bool | None
    text: str
    not_compared: tuple[str, ...] = ()
    differs: bool = False
    failed: bool = False


class Start:
    """What rank 0 saw in one start. states: by steps done. first_saves: steps done at the first save of each name.
    acted: when it was killed, or asked to stop. end: its last step, if it came to its end. not_finite: the first
    step after which parameters were no finite numbers: those of one step are then like those of any other. unchanged:
    the first save at which the parameters were still those of the beginning.
    """

    def __init__(self, lines: Sequence[Line]) -> None:
        self.end: int | None = None
        self.states = {line.step: line for line in lines if line.hash}
        self.steps = max(self.states, default=0)
        self.saves = [line.step for line in lines if line.saved]
        self.first_saves = {line.saved: line.step for line in reversed(lines) if line.saved}
        self.acted = next((line.step for line in lines if line.acted), None)
        self.not_finite = next((step for step, line in self.states.items() if not _finite(line)), None)
        self.unchanged = next((step for step in self.saves if self._hash(step) == self._hash(0) != ""), None)

    def _hash(self, step: int) -> str:
        return self.states[step].hash if step in self.states else ""

    @property
    def step_seconds(self) -> float:
        """Return how long a step took, at most: saves and pauses count, too."""
        times = [line.time for line in self.states.values()]
        return max((later - earlier for earlier, later in pairwise(times)), default=0.0)

    @property
    def first_save(self) -> int | None:
        """Return the steps done at the first save; None without one."""
        return self.saves[0] if self.saves else None

    @property
    def saves_at_end_only(self) -> bool:
        """Return whether it saved nothing before its last step."""
        return self.first_save is None or self.first_save >= self.steps

    def began_at(self, earlier: Start) -> int | None:
        """Return the step of an earlier start whose parameters this one began with; None if there is none."""
        if 0 not in self.states or self.not_finite == 0:
            return None
        first = self.states[0]
        same = [step for step, line in earlier.states.items() if line.hash == first.hash]
        if first.part and not same:  # on another number of ranks, rank 0 has larger or smaller parts
            same = [step for step, line in earlier.states.items() if line.part == first.part]
        if 0 in same:
            # A schedule may begin with a rate of 0: what is as good as the beginning is the beginning, unless it was
            # saved.
            return 0 if earlier.unchanged is None else None
        return max(same, default=None)

    @property
    def unknown(self) -> str:
        """Return why parameters do not tell where a later start began; empty if they do."""
        if self.not_finite is not None:
            return f"the parameters: after step {self.not_finite} they are no finite numbers"
        if self.unchanged is not None:
            return f"the parameters: in the save of step {self.unchanged} they are those before step 1"
        return ""


def first(starts: Sequence[Start]) -> Start:
    """Return the first start that came as far as its first step; an empty one if none did."""
    return next((start for start in starts if start.states), Start([]))


def _finite(line: Line) -> bool:
    return all(map(math.isfinite, line.sample))


def difference(one: Line, other: Line) -> float:
    """Return how much the parameters of two lines differ, relative to their size; 0.0 for the same."""
    if one.hash == other.hash:
        return 0.0
    if len(one.sample) != len(other.sample):
        return float("inf")
    size = max(map(abs, one.sample), default=0.0) or 1.0
    worst = max((abs(a - b) for a, b in zip(one.sample, other.sample, strict=True)), default=float("inf"))
    return max(worst / size, 1e-16)  # what is not noted of them differs


def resumed(undisturbed: Start, killed: Start, again: Start, seen: str) -> Outcome:
    """Say what a start after SIGKILL did. seen: what the observer said that it went on from; empty if nothing."""
    head = f"Killed after step {killed.acted}, "
    if not again.states:
        return Outcome(None, f"{head}it made no step when it was started again.")
    saves = "" if killed.saves else ": it had saved nothing that torch.save or Checkpointer writes"
    began, text, missing = _beginning(killed, again)
    if began is None and not missing and killed.states[0].hash != undisturbed.states[0].hash:
        text = "it began with other parameters than those of any step: where it resumed is unknown"
        missing = ("the parameters before step 1: without a seed, they differ from start to start",)
    if began == 0 or (missing and seen == "from zero"):
        return Outcome(False, f"{head}it began at step 0 again{saves}.", missing)
    if began is None:
        return Outcome(None, f"{head}{text}.", missing)
    after, missing = _same_after(undisturbed, killed, again, began)
    return Outcome(True, f"{head}{text}{after}", missing, _DIFFERS in after)


def _beginning(earlier: Start, again: Start) -> tuple[int | None, str, tuple[str, ...]]:
    """Return the step of an earlier start at which another began (None: not known), as text, too, and why not."""
    if (began := again.began_at(earlier)) is not None:
        return began, f"it resumed at step {began}" if began else "it began at step 0 again", ()
    if why := earlier.unknown:
        return None, "where it began is unknown", (why,)
    return None, "it began with parameters that it had after no step: where it resumed is unknown", ()


def _same_after(undisturbed: Start, killed: Start, again: Start, began: int) -> tuple[str, tuple[str, ...]]:
    """Compare the steps after a resume with those of the starts before. Return the text and what is missing."""
    acted = killed.acted or 0
    apart = difference(killed.states[acted], undisturbed.states[acted]) if acted in undisturbed.states else None
    known = dict(killed.states)
    missing: list[str] = []
    rounding = _ROUNDING
    if apart is not None and apart < _ALIKE:
        rounding = max(rounding, 10 * apart)
        known = {**undisturbed.states, **known}
    else:
        missing.append(f"steps after {acted}: two undisturbed starts differ, so there is nothing to compare them with")
    pairs = [(line, known[began + step]) for step, line in again.states.items() if step and began + step in known]
    if not pairs:
        return ".", (*missing, f"the steps after {began}: none was made twice")
    losses = [abs(one.loss - two.loss) / max(abs(two.loss), 1e-12) for one, two in pairs
              if one.loss is not None and two.loss is not None]  # fmt: skip
    if not losses:
        missing.append("losses: none was seen (a script that calls Tensor.backward on one number shows it)")
    what = "parameters and losses" if losses else "parameters"
    last = began + pairs[-1][0].step
    worst = max(difference(*pairs[-1]), max(losses, default=0.0))
    if worst == 0:
        return f"; its {what} up to step {last} are the same as without the kill.", tuple(missing)
    if worst <= rounding:
        return f"; its {what} up to step {last} are the same up to rounding ({worst:.0e}).", tuple(missing)
    if losses and losses[0] > rounding:
        why = f"the loss of step {began + 1} differs by {losses[0]:.2%}: other data, or other random states"
    else:
        state = "the optimizer's or the schedule's state, or the data"
        why = f"the parameters of step {last} differ by {worst:.0e} ({state})"
    return f"{_DIFFERS}: {why}.", tuple(missing)


def stopped(start: Start, again: Start | None, *, terminated: bool, end: int | None = None) -> Outcome:
    """Say what a start did that was asked to stop. again: the next one, if one was tried. terminated: whether it had to
    be ended. end: the step after which it is over without that.
    """
    if start.acted is None:
        return Outcome(None, "It was not asked to stop: it ended before.", ("the request to stop",))
    head = f"Asked to stop after step {start.acted}, "
    lost = start.steps - max(start.saves, default=0)
    since = "after its last save" if start.saves else "(all: it saved nothing)"
    at_its_end = start.steps == end or (again is not None and not again.steps and not terminated)
    # A script that goes on may have been ended right after one of its usual saves.
    usual = terminated and sum(step > start.acted for step in start.saves) > 1
    if not lost and start.saves and at_its_end:
        return Outcome(None, f"{head}it went on to step {start.steps}, perhaps its last, and saved.")
    if not lost and start.saves and not usual:
        how = "but did not exit" if terminated else "and exited"
        return Outcome(True, f"{head}it saved at step {start.steps} {how}.")
    if terminated:
        text = f"it went on for {_steps(start.steps - start.acted)} until it was ended"
        return Outcome(False, f"{head}{text}: {_steps(lost)} {since} lost.")
    return Outcome(False, f"{head}it exited at step {start.steps} without a save: {_steps(lost)} {since} lost.")


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"


def halved(start: Start, again: Start, ranks: int, why: str) -> Outcome:
    """Say what the start after the stop did on fewer ranks. why: it made no step."""
    head = f"Then started on {ranks} rank{'s' * (ranks > 1)}, "
    if 0 not in again.states:
        return Outcome(None, f"{head}it made no step: {why}.")
    began, text, missing = _beginning(start, again)
    return Outcome(None if began is None else began > 0, f"{head}{text}.", missing)
