"""`slurmddp init`: a commented job file to start from."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slurmddp.errors import ExternalError, UserError
from slurmddp.job.expand import unexpand
from slurmddp.job.site import Site
from slurmddp.launch import found_here
from slurmddp.launch.new_file import write_new
from slurmddp.launch.prepare import job_name
from slurmddp.launch.python_environment import Environment
from slurmddp.launch.schemas import schema_file, schema_path
from slurmddp.launch.this_machine import count_gpus
from slurmddp.render.engine import render
from slurmddp.sites.catalogue import Catalogue
from slurmddp.sites.select import select

TASKS = ("lm", "images")
#: What runs a SIF image.
RUNTIMES = ("apptainer", "singularity")


#: Shows a question with the answers to choose from (none: free text), the default first; returns the answer.
Ask = Callable[[str, Sequence[str]], str]


class Made(NamedTuple):
    """The site of a new job file, why it was chosen, and whether only because no profile matches this host."""

    site: str
    why: str
    guessed: bool = False


class Choices(NamedTuple):
    """What a new job file was made with. image, environment: what the ranks run in; both None: nothing was found."""

    script: str | None
    image: str | None
    environment: Environment | None
    nodes: str = "1"
    account: str | None = None


class Written(NamedTuple):
    """A new job file. notes: what was found and not taken. needs_image: an image must be built first."""

    file: str
    made: Made
    choices: Choices
    notes: tuple[str, ...]
    needs_image: bool

    @property
    def next(self) -> list[str]:
        """Return the next commands."""
        file = shlex.quote(self.file)
        build = [f"slurmddp build-image --job {file}"] if self.needs_image else []
        return [*build, f"slurmddp check {file}", f"slurmddp submit {file}"]

    def as_dict(self) -> dict[str, Any]:
        """Return it for --json."""
        found = self.choices
        software = {"image": found.image, "environment": found.environment and str(found.environment.folder)}
        rest = {"nodes": found.nodes, "account": found.account, "notes": list(self.notes), "next": self.next}
        return {"file": self.file, **self.made._asdict(), "script": found.script, **software, **rest}


def write_job_file(
    path: Path, site: str | None, task: str | None, script: str | None, ask: Ask | None = None
) -> Written:
    """Write the file. ask: of the user, at most three times; None: the likeliest is taken.

    Raises UserError; an existing file is never touched.
    """
    _refuse(path, task, script)
    made, notes = _site(site)
    profile, layer = Catalogue(os.environ).load(made.site)
    choices = _choose(profile, layer.tree, task, script, ask, notes)
    container = layer.tree.get("container") or {}
    in_container = container.get("runtime", "apptainer") != "none"
    write_new(path, _text(path, made.site, profile, layer.tree, task, choices))
    schema_file("job")
    needs = in_container and not (choices.image or choices.environment or container.get("image"))
    return Written(str(path), made, choices, tuple(notes), needs)


def _refuse(path: Path, task: str | None, script: str | None) -> None:
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
    if os.path.lexists(path):  # before a profile is drafted, or a question is asked
        raise UserError(f"{path} exists", todo="choose another name, or remove that file")


def _site(option: str | None) -> tuple[Made, list[str]]:
    """Choose the site; where no profile fits a cluster, draft one. Returns notes, too."""
    from slurmddp.sites.draft.live import look
    from slurmddp.sites.draft.write import Target

    made = choose_site(Catalogue(os.environ), os.environ, option)
    if not made.guessed or made.site != "generic":
        return made, []
    target = Target(None, False, os.environ)
    try:
        live = look([], os.environ)
        target.path(live)  # refuses to replace one
        _, path = target.write(live, [])
    except (UserError, ExternalError, OSError) as error:
        return made, [f"no site profile was drafted: {str(error).splitlines()[0]}"]
    if path is None:
        return made, []
    return Made(path.stem, f"drafted from what Slurm says: {path}"), target.notes(path)


def _choose(
    profile: Site, layer: Mapping[str, Any], task: str | None, script: str | None, ask: Ask | None, notes: list[str]
) -> Choices:
    """Find what the ranks run and what they run it in, and ask where there is a choice."""
    here = Path()

    def one_of(question: str, found: list[str], kind: str) -> str | None:
        if len(found) > 1 and ask:
            return ask(question, found)
        if len(found) > 1:
            notes.append(f"other {kind}: {', '.join(found[1:6])}{', ...' * (len(found) > 6)}")
        return found[0] if found else None

    if script is None and task is None:
        script = one_of("Which script trains?", found_here.training_scripts(here), "training scripts")
    container = layer.get("container") or {}
    listed = found_here.images(here) if container.get("runtime", "apptainer") in RUNTIMES else []
    own = {f"{each.kind} {each.folder}": each for each in _environments(profile, here)}
    software = one_of("What do the ranks run in?", [*listed, *own], "images and environments")
    choices = Choices(script, software if software in listed else None, own.get(software or ""))
    if ask is None or profile.scheduler == "local":
        return choices
    if "resources.account" in profile.required and not (layer.get("resources") or {}).get("account"):
        return choices._replace(account=ask("Which Slurm account pays?", ()) or None)
    return choices._replace(nodes=ask("How many nodes?", ("1",)))


def _environments(profile: Site, folder: Path) -> list[Environment]:
    """On this machine, slurmddp's own environment is taken anyway."""
    found = found_here.environments(folder, os.environ)
    own = os.path.realpath(sys.prefix) if profile.scheduler == "local" else None
    return [each for each in found if os.path.realpath(each.folder) != own]


def _text(path: Path, site: str, profile: Site, layer: Mapping[str, Any], task: str | None, choices: Choices) -> str:
    known = layer.get("resources") or {}
    container = layer.get("container") or {}
    asks = [key.removeprefix("resources.") for key in profile.required if key.startswith("resources.")]
    here = profile.scheduler == "local" and count_gpus(os.environ) > 0
    partition = known.get("partition")
    others = [name for name in profile.partitions if name != partition]
    gpus = profile.partitions[partition].gpus_per_node if partition in profile.partitions else None
    script, environment = choices.script, choices.environment
    return render(
        "job.yaml.j2",
        name=job_name(path),
        file=shlex.quote(str(path)),
        schema=address(schema_path("job")),
        site=site,
        title=profile.title,
        nodes=choices.nodes,
        account=choices.account,
        partition=partition if partition in profile.partitions else None,
        partitions=", ".join(others[:6]) + ", ..." * (len(others) > 6),
        gpus=known.get("gpus_per_node") or gpus,
        script=None if script is None else unexpand(script),
        task=None if script else (task or "lm"),
        standard_library=unexpand(sysconfig.get_path("stdlib")),
        asks=[key for key in asks if key not in known and not (key == "account" and choices.account)],
        recipe={"nvidia": "ngc-pytorch", "none": "cpu-debian"}.get(profile.gpu_vendor),
        has_gpus=here or profile.gpu_vendor != "none",
        knows_gpus=here or _knows_gpus(profile) or "gpus_per_node" in known,
        knows_partitions=bool(profile.partitions),
        in_container=container.get("runtime", "apptainer") != "none",
        environment=environment,
        setup=[unexpand(line) for line in environment.lines] if environment else [],
        image=None if choices.image is None else unexpand(choices.image),
        site_image=container.get("image"),
        slurm=profile.scheduler == "slurm",
    )


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
