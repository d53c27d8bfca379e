"""Write a file that a command was asked for, never over another one by mistake."""

from __future__ import annotations

from pathlib import Path

from slurmddp.errors import UserError
from slurmddp.shared.files import write_whole


def write_new(
    path: Path, text: str, *, force: bool = False, todo: str = "choose another name, or remove that file"
) -> None:
    """Write a text to a file that does not exist yet; with `force`, also over one that does. Raises UserError.

    A link is replaced by the file, and what it names stays as it is.
    """
    try:
        if force:
            write_whole(path, text)
        else:
            with path.open("x", encoding="utf-8", errors="surrogateescape", newline="") as handle:
                handle.write(text)
    except FileExistsError:
        raise UserError(f"{path} exists", todo=todo) from None
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", todo="choose another folder") from None
