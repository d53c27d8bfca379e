"""The files of a run: what is written into a run folder, or by `slurmddp render` anywhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from slurmddp import __version__
from slurmddp.errors import UserError
from slurmddp.launch.prepare import Prepared
from slurmddp.render.documents import job_json, job_yaml, site_yaml
from slurmddp.render.scripts import alert_script, job_script, node_script
from slurmddp.runs.create import write_key
from slurmddp.runs.layout import RunFolder
from slurmddp.runs.snapshot import copy_runtime


def run_files(prepared: Prepared, run_id: str) -> dict[str, str]:
    """Name -> text of every file that is rendered for a run."""
    plan, resolved = prepared.plan, prepared.resolved
    files = {
        "job.sh": job_script(plan),
        "node.sh": node_script(plan),
        "job.yaml": job_yaml(resolved, plan),
        "site.yaml": site_yaml(resolved),
    }
    optional = {
        "job.json": job_json(plan, run_id),
        "alert.sh": alert_script(plan),
    }
    files |= {name: text for name, text in optional.items() if text is not None}
    return files


def write_rendered(prepared: Prepared, folder: Path, say: Callable[[str], None]) -> list[Path]:
    """Write the files of `slurmddp render`; a file that is there and differs is not overwritten.

    Raises UserError where the folder cannot be written or holds other files of these names.
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
    elif prepared.plan.container.runtime != "none":
        say("note: no image.def: neither container.recipe nor container.base says what the image is made from")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            path = folder / name
            if path.exists() and path.read_bytes() != text.encode("utf-8"):
                raise UserError(f"{path} exists and differs", todo="choose another folder with -o, or remove it")
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        own = RunFolder(folder)
        if not own.code.exists():
            copy_runtime(own.code_runtime)
        if not own.key.exists():
            write_key(own.key)
    except OSError as error:
        raise UserError(f"cannot write into {folder}: {error.strerror}", todo="choose another folder: -o DIR") from None
    return [folder / name for name in files]
