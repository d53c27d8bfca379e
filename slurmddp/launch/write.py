"""The files of a run: what is written into a run folder, or by `slurmddp check --write` anywhere."""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from slurmddp import __version__
from slurmddp.errors import UserError
from slurmddp.job.plan.model import Plan
from slurmddp.launch import accelerate
from slurmddp.launch.imports import imported_elsewhere
from slurmddp.launch.prepare import Prepared
from slurmddp.launch.workdir import named_paths
from slurmddp.render.documents import job_json, job_yaml, site_yaml
from slurmddp.render.scripts import alert_files, job_script, node_script
from slurmddp.run.create import make_folder, write_file, write_key, write_pair
from slurmddp.run.layout import RunFolder
from slurmddp.run.snapshot import code_hash, copy_project, copy_runtime, hash_of, read_list
from slurmddp.run.survey import Survey, shown, survey, survey_listed
from slurmddp.styled import labelled


def run_files(prepared: Prepared, run_id: str) -> dict[str, str]:
    """Name -> text of every file that is rendered for a run."""
    plan, resolved = prepared.plan, prepared.resolved
    ranks = job_json(plan, run_id)
    return {
        "job.sh": job_script(plan),
        "node.sh": node_script(plan),
        **alert_files(plan),
        "job.yaml": job_yaml(resolved, plan),
        "site.yaml": site_yaml(resolved),
        **accelerate.copy(plan),
        **({} if ranks is None else {"job.json": ranks}),
        **prepared.files,
    }


def survey_project(plan: Plan, *exclude: Path) -> Survey | None:
    """Return what of the user's project is copied to the run folder; None if nothing is.

    exclude: folders that are no code, beside those of the runs and of caches. Raises UserError.
    """
    if plan.program.project is None or not plan.job.snapshot:
        return None
    folder = RunFolder(Path(plan.program.project).parent.parent)
    if plan.program.project == str(folder.project) and folder.exists:
        # `slurmddp rerun`: what the program wrote there is no code.
        names = (path.removeprefix("project/") for path in read_list(folder) if path.startswith("project/"))
        return survey_listed(folder.project, names)
    no_code = [*exclude, *(Path(path) for path in (plan.runs_root, plan.cache) if path)]
    surveyed = survey(Path(plan.program.project), limit=plan.job.snapshot_limit * 1024 * 1024, exclude=no_code)
    script = plan.program.script
    if plan.program.in_snapshot and script.startswith("code/project/"):
        relative = script.removeprefix("code/project/")
        surveyed.warnings.extend(_absent(surveyed, relative, no_code))
        if not plan.program.bash:
            surveyed.warnings.extend(imported_elsewhere(plan, surveyed, relative))
    return surveyed


def _absent(surveyed: Survey, script: str, no_code: Iterable[Path]) -> Iterator[str]:
    """Return a warning for files that the script's text names, that lie in the project, and that are not copied."""
    copied = {str(parent) for item in surveyed.items for parent in (Path(item.relative), *Path(item.relative).parents)}
    skipped = {os.path.realpath(path) for path in no_code}
    for name in dict.fromkeys(map(os.path.normpath, named_paths(surveyed.root / script))):
        path = surveyed.root / name
        if (
            name in copied
            or ".." in name.split("/")
            or any(Path(os.path.realpath(path)).is_relative_to(folder) for folder in skipped)
        ):
            continue
        if path.is_file() or (path.is_dir() and any(path.iterdir())):
            yield (
                f"{shown(name)}: not copied, but {shown(script)} names it: add it to git, or remove it from .gitignore "
                "or .slurmddpignore; if it is data, give its absolute path, and bind it (container.binds)"
            )


def write_rendered(prepared: Prepared, folder: Path, say: Callable[[str], None]) -> list[Path]:
    """Write the files of `check --write`, and return their paths: all that job.sh needs to run from this folder.

    Whatever is there and differs is not overwritten. Raises UserError for that, and where the folder cannot be written.
    """
    files = run_files(prepared, "RUN_ID")
    container = prepared.resolved.job.container
    if container.base is not None or container.recipe is not None:
        from slurmddp.images.definition import render_definition
        from slurmddp.images.recipe import read_recipe

        options = {"base": container.base, "pip": container.pip}
        files["image.def"] = render_definition(
            read_recipe(container.recipe, options, Path.cwd(), os.environ), __version__
        )
    elif prepared.plan.container.image:
        say("note: no image.def written: neither container.recipe nor container.base is set")
    run = RunFolder(folder)
    if prepared.plan.accelerate and run.accelerate.name not in files:
        say(f"note: no {run.accelerate.name} written: {prepared.plan.accelerate} does not exist on this machine")
    project = _project(prepared, folder, say)
    try:
        make_folder(folder)
        different = [
            folder / name
            for name, text in files.items()
            if (folder / name).exists() and (folder / name).read_bytes() != text.encode("utf-8")
        ]
        if run.code.exists() and code_hash(run.code) != hash_of(project):
            different.append(run.code)
        if different:
            todo = "choose another folder with --write, or remove that file"
            raise UserError(f"{different[0]} exists with different content", todo=todo)
        for name, text in files.items():
            make_folder((folder / name).parent)
            if not (folder / name).exists():
                write_file(folder / name, text.encode("utf-8"))
        if not run.code.exists():
            copy_runtime(run.code)
            if project is not None:
                copy_project(project, run.project)
        for made in (run.logs, run.markers, run.checkpoints):  # sbatch does not make its log's folder
            make_folder(made)
        if not run.key.exists():
            write_key(run.key)
        if not run.pair.exists():
            for warning in write_pair_of(prepared.plan, run):
                say(f"warning: {warning}")
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}", todo="choose another one: --write DIR") from None
    return [*(folder / name for name in files), run.code_archive]


def write_pair_of(plan: Plan, run: RunFolder) -> list[str]:
    """Make the run's key pair, if the plan has use for one. Returns warnings. Raises UserError, OSError."""
    if not plan.encrypts_store or not (why := write_pair(run.pair)):
        return []
    if plan.job.network.store_tls:
        raise UserError(f"network.store_tls is true, but {why}", todo="install openssl, or remove the key")
    return [f"the store between the nodes has no TLS: {why}. docs/security.md says what that leaves open"]


def _project(prepared: Prepared, folder: Path, say: Callable[[str], None]) -> Survey | None:
    """Return what of the user's project is copied. Raises UserError, but not if the project is on another machine."""
    root = prepared.plan.program.project
    if root is None or not prepared.plan.job.snapshot:
        return None
    if not os.path.exists(root):
        say(f"note: no code/project written: {root} does not exist on this machine")
        return None
    surveyed = survey_project(prepared.plan, folder)
    for warning in surveyed.warnings if surveyed else ():
        say(labelled("warning", warning))
    return surveyed
