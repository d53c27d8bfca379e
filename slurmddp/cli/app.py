"""The `slurmddp` command: groups its commands and turns errors into one message and an exit code."""

import gc
import sys
from typing import Annotated

import typer

from slurmddp.cli import (
    alerts,
    check,
    checkpoints,
    disk,
    doctor,
    follow,
    images,
    jobs,
    options,
    preflight,
    rehearse,
    report,
    sites,
    sweeps,
    sync,
    terminal,
)
from slurmddp.cli.help import App
from slurmddp.errors import SlurmddpError

app = App(
    name="slurmddp",
    help="Run PyTorch training scripts on many nodes, with Slurm and Apptainer or Singularity",
    epilog="Start here: slurmddp init, slurmddp plan job.yaml, slurmddp submit job.yaml",
)
for group in (
    jobs,
    check,
    preflight,
    rehearse,
    follow,
    sweeps,
    doctor,
    report,
    sync,
    checkpoints,
    disk,
    images,
    sites,
    alerts,
):
    group.register(app)


@app.callback(invoke_without_command=True)
def main_options(
    version: Annotated[bool, typer.Option("--version", help="Print the version, then exit")] = False,
) -> None:
    if version:
        from slurmddp.runs.version import version as full_version

        typer.echo(full_version())
        raise typer.Exit


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 something outside of us failed, 2 a mistake of the user's."""
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
