"""schema: the formats of the files."""

import typer

from slurmddp.commands import options as opt
from slurmddp.job.schema import schema_text
from slurmddp.launch.schemas import schema_file
from slurmddp.styled import exact


def schema(
    kind: str = opt.argument("job|site|recipe", "Kind of file", default=...),
    path: bool = opt.flag("--path", "Print the path of a file with the schema instead"),
) -> None:
    """Print the JSON Schema of job, site or recipe files, for editors and other programs."""
    typer.echo(schema_file(kind) if path else exact(schema_text(kind)), nl=path)
