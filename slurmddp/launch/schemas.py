"""Where an editor finds the JSON Schemas."""

from pathlib import Path

from slurmddp.assets import built_schema
from slurmddp.errors import UserError
from slurmddp.job.schema import schema_text
from slurmddp.run.index import state_folder
from slurmddp.shared.files import write_whole


def schema_path(kind: str) -> Path:
    """Return where the JSON Schema of `job`, `site` or `recipe` files is: of a checkout, in the user's state folder."""
    path = built_schema(kind)
    return path if path.is_file() else state_folder() / "schemas" / path.name


def schema_file(kind: str) -> Path:
    """Return the file of `schema_path`, which exists then: of a checkout, it is written. Raises UserError."""
    path = schema_path(kind)
    if path != built_schema(kind):
        text = schema_text(kind)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text)
        except OSError as error:
            todo = "set XDG_STATE_HOME to a folder that you can write to"
            raise UserError(f"cannot be written: {error.strerror}", where=str(path), todo=todo) from None
    return path
