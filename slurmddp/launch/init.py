"""`slurmddp init`: a commented job file to start from."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from slurmddp.errors import UserError
from slurmddp.launch.new_file import write_new
from slurmddp.launch.prepare import job_name
from slurmddp.launch.schemas import schema_file, schema_path
from slurmddp.launch.this_machine import count_gpus
from slurmddp.render.engine import render
from slurmddp.sites.catalogue import Catalogue
from slurmddp.sites.select import select
from slurmddp.spec.expand import unexpand
from slurmddp.spec.site import Site

TASKS = ("lm", "images")


class Made(NamedTuple):
    """The site of a new job file, why it was chosen, and whether only because no profile matches this host."""

    site: str
    why: str
    guessed: bool = False


def write_job_file(path: Path, site: str | None, task: str | None, script: str | None) -> Made:
    """Write the file. Raises UserError; an existing file is never touched."""
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"{path} does not end in .yaml", todo=f"slurmddp init {path.with_suffix('.yaml')}")
    if not str(path).isprintable():
        raise UserError(
            f"{str(path)!r} cannot be the name of a job file", todo="remove the characters that cannot be printed"
        )
    if task is not None and script is not None:
        raise UserError("--task and --script cannot be combined", todo="remove one")
    if task is not None and task not in TASKS:
        raise UserError(f"unknown task {task!r}", where="--task", todo=f"use one of {', '.join(TASKS)}, or --script")
    catalogue = Catalogue(os.environ)
    made = choose_site(catalogue, os.environ, site)
    profile, layer = catalogue.load(made.site)
    known = layer.tree.get("resources") or {}
    container = layer.tree.get("container") or {}
    asks = [key.removeprefix("resources.") for key in profile.required if key.startswith("resources.")]
    here = profile.scheduler == "local" and count_gpus(os.environ) > 0
    text = render(
        "job.yaml.j2",
        name=job_name(path),
        file=shlex.quote(str(path)),
        schema=address(schema_path("job")),
        site=made.site,
        title=profile.title,
        script=None if script is None else unexpand(script),
        task=None if script else (task or "lm"),
        standard_library=unexpand(sysconfig.get_path("stdlib")),
        asks=[key for key in asks if key not in known],
        recipe={"nvidia": "ngc-pytorch", "none": "cpu-debian"}.get(profile.gpu_vendor),
        has_gpus=here or profile.gpu_vendor != "none",
        knows_gpus=here or _knows_gpus(profile) or "gpus_per_node" in known,
        knows_partitions=bool(profile.partitions),
        in_container=container.get("runtime", "apptainer") != "none",
        site_image=container.get("image"),
        slurm=profile.scheduler == "slurm",
    )
    write_new(path, text)
    schema_file("job")
    return made


def choose_site(catalogue: Catalogue, environment: Mapping[str, str], option: str | None) -> Made:
    """Select a site as for a job without `site:`. If none matches: generic if sbatch exists, else local.

    Jobs of the site `local` train on this machine, which must not be a login node.
    """
    found = select(catalogue, environment, option)
    if found is not None:
        return Made(*found)
    if shutil.which("sbatch", path=environment.get("PATH")):
        return Made("generic", "no profile matches this host, and sbatch is in PATH", True)
    return Made("local", "no profile matches this host, and sbatch is not in PATH", True)


def address(path: Path) -> str:
    """Return a file as editors take it in a comment: its path, or an address if the path has a blank."""
    return str(path) if re.fullmatch(r"[\w./+-]+", str(path)) else path.as_uri()


def _knows_gpus(profile: Site) -> bool:
    """Return whether the profile knows the GPUs per node of any partition."""
    return any(partition.gpus_per_node is not None for partition in profile.partitions.values())
