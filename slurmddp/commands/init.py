"""init: a job file from what is found here: training scripts, images, Python environments with torch."""

import json
import os
import re
import shlex
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import typer
from pydantic import ValidationError

from slurmddp.commands import options as opt
from slurmddp.commands.terminal import write_new
from slurmddp.container import runtime_named
from slurmddp.errors import ExternalError, UserError
from slurmddp.images.base import is_sif
from slurmddp.job.expand import unexpand
from slurmddp.job.job import Resources
from slurmddp.job.site import Site
from slurmddp.launch.job_check.cluster import Cluster
from slurmddp.launch.named_file import job_name, program_name
from slurmddp.launch.python_environment import Environment, environments_here
from slurmddp.launch.schemas import schema_file, schema_path
from slurmddp.launch.this_machine import count_gpus
from slurmddp.program.facts import Answer
from slurmddp.program.read import is_training_program, read_program
from slurmddp.render.engine import render
from slurmddp.sites.catalogue import Catalogue
from slurmddp.sites.draft.choose import Made, address, choose_site
from slurmddp.sites.draft.live import look
from slurmddp.sites.draft.write import Target
from slurmddp.styled import labelled

#: Python files that are read: a folder may be a home.
_FILES, _SECONDS = 300, 20.0
_NOT_TRAINING = re.compile(r"test_.*|.*_test|conftest|setup|__init__|.*config.*")


def training_scripts(folder: Path) -> list[str]:
    """Return the scripts in this folder and those in it that train, relative, the likeliest first.

    Without any that surely does, those that perhaps do.
    """
    until = time.monotonic() + _SECONDS
    by_answer: dict[Answer, list[str]] = {answer: [] for answer in Answer}
    for path in _python_files(folder):
        if time.monotonic() < until:
            by_answer[is_training_program(str(folder / path), [str(folder)])].append(path)
    scripts = by_answer[Answer.YES] or by_answer[Answer.UNKNOWN]
    return sorted(scripts, key=lambda path: ("train" not in Path(path).stem, path.count(os.sep), path))


def _python_files(folder: Path) -> Iterator[str]:
    files = [path for pattern in ("*.py", "[!.]*/*.py") for path in sorted(folder.glob(pattern))]
    named = [
        each for each in files if not _NOT_TRAINING.fullmatch(each.stem) and each.parent.name not in ("tests", "test")
    ]
    return (str(path.relative_to(folder)) for path in named[:_FILES])


def images(folder: Path) -> list[str]:
    """Return the SIF images in this folder and in images/, relative, the newest first."""
    by_time: list[tuple[float, str]] = []
    for path in (*folder.glob("*.sif"), *folder.glob("images/*.sif")):
        try:
            if is_sif(path):
                by_time.append((path.stat().st_mtime, str(path.relative_to(folder))))
        except OSError:
            continue  # nobody can use it
    return [name for _, name in sorted(by_time, reverse=True)]


TASKS = ("lm", "images")
#: Shows a question with the answers to choose from (none: free text), the default first; returns the answer.
Ask = Callable[[str, Sequence[str]], str]


class Choices(NamedTuple):
    """What a new job file was made with. image, environment: what the ranks run in; both None: nothing was found."""

    script: str | None
    image: str | None
    environment: Environment | None
    nodes: str = "1"
    account: str | None = None


class Gpus(NamedTuple):
    """GPUs per node, in words, and as the job asks for them. per_node: None where nobody knows.

    default: whether a job gets them without asking.
    """

    text: str
    per_node: int | None = None
    default: bool = False


class Written(NamedTuple):
    """A new job file. notes: what was found and not taken. needs_image: an image must be built first."""

    file: str
    made: Made
    choices: Choices
    gpus: Gpus
    notes: tuple[str, ...]
    needs_image: bool

    @property
    def next(self) -> list[str]:
        file = shlex.quote(self.file)
        build = [f"slurmddp build-image --job {file}"] if self.needs_image else []
        return [*build, f"slurmddp check {file}", f"slurmddp submit {file}"]

    def as_dict(self) -> dict[str, Any]:
        choices = self.choices
        software = {"image": choices.image, "environment": choices.environment and str(choices.environment.folder)}
        rest = {
            "gpus_per_node": self.gpus.per_node,
            "nodes": choices.nodes,
            "account": choices.account,
            "notes": list(self.notes),
            "next": self.next,
        }
        return {"file": self.file, **self.made._asdict(), "script": choices.script, **software, **rest}


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
    in_container = runtime_named(container.get("runtime")).needs_image
    gpus = _gpus(profile, layer.tree.get("resources") or {})
    write_new(path, _text(path, made.site, profile, layer.tree, task, choices, gpus))
    schema_file("job")
    needs = in_container and not (choices.image or choices.environment or container.get("image"))
    return Written(str(path), made, choices, gpus, tuple(notes), needs)


