"""The `slurmddp` command: groups its commands and turns errors into one message and an exit code."""

import gc
import os
import sys
from typing import Annotated

import typer

from slurmddp.commands import options, terminal
from slurmddp.commands.help import App, ClickError, usage_error_text
from slurmddp.commands.listed import COMMANDS
from slurmddp.errors import SlurmddpError
from slurmddp.styled import styled

app = App(
    name="slurmddp",
    help="Run PyTorch training scripts on many nodes, with Slurm and Apptainer or Singularity",
    epilog="Start here: slurmddp init, slurmddp check job.yaml, slurmddp submit job.yaml",
)
for command in COMMANDS:
    app.list(command)


@app.callback(invoke_without_command=True)
def main_options(
    version: Annotated[bool, typer.Option("-V", "--version", help="Print the version, then exit")] = False,
    host: Annotated[
        str | None,
        typer.Option(metavar="USER@LOGIN", help="Run COMMAND on this login node, over ssh; also SLURMDDP_HOST"),
    ] = None,
    remote_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="With --host: keep copies of projects below DIR there")
    ] = None,
) -> None:
    # `_run_on_login_node` has taken --host and --remote-dir: here they are for the help.
    if version:
        from slurmddp.run.version import version as full_version

        typer.echo(full_version())
        raise typer.Exit


def _run_on_login_node() -> None:
    """Run the command on the login node of --host or SLURMDDP_HOST, if there is one, then exit with its exit code."""
    words, environment = sys.argv[1:], os.environ
    if "_SLURMDDP_COMPLETE" in environment or not (
        environment.get("SLURMDDP_HOST") or (words and words[0].startswith(("--host", "--remote-dir")))
    ):
        return
    from slurmddp.commands import remote

    request = remote.asked(words, environment)
    if request is not None:
        sys.exit(remote.run(request, environment))


def _say_error(text: str) -> None:
    sys.stderr.write(styled("slurmddp:", "bad") + f" {text}\n")


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 something outside of us failed, 2 a mistake of the user's."""
    terminal.guard()
    try:
        _run_on_login_node()
        code = app(prog_name="slurmddp", standalone_mode=False)
        sys.stdout.flush()  # here, where a full disk behind it is still an error that can be told
        sys.exit(code)
    except ClickError as error:
        sys.stderr.write(usage_error_text(error))
        sys.exit(2)
    except typer.Abort:  # a question was not answered
        sys.stderr.write("Aborted!\n")
        sys.exit(1)
    except SlurmddpError as error:
        _say_error(str(error))
        sys.exit(error.exit_code)
    except BrokenPipeError:
        options.drop_output()
        sys.exit(141)
    except OSError as error:
        # Whatever a command did not foresee: a full disk, a folder that may not be read.
        _say_error(f"{error.filename or 'output'}: {error.strerror or error}")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        # The process ends: the interpreter need not look through everything for garbage once more.
        gc.freeze()
