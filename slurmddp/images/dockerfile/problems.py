"""Collects what cannot be converted, so that a user sees all of it at once: each with its line and a fix."""

from __future__ import annotations

from collections.abc import Iterable

from slurmddp.errors import UserError


class Undecided(UserError):
    """What cannot be converted without the base's configuration."""


class Refused(UserError):
    """Several refusals of one Dockerfile, in the order of its lines."""

    def __init__(self, problems: list[UserError]) -> None:
        super().__init__(f"{len(problems)} problems", where=problems[0].where, todo=problems[0].todo)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join([*map(str, self.problems), f"{len(self.problems)} problems: nothing was converted"])


class Problems:
    """Collects the UserErrors of its `with` blocks, so that a user sees all of them at once."""

    def __init__(self, found: Iterable[UserError] = ()) -> None:
        self.found = list(found)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        if isinstance(error, UserError):
            self.found.append(error)
        return isinstance(error, UserError)

    def check(self) -> UserError | None:
        """Raise what was found: the error itself, or one that holds all of them by line.

        Return it where the base's configuration would decide.
        """
        by_text = {str(error): error for error in self.found}  # a stage that several others start from is walked again
        found = sorted(by_text.values(), key=_line)
        if not found:
            return None
        error = found[0] if len(found) == 1 else Refused(found)
        if all(isinstance(one, Undecided) for one in found):
            return error
        raise error


def _line(error: UserError) -> int:
    number = (error.where or "").rpartition(":")[2]
    return int(number) if number.isdigit() else 0