def _refuse(path: Path, task: str | None, script: str | None) -> None:
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"{path} does not end in .yaml", todo=f"slurmddp init {path.with_suffix('.yaml')}")
    if not str(path).isprintable():
        todo = "remove the characters that cannot be printed"
        raise UserError(f"{str(path)!r} cannot be the name of a job file", todo=todo)
    opt.one_of({"--task": task is not None, "--script": script is not None}, todo="remove one")
    if task is not None and task not in TASKS:
        raise UserError(f"unknown task {task!r}", where="--task", todo=f"use one of {', '.join(TASKS)}, or --script")
    if os.path.lexists(path):  # before a profile is drafted, or a question is asked
        raise UserError(f"{path} exists", todo="choose another name, or remove that file")


def _site(option: str | None) -> tuple[Made, list[str]]:
    """Choose the site; where no profile fits a cluster, draft one. Returns notes, too."""
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

    def one_of(question: str, options: list[str], kind: str) -> str | None:
        if len(options) > 1 and ask:
            return ask(question, options)
        if len(options) > 1:
            notes.append(f"other {kind}: {', '.join(options[1:6])}{', ...' * (len(options) > 6)}")
        return options[0] if options else None

    if script is None and task is None:
        script = one_of("Which script trains?", training_scripts(here), "training scripts")
    container = layer.get("container") or {}
    listed = images(here) if runtime_named(container.get("runtime")).takes_sif else []
    environments = {f"{each.kind} {each.folder}": each for each in _environments(profile, here)}
    software = one_of("What do the ranks run in?", [*listed, *environments], "images and environments")
    choices = Choices(script, software if software in listed else None, environments.get(software or ""))
    if ask is None or not profile.queues:
        return choices
    if "resources.account" in profile.required and not (layer.get("resources") or {}).get("account"):
        return choices._replace(account=ask("Which Slurm account pays?", ()) or None)
    nodes = ask("How many nodes?", ("1",))
    while not _are_nodes(nodes):
        nodes = ask("How many nodes (2, 2-4 or 4+1)?", ("1",))
    return choices._replace(nodes=nodes)


def _are_nodes(text: str) -> bool:
    try:
        Resources.model_validate({"nodes": int(text) if text.isdecimal() else text})
    except ValidationError:
        return False
    return True


def _environments(profile: Site, folder: Path) -> list[Environment]:
    """Return the environments with torch: the active ones, then .venv and venv of this folder (uv makes the first)."""
    interpreter = os.path.realpath(sys.prefix) if not profile.queues else None  # it is taken anyway
    here = environments_here([folder / ".venv", folder / "venv"], os.environ)
    return [each for each in here if os.path.realpath(each.folder) != interpreter]


def _gpus(profile: Site, resources: Mapping[str, Any]) -> Gpus:
    """Return the GPUs per node: the profile's, else what Slurm says of the partition that the job gets."""
    if not profile.queues:
        count = count_gpus(os.environ)
        return Gpus(f"{count or 'none'} on this machine", count, True)
    name = resources.get("partition")
    known = profile.partitions[name].gpus_per_node if name in profile.partitions else None
    count = 0 if profile.gpu_vendor == "none" else resources.get("gpus_per_node", known)
    if count is not None:
        return Gpus(f"{count or 'none'} per node" + (f" of partition {name}" if name else ""), count, True)
    if by_profile := {each: part.gpus_per_node for each, part in profile.partitions.items() if part.gpus_per_node}:
        listed = ", ".join(f"{number} ({each})" for each, number in by_profile.items())
        return Gpus(f"all of a node: {listed}", max(by_profile.values()), True)
    cluster = Cluster()
    row, nodes = cluster.partition(name), cluster.all_nodes
    if row is None or nodes is None:
        return Gpus("unknown: Slurm did not say; set gpus_per_node")
    by_partition: dict[str, set[int]] = {}
    for node in nodes:
        for each in node.partitions:
            by_partition.setdefault(each, set()).add(sum(node.gpus.values()))
    name = row["PartitionName"]
    counts = by_partition.get(name, {0})
    if most := max(counts):
        least = min(counts - {0})
        return Gpus(f"{least}{f' to {most}' if most > least else ''} per node of partition {name} (Slurm)", least)
    others = ", ".join(f"{each} ({max(have)})" for each, have in by_partition.items() if max(have))
    return Gpus(f"none in partition {name} (Slurm)" + f"; partitions with GPUs: {others}" * bool(others), 0)


