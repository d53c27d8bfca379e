"""`slurmddp init`: a commented job file to start from."""

from __future__ import annotations

import os
import platform
import shlex
import sysconfig
from pathlib import Path

from slurmddp.errors import UserError
from slurmddp.launch.prepare import job_name
from slurmddp.render.engine import render
from slurmddp.sites.catalogue import Catalogue
from slurmddp.sites.detect import detect
from slurmddp.spec.expand import unexpand

TASKS = ("lm", "images")


def write_job_file(path: Path, site: str | None, task: str | None, script: str | None) -> str:
    """Write the file and return the site's name. Raises UserError; an existing file is never touched."""
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"{path} does not end in .yaml", todo=f"slurmddp init {path.with_suffix('.yaml')}")
    if not str(path).isprintable():
        raise UserError(f"{str(path)!r} is no name for a job file", todo="leave out what cannot be printed")
    if task is not None and script is not None:
        raise UserError("--task and --script exclude each other", todo="leave one out")
    if task is not None and task not in TASKS:
        raise UserError(f"unknown task {task!r}", where="--task", todo=f"one of {', '.join(TASKS)}, or --script")
    catalogue = Catalogue(os.environ)
    if site is None:
        found = detect(catalogue, platform.node(), os.environ)
        site = os.environ.get("SLURMDDP_SITE") or (found[0] if found else "local")
    profile, layer = catalogue.load(site)
    known = layer.tree.get("resources") or {}
    container = layer.tree.get("container") or {}
    asks = [key.removeprefix("resources.") for key in profile.required if key.startswith("resources.")]
    text = render(
        "job.yaml.j2",
        name=job_name(path),
        file=shlex.quote(str(path)),
        site=site,
        title=profile.title,
        script=None if script is None else unexpand(script),
        task=None if script else (task or "lm"),
        standard_library=unexpand(sysconfig.get_path("stdlib")),
        asks=[key for key in asks if key not in known],
        recipe={"nvidia": "ngc-pytorch", "none": "cpu-debian"}.get(profile.gpu_vendor),
        has_gpus=profile.gpu_vendor != "none",
        in_container=container.get("runtime", "apptainer") != "none",
        site_image=container.get("image"),
        slurm=profile.scheduler == "slurm",
    )
    try:
        with path.open("x", encoding="utf-8") as handle:
            handle.write(text)
    except FileExistsError:
        raise UserError(f"{path} exists", todo="choose another name, or remove it") from None
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", todo="choose another folder") from None
    return site
