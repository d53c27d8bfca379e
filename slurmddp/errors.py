"""The one exception family of the login side."""

from __future__ import annotations


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

    def __init__(self, what: str, *, where: str | None = None, todo: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.todo = todo

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        key = (self.where or "").rpartition(": ")[2]  # "job.yaml:4: container.image": said once is enough
        if key and self.what.startswith(f"{key} "):
            head = f"{self.where}{self.what.removeprefix(key)}"
        return f"{head}\n  -> {self.todo}" if self.todo else head


class ExternalError(SlurmddpError):
    """A command outside of us (sbatch, apptainer, ...) failed: its message is shown whole, exit code 1."""
