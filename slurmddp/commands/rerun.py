"""rerun: a run again, from its start, with the code, image and configuration that it had."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmddp.commands import options as opt
from slurmddp.commands.submit import DryRunOption, hand_over, show_dry_run
from slurmddp.errors import UserError
from slurmddp.job.document import read_file
from slurmddp.job.resolve import Request
from slurmddp.launch.find import find_own_run
from slurmddp.launch.prepare import Prepared, prepare
from slurmddp.run import manifest
from slurmddp.run.gate import OwnRun
from slurmddp.run.snapshot import code_files, hash_of_files, read_list
from slurmddp.run.version import version
from slurmddp.styled import labelled
from slurmddp.visible import one_line

#: What tells whether an image is the one that the run had, the best first.
_IDENTITY = ("sha256", "sif_id")
_SHOWN = 3  # files in a message


def prepare_again(
    folder: OwnRun, say: Callable[[str], None], job_file: Path | None = None, workdir: str | None = None
) -> Prepared:
    """Prepare the job of a run with the code that the run folder has. Works from the directory of its submission.

    job_file: another job with the same code. workdir: another train.workdir. Raises UserError where the code or the
    image is no longer what it was.
    """
    facts = manifest.read(folder)
    _refuse_other_code(folder, facts, say)
    _refuse_other_image(facts)
    if (now := version()) != facts.get("slurmddp"):
        made_by = facts.get("slurmddp")
        say(labelled("warning", f"the run was made by slurmddp {made_by}, this is {now}: its runtime may differ"))
    directory = facts.get("directory")
    try:
        os.chdir(str(directory))  # a script's own relative paths begin there
    except OSError as error:
        say(labelled("warning", f"the directory of the submission is not used: {directory}: {error.strerror}"))
    job_file = job_file or folder.job_yaml
    options = _code_options(folder, job_file)
    if workdir is not None:
        options.append(("train.workdir", workdir, "--workdir"))
    return prepare(Request(job_file, (), options, environment={**os.environ, "PWD": os.getcwd()}))


def _refuse_other_code(folder: OwnRun, facts: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Raise UserError for a file that is not as it was. What the program wrote there is not code: name it."""
    now = code_files(folder.code)  # of a folder that is gone: none
    before = read_list(folder)
    changed = [path for path, digest in before.items() if now.get(path) != digest]
    if changed or not before or hash_of_files(before) != facts.get("code_hash"):
        todo = f"to use your current code, submit its job: slurmddp submit {folder.job_yaml}"
        raise UserError(f"the code in {folder.code} is not what the run was submitted with{_shown(changed)}", todo=todo)
    if new := [path for path in now if path not in before]:
        say(f"note: not copied, because they came into {folder.code} after the submission{_shown(new)}")


def _shown(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return (": " + ", ".join(map(one_line, paths[:_SHOWN])) + more) if paths else ""


def _refuse_other_image(facts: Mapping[str, Any]) -> None:
    """Compare by hash or SIF id, else by size and time."""
    before = facts.get("image")
    if not isinstance(before, Mapping):
        return
    path = Path(str(before.get("path")))
    now = manifest.image_facts(path)
    known = [name for name in _IDENTITY if before.get(name) is not None and now[name] is not None]
    names = known[:1] or ["kind", "bytes", "mtime"]
    if any(before.get(name) != now[name] for name in names):
        raise UserError(
            f"the image {path} is not the one that the run had ({names[0]} was {before.get(names[0])}, "
            f"is {now[names[0]]})",
            todo="restore that image, or submit the run's job file with the new one",
        )


def _code_options(folder: OwnRun, job_file: Path) -> list[tuple[str, Any, str]]:
    """Return the keys that lead to the run folder's code. Raises UserError where it holds none of the script."""
    train = read_file(job_file, "run").tree.get("train")
    train = train if isinstance(train, dict) else {}
    script, project = train.get("script"), train.get("project")
    options: list[tuple[str, Any, str]] = []
    if folder.accelerate.exists() and job_file == folder.job_yaml:  # another job may name another file
        options.append(("launch.accelerate", _plain(folder.accelerate), "the run's copy"))
    if script is None and project is None:
        return options
    if not folder.project.is_dir():
        todo = f"to use your current code, submit its job: slurmddp submit {folder.job_yaml}"
        raise UserError(f"run {folder.id} has no copy of its code (snapshot: false)", todo=todo)
    options.append(("train.project", _plain(folder.project), "the run's code"))
    if script is not None:
        inside = os.path.relpath(str(script), str(project or os.path.dirname(str(script))))
        options.append(("train.script", _plain(folder.project / inside), "the run's code"))
    return options


def _plain(path: Path) -> str:
    """A path in which `$` has no meaning."""
    return str(path).replace("$", "$$")


def rerun(
    run: opt.Run = opt.LAST,
    workdir: str | None = opt.value("submit|run|DIR", "Where your script runs, if not where it ran before"),
    dry_run: DryRunOption = False,
    yes: opt.Yes = False,
    as_json: opt.Json = False,
) -> None:
    """Submit a run again from its start, with the code, image and configuration that it had."""
    todo = "read its job file, then submit it: slurmddp submit RUN_FOLDER/job.yaml"
    folder = find_own_run(run, os.environ, to="run its code with your account", todo=todo)
    if not dry_run:
        opt.confirm(run, folder, "rerun", yes=yes)
    prepared = prepare_again(folder, opt.say, workdir=workdir)
    if dry_run:
        show_dry_run(prepared, as_json=as_json)
    else:
        hand_over(prepared, as_json=as_json, repeats=folder.id)
