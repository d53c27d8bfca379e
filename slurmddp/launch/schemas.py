"""Where an editor finds the JSON Schemas."""

from __future__ import annotations

from pathlib import Path

from slurmddp.assets import built_schema
from slurmddp.errors import UserError
from slurmddp.runs.index import state_folder
from slurmddp.shared.files import write_whole
from slurmddp.spec.schema import schema_text


def schema_file(kind: str) -> Path:
    """Return the file with the JSON Schema of `job`, `site` or `recipe` files.

    A checkout has no such file, so it is written to the user's state folder. Raises UserError.
    """
    text, path = schema_text(kind), built_schema(kind)
    if not path.is_file():
        path = state_folder() / "schemas" / path.name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text)
        except OSError as error:
            todo = "set XDG_STATE_HOME to a folder that you can write to"
            raise UserError(f"cannot be written: {error.strerror}", where=str(path), todo=todo) from None
    return path
