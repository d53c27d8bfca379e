"""What a log says about how things went on: steps after an error, the end of training, a request that Slurm granted.

An error that the run survived is no cause. But standard output is often buffered: steps may stand behind the error that
came after them. So steps without a time prove little, see `survived`.
"""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from slurmddp.doctor.prefix import Clock

#: The framework itself says so at the end, and nobody else does.
_FINISHED = re.compile(
    r"'train_runtime':|`max_(?:epochs|steps)=\d+` reached|worker group successfully finished|exits successfully"
    r"|COMPLETED \(exit code 0\)"
)
#: A script may say so whatever its program did.
_SAYS_FINISHED = re.compile(r"\b[Tt]raining (?:is )?(?:done|finished|complete)|\b(?:Finished|Completed) training")
_GRANTED = re.compile(r"Submitted batch job \d|Granted job allocation|has been allocated resources|Step created for")
_PROGRESS = re.compile(
    r"(?:step|iter|iteration|epoch|batch)s?['\"]?[ :=#(\[/]{0,4}(\d{1,12}(?:\.\d{1,9})?)"
    r"|\b(\d{1,12})/\d{1,12} \[\d\d:\d\d|\bloss['\"]?[ :=]{1,3}(\d{1,9}\.\d{1,9})",
    re.IGNORECASE,
)
_TROUBLE = re.compile(r"error|fail|exception|traceback|timeout|abort|warn|resum|\bnan\b", re.IGNORECASE)
#: An error's text says that the program goes on.
HANDLED = re.compile(
    r"[Rr]etry|[Tt]ry(?:ing)? again|[Ss]kipp|[Ii]gnor(?:ed|ing)|[Ff]all(?:ing|s)? back|[Rr]ecover(?:ed|ing)"
)


class _Step(NamedTuple):
    line: int
    value: str
    clock: Clock | None


@dataclass
class Outcome:
    """Of one log. Lines are numbers of lines."""

    _finished: int = 0
    _says_finished: int = 0
    _granted: int = 0
    #: The last steps, of which some may have the same value: each rank writes it.
    _steps: list[_Step] = field(default_factory=list)

    def feed(self, number: int, text: str, clock: Clock | None) -> None:
        """Take a line of which no rule speaks."""
        if _FINISHED.search(text):
            self._finished = number
        elif _SAYS_FINISHED.search(text):
            self._says_finished = number
        elif _GRANTED.search(text):
            self._granted = number
        elif (step := _PROGRESS.search(text)) and not _TROUBLE.search(text):
            self._steps.append(_Step(number, next(filter(None, step.groups())), clock))

    def finished_after(self, line: int) -> bool:
        """Return whether training ended well behind this line."""
        return self._finished > line or (self._says_finished > line and self.steps_after(line, self._says_finished) > 0)

    def says_finished_after(self, line: int) -> bool:
        """Return whether a line behind this one says so, which proves little."""
        return self._says_finished > line

    def granted_after(self, line: int) -> bool:
        """Return whether Slurm granted a request behind this line."""
        return self._granted > line

    def steps_after(self, line: int, before: int | None = None) -> int:
        """Return how many different steps stand behind this line."""
        return len({each.value for each in self._steps if each.line > line and (before is None or each.line < before)})

    def steps_later(self, line: int, clock: Clock | None) -> int:
        """Return how many different steps stand behind this line and were written later, by their own time."""
        if clock is None:
            return 0
        later = (each for each in self._steps if each.line > line and each.clock is not None and each.clock > clock)
        return len({each.value for each in later})
