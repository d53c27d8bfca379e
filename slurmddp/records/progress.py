"""How far a run has come, and how its starts failed: small text files in the run folder.

- progress: "STEP STEPS", or "STEP" alone. Rank 0 keeps it, or a script of the user's own.
- failures: a line "ATTEMPT STEP" for each start of the ranks that failed. Rank 0 adds one where torchrun has started
  the ranks again in the same attempt; the supervisor does where a whole attempt has failed.
- best: the step of the best start that has ended at its time limit.
- ranks: a line for each rank, the node that it runs on.
"""

import re
from typing import Iterable, List, NamedTuple, Optional, Sequence, Tuple

_NUMBER = re.compile("[0-9]{1,15}")


class Progress(NamedTuple):
    """So many steps are done. steps: of the whole run; only bundled tasks know it."""

    step: int = 0
    steps: Optional[int] = None

    def text(self) -> str:
        return "{}\n".format(self.step) if self.steps is None else "{} {}\n".format(self.step, self.steps)


class Failure(NamedTuple):
    """A start that failed, or that gained nothing."""

    attempt: int
    step: int

    def line(self) -> str:
        """Return its line, without the line's end."""
        return "{} {}".format(self.attempt, self.step)


def read_progress(text: str) -> Optional[Progress]:
    """Return what the text of the file says; None if it names no step."""
    numbers = _numbers(text)
    return Progress(*numbers[:2]) if numbers else None


def read_failures(text: str) -> Tuple[Failure, ...]:
    """Return the failed starts, the oldest first. Other lines are skipped."""
    rows = [_numbers(line) for line in text.splitlines()]
    return tuple(Failure(*row) for row in rows if len(row) == 2)


def read_best(text: str) -> Optional[int]:
    """Return the step of the best start; None if there is none."""
    numbers = _numbers(text)
    return numbers[0] if numbers else None


def ranks_text(nodes: Iterable[str]) -> str:
    """Return the text of the file `ranks`. nodes: of each rank."""
    return "".join("{}\n".format(node) for node in nodes)


def stuck(failures: Sequence[Failure], limit: int) -> Optional[int]:
    """Return the step that none of the last `limit` failed starts got beyond, which is the first one's; None if one
    did, or there are fewer.
    """
    last = [failure.step for failure in failures[-limit:]]
    return last[0] if len(last) == limit and max(last) <= last[0] else None


def _numbers(line: str) -> Tuple[int, ...]:
    """Return the whole numbers at the start of a line."""
    numbers: List[int] = []
    for word in line.split():
        if _NUMBER.fullmatch(word) is None:
            break
        numbers.append(int(word))
    return tuple(numbers)