def _text(
    path: Path, site: str, profile: Site, layer: Mapping[str, Any], task: str | None, choices: Choices, gpus: Gpus
) -> str:
    known = layer.get("resources") or {}
    container = layer.get("container") or {}
    asks = [key.removeprefix("resources.") for key in profile.required if key.startswith("resources.")]
    partition = known.get("partition")
    others = [name for name in profile.partitions if name != partition]
    script, environment = choices.script, choices.environment
    return render(
        "job.yaml.j2",
        name=_name(path, choices.script, task),
        file=shlex.quote(str(path)),
        schema=address(schema_path("job")),
        site=site,
        title=profile.title,
        nodes=choices.nodes,
        account=choices.account,
        partition=partition if partition in profile.partitions else None,
        partitions=", ".join(others[:6]) + ", ..." * (len(others) > 6),
        gpus=gpus,
        script=None if script is None else unexpand(script),
        task=None if script else (task or "lm"),
        standard_library=unexpand(sysconfig.get_path("stdlib")),
        asks=[key for key in asks if key not in known and not (key == "account" and choices.account)],
        recipe={"nvidia": "ngc-pytorch", "none": "cpu-debian"}.get(profile.gpu_vendor),
        knows_partitions=bool(profile.partitions),
        in_container=runtime_named(container.get("runtime")).needs_image,
        environment=environment,
        setup=[unexpand(line) for line in environment.lines] if environment else [],
        saves=_saves(script),
        image=None if choices.image is None else unexpand(choices.image),
        site_image=container.get("image"),
        slurm=profile.queues,
    )


def _saves(script: str | None) -> dict[str, tuple[str, str]]:
    """Return what the text of a script says of its saves: the value of each key for the job file, and why."""
    facts = read_program(script, [os.path.dirname(script) or "."]) if script else None
    if facts is None or facts["saves_in_run"].answer is Answer.YES:  # where slurmddp looks anyway
        return {}
    return {each.key: (unexpand(json.dumps(each.value)), each.why) for each in facts.proposals}


def _name(path: Path, script: str | None, task: str | None) -> str:
    """Return the name of the job file, or of what it trains where that is job.yaml, as most are."""
    if path.stem != "job":
        return job_name(path)
    return program_name(Path(script)) if script else task or "lm"


def init(
    path: Path = opt.argument("JOB.yaml", "File to write; it must not exist yet", default=Path("job.yaml")),
    site: opt.Site = None,
    script: str | None = opt.value("FILE", "Train your own script"),
    task: str | None = opt.value("lm|images", "Train a bundled task"),
    yes: bool = opt.flag("--yes", "Ask nothing: take the likeliest of what was found"),
    as_json: opt.Json = False,
) -> None:
    """Write a commented job file from what is found here: the cluster, its partitions and GPUs, your training script,
    an image or the active Python environment. Asks at most three questions, on a terminal only. If no site profile
    fits the cluster, one is drafted (site init)."""
    asks = not yes and not as_json and sys.stdin.isatty() and sys.stderr.isatty()
    written = write_job_file(path, site, task, script, _ask if asks else None)
    typer.echo(opt.json_text(written.as_dict()) if as_json else path)
    choices = written.choices
    say_site(written.made, "init")
    for name, value in (
        ("script", choices.script),
        ("image", choices.image),
        ("python", choices.environment and f"{choices.environment.folder} ({choices.environment.source})"),
        ("gpus", written.gpus.text),
    ):
        if value:
            opt.say(f"{name:<8}{value}")
    for note in written.notes:
        opt.say(labelled("note", note))
    opt.say(f"next    {written.next[0]}")


def _ask(question: str, answers: Sequence[str]) -> str:
    """Ask on the terminal; Enter takes the first answer."""
    if len(answers) < 2:
        return str(typer.prompt(question, default=answers[0] if answers else "", err=True)).strip()
    for number, answer in enumerate(answers, 1):
        opt.say(f"  {number}  {answer}")
    while True:
        choice: int = typer.prompt(question, default=1, type=int, err=True)
        if 1 <= choice <= len(answers):
            return str(answers[choice - 1])


def say_site(made: Made, command: str) -> None:
    opt.say(f"site    {made.site} ({made.why})")
    if made.guessed:
        opt.say(f"`slurmddp site` lists all sites; `slurmddp {command} --site NAME` selects another one")
