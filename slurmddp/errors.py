"""The one exception family of the login side."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence


class SlurmddpError(Exception):
    """Base of all errors that the program raises on purpose; `exit_code` is what the command ends with."""

    exit_code = 1


class UserError(SlurmddpError):
    """A user's mistake: one message without a traceback, exit code 2, nothing changed.

    what:  what is wrong, with the offending value.
    where: file and line, key, or option in which it stands.
    todo:  what to do about it.
    """

    exit_code = 2
    #: The mistakes that it lists: itself, or several.
    parts: Sequence[UserError]

    def __init__(self, what: str, *, where: str | None = None, todo: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.todo = todo
        self.parts = (self,)

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        key = (self.where or "").rpartition(": ")[2]  # "job.yaml:4: container.image": said once is enough
        if key and self.what.startswith(f"{key} "):
            head = f"{self.where}{self.what.removeprefix(key)}"
        return f"{head}\n  -> {self.todo}" if self.todo else head


class ElsewhereError(UserError):
    """What is missing on this machine, and may be there on a login node of the cluster."""


def together(errors: Sequence[UserError]) -> UserError:
    """Return one error that lists these; each is named once."""
    parts = each_once(errors)
    if len(parts) == 1:
        return parts[0]
    error = UserError("\n".join(map(str, parts)))
    error.parts = parts
    return error


def each_once(errors: Sequence[UserError]) -> list[UserError]:
    """Return the mistakes that these errors list, without repetitions."""
    return list({str(part): part for error in errors for part in error.parts}.values())


@contextlib.contextmanager
def collecting(errors: list[UserError]) -> Iterator[None]:
    """Add the mistake that ends the block to the list."""
    try:
        yield
    except UserError as error:
        errors.append(error)


class ExternalError(SlurmddpError):
    """A command outside of us (sbatch, apptainer, ...) failed: its message is shown whole, exit code 1."""
