"""Writes the weights of a run's checkpoint to one plain file: with the torch that the run itself had."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from slurmddp.cluster.base import clean_environment
from slurmddp.container import Bind, Container
from slurmddp.container.apptainer import INHERITED
from slurmddp.errors import ExternalError, UserError
from slurmddp.images.process import StopSignals
from slurmddp.job.resolve import Request
from slurmddp.launch.prepare import Prepared, prepare
from slurmddp.launch.this_machine import python_for_torch
from slurmddp.run import checkpoints
from slurmddp.run.checkpoints import Stored
from slurmddp.run.gate import stranger
from slurmddp.run.layout import ARCHIVE, RunFolder
from slurmddp.run.snapshot import copy_runtime
from slurmddp.styled import labelled

FORMATS = {"pt": ".pt", "safetensors": ".safetensors"}
CONTENTS = ("model", "all")
_USERS_MISTAKE = 2  # the exit code of slurmddp.runtime.export for what its user can put right
_NOT_FOUND = 127  # of a shell and of env(1)
_ERROR = "slurmddp: error: "
_INHERITED = re.compile(f"(APPTAINER|SINGULARITY)_({'|'.join(INHERITED)})")

# Setup lines need a shell without -e and -u, and must not see our arguments, which scripts that they source would take
# for their own. $1: where to run (a folder with nothing that Python could import by mistake); $2: how many lines; then
# the lines; then the command. `exit` is a function, or a line that calls `exit 0` would look like a successful export.
_SHELL = """\
cd "$1" || exit
slurmddp_setup=("${@:3:$2}")
slurmddp_command=("${@:$2 + 3}")
set --
if ((${#slurmddp_setup[@]})); then type module >/dev/null 2>&1 || source /etc/profile; fi
exit() {
  local code=${1-$?}
  ((BASH_SUBSHELL == 0)) || builtin exit "$code"
  echo "setup line exited with code $code: $slurmddp_line"
  builtin exit 1
}
for slurmddp_line in "${slurmddp_setup[@]}"; do
  eval "$slurmddp_line" || { echo "setup line failed with exit code $?: $slurmddp_line"; builtin exit 1; }
done
unset -f exit
exec "${slurmddp_command[@]}"
"""


class Wanted(NamedTuple):
    """What `slurmddp checkpoint export` was asked; None: the newest good step, the format by the name, the name by
    the format. trust: whether the run of another user may execute what it names."""

    step: int | None
    format: str | None
    output: Path | None
    what: str
    force: bool
    trust: bool = False


class Command(NamedTuple):
    """A command line, the program that does the work behind its shell, and the environment that it is to have."""

    words: tuple[str, ...]
    program: str
    environment: dict[str, str]


def export(
    folder: RunFolder, wanted: Wanted, cwd: Path, environment: Mapping[str, str], say: Callable[[str], None]
) -> Path:
    """Write the file and return its path; `say` hears of what is refused on the way and how it goes.

    The checkpoint is hashed first. The file has its name once it is whole. Raises UserError, ExternalError where the
    image or environment fails, and Stopped (ctrl-C, SIGTERM, SIGHUP), with nothing left behind.
    """
    found = checkpoints.own(folder)
    form, target = _target(wanted, cwd)
    item = _checkpoint(folder, found, wanted.step, say)
    foreign = None if wanted.trust else stranger(folder)
    with ExitStack() as stack:
        code = folder.code
        if foreign is not None or not folder.code_archive.is_file():
            code = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurmddp-export-")))
            copy_runtime(code)
        checkpoint = Path(os.path.realpath(item.path))
        arguments = [str(checkpoint), "--output", str(target), "--format", form, "--what", wanted.what]
        arguments += ["--verified", *(["--force"] if wanted.force else [])]
        if foreign is not None:
            command = own_command(code, arguments, environment)
            place = f"your own {command.program} (this run {foreign}: nothing of it is executed)"
        else:
            prepared = _prepared(folder, environment)
            command = build_command(prepared, code, checkpoint, target, arguments, environment)
            place = _place(prepared)
        say(f"exporting step {item.step} of run {folder.id} in {place}")
        try:
            _run(stack.enter_context(StopSignals()), command, say)
        except UserError as error:
            if foreign is None or "cannot import torch" not in str(error):
                raise
            raise UserError(
                f"{command.program} has no torch, and run {folder.id} {foreign}",
                todo="activate an environment with torch. Or, if you trust this user, --trust runs their image, "
                "setup lines and code with your account",
            ) from error
    return target


def own_command(code: Path, arguments: list[str], environment: Mapping[str, str]) -> Command:
    """Return the command that runs slurmddp.runtime.export in our Python, or in the shell's if ours has no torch."""
    variables = {"PYTHONPATH": str(code / ARCHIVE), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
    words = [python_for_torch(environment), "-m", "slurmddp.runtime.export", *arguments]
    return _command(code, (), variables, words, dict(clean_environment(environment)))


def build_command(
    prepared: Prepared,
    code: Path,
    checkpoint: Path,
    target: Path,
    arguments: list[str],
    environment: Mapping[str, str],
) -> Command:
    """Return the command that runs slurmddp.runtime.export from `code`, as node.sh would start a rank.

    arguments: those of the module; what the container must see of this machine is bound: `code` and `checkpoint` to
    read, the folder of `target` to write. Raises UserError where the image is not there.
    """
    container = prepared.plan.container
    own = dict(prepared.resolved.job.environment)
    python_path = ":".join(part for part in (str(code / ARCHIVE), own.pop("PYTHONPATH", "")) if part)
    # These are set behind the setup lines, which may set PYTHONPATH, too.
    variables = {"PYTHONPATH": python_path, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
    words = [container.python, "-m", "slurmddp.runtime.export", *arguments]
    if container.image:
        variables["PYTHONNOUSERSITE"] = "1"
        words = [*_container(container, code, checkpoint, target), *words]
    variables = {container.environment_prefix + name: value for name, value in variables.items()}
    if container.image:
        variables[f"{container.executable.upper()}_NO_EVAL"] = "1"
    inherited = {name: item for name, item in clean_environment(environment).items() if not _INHERITED.fullmatch(name)}
    # The job's own may hold a token: by the environment, which a list of processes does not show.
    passed = {container.environment_prefix + name: value for name, value in own.items()}
    return _command(code, prepared.plan.job.setup, variables, words, {**inherited, **passed})


def _command(
    code: Path, setup: Sequence[str], variables: Mapping[str, str], words: list[str], environment: dict[str, str]
) -> Command:
    """variables: set behind the setup lines, in addition to `environment`."""
    shell = ("bash", "-c", _SHELL, "slurmddp", str(code), str(len(setup)), *setup)
    behind = ("env", *(f"{name}={value}" for name, value in variables.items()))
    return Command((*shell, *behind, *words), words[0], environment)


def _container(container: Container, code: Path, checkpoint: Path, target: Path) -> list[str]:
    """`apptainer exec ... IMAGE`. Raises UserError where the image is not there."""
    if container.made_by_srun:
        raise UserError(
            f"the run's container is of {container.runtime}, which only a Slurm job can start",
            todo="run in any environment with torch:"
            f" PYTHONPATH={code / ARCHIVE} python -m slurmddp.runtime.export {checkpoint} --output {target}",
        )
    if container.image is None or not os.path.exists(container.image):
        raise UserError(
            f"the run's image {container.image} does not exist",
            todo="restore it, or run in any environment with torch:"
            f" PYTHONPATH={code / ARCHIVE} python -m slurmddp.runtime.export {checkpoint} --output {target}",
        )
    binds = {bind.destination: bind for bind in container.binds if os.path.exists(bind.source)}
    binds |= {str(path): Bind(str(path), str(path), "ro") for path in (code, checkpoint)}
    binds[str(target.parent)] = Bind(str(target.parent), str(target.parent), "rw")
    for path in (code, checkpoint, target.parent):
        if any(char in str(path) for char in ':,"\\'):
            raise UserError(
                f"the path {str(path)!r} contains a character that --bind does not accept", todo="rename it"
            )
    dropped = (*container.devices.values(), "--cleanenv")  # no GPU is needed
    kept = (option for option in container.options if option not in dropped)
    # The outer folder first: one that lies in it is bound on top of it.
    bound = [binds[path].spec for path in sorted(binds, key=len)]
    # Of this shell's variables the image gets none but the job's own; on a node, a job gives it what Slurm gave the job
    return container._replace(options=("--cleanenv", *kept)).words(bound, "--pwd", str(code))


def _target(wanted: Wanted, cwd: Path) -> tuple[str, Path]:
    """Format and absolute path of the file. Raises UserError for what cannot be written."""
    if wanted.format is not None and wanted.format not in FORMATS:
        raise UserError(f"--format {wanted.format!r} is not one of {', '.join(FORMATS)}")
    if wanted.what not in CONTENTS:
        raise UserError(f"--what {wanted.what!r} is not one of {', '.join(CONTENTS)}")
    named = next((form for form, end in FORMATS.items() if wanted.output and wanted.output.suffix == end), None)
    if wanted.format and named and wanted.format != named:
        raise UserError(f"--format {wanted.format} does not match the file name {wanted.output}")
    form = wanted.format or named or "pt"
    target = Path(os.path.abspath(cwd / (wanted.output or f"model{FORMATS[form]}")))
    if target.is_dir():
        raise UserError(f"{target} is a folder", todo=f"add a file name: --output {target}/model{FORMATS[form]}")
    if not target.parent.is_dir():
        raise UserError(f"the folder {target.parent} does not exist", todo="create it first, or choose another folder")
    if target.exists() and not wanted.force:
        raise UserError(f"{target} exists", todo="choose another file with --output, or replace it with --force")
    if not os.access(target.parent, os.W_OK):
        raise UserError(
            f"cannot write to the folder {target.parent}", todo="choose a file in another folder: --output FILE"
        )
    return form, target


def _checkpoint(folder: RunFolder, found: list[Stored], step: int | None, say: Callable[[str], None]) -> Stored:
    """Return the checkpoint to export, verified. Raises UserError if it is damaged or none is good."""
    if step is not None:
        item = checkpoints.check(checkpoints.at_step(found, step))
        if item.fault is None:
            return item
        raise UserError(
            f"this checkpoint is not usable: {item.fault}",
            where=str(item.path),
            todo="export another one: `slurmddp checkpoint verify` shows which are good",
        )
    good = checkpoints.newest_good(
        found, lambda item: say(labelled("warning", f"skipping {item.path.name}: {item.fault}"))
    )
    if good is None:
        raise UserError(f"run {folder.id} has no good checkpoint to export")
    return good


def _prepared(folder: RunFolder, environment: Mapping[str, str]) -> Prepared:
    """Return the run's job with the profile of its submission, or with today's if that is unreadable."""
    # What stands in the environment of today's shell is no layer of a job that is resolved already.
    clean = {name: value for name, value in environment.items() if not name.startswith("SLURMDDP_")}
    request = Request(str(folder.job_yaml), written=True, environment=clean)
    try:
        return prepare(request.adding(("site", str(folder.site_yaml), str(folder.site_yaml))), strict=False)
    except UserError:
        return prepare(request, strict=False)


def _place(prepared: Prepared) -> str:
    container = prepared.plan.container
    return container.image or f"the environment of {container.python}"


def _run(signals: StopSignals, command: Command, say: Callable[[str], None]) -> None:
    """Run the export. Raises UserError with its own message, else ExternalError with its output."""
    if shutil.which("bash") is None:
        raise UserError("bash is not on this machine", todo="export on the login node of the cluster")
    lines: list[str] = []

    def line(text: str) -> None:
        lines.append(text)
        if text.startswith("exported "):
            say(text)

    code = signals.run(command.words, command.environment, line)
    if code == 0:
        return
    told = next((text.removeprefix(_ERROR) for text in lines if text.startswith(_ERROR)), None)
    if told is not None and code == _USERS_MISTAKE:
        raise UserError(told)
    if code == _NOT_FOUND:
        raise UserError(
            f"{command.program} is not on this machine",
            todo="export on a machine that has it (try srun, or a login node), or load its module in `setup`",
        )
    shown = "\n".join(lines[-40:]) or "it printed nothing"
    raise ExternalError(f"the export failed with exit code {code}:\n{shown}")
