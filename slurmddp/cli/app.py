"""The `slurmddp` command: groups its commands and turns errors into one message and an exit code."""

import gc
import sys
from typing import Annotated

import typer

from slurmddp.cli import alerts, checkpoints, follow, images, jobs, options, sites, terminal
from slurmddp.errors import SlurmddpError

app = typer.Typer(
    name="slurmddp",
    help="From a PyTorch training script to a finished multi-node run on Slurm with Apptainer or Singularity.",
    add_completion=False,
    no_args_is_help=True,
    # Plain help: the pretty kind imports a library that costs more time than all the rest.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for group in (jobs, follow, alerts, checkpoints, images, sites):
    group.register(app)


@app.callback(invoke_without_command=True)
def main_options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,
) -> None:
    if version:
        from slurmddp import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 something outside failed, 2 a mistake of the user's."""
    terminal.guard()
    try:
        app(prog_name="slurmddp")
        sys.stdout.flush()  # here, where a full disk behind it is still an error that can be told
    except SlurmddpError as error:
        print(f"slurmddp: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        options.drop_output()
        sys.exit(141)
    except OSError as error:
        # Whatever a command did not foresee: a full disk, a folder that may not be read.
        print(f"slurmddp: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        # The process ends: the interpreter need not look through everything for garbage once more.
        gc.freeze()
