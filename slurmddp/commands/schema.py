"""schema: the formats of the files."""

from __future__ import annotations

from typing import Annotated

import typer

from slurmddp.job.schema import schema_text
from slurmddp.launch.schemas import schema_file
from slurmddp.styled import exact


def schema(
    kind: Annotated[str, typer.Argument(metavar="job|site|recipe", help="Kind of file")],
    path: Annotated[bool, typer.Option("--path", help="Print the path of a file with the schema instead")] = False,
) -> None:
    """Print the JSON Schema of job, site or recipe files, for editors and other programs."""
    typer.echo(schema_file(kind) if path else exact(schema_text(kind)), nl=path)
