"""The job file of an imported script, and whether it is complete."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from slurmddp.errors import UserError
from slurmddp.job.job import Resources
from slurmddp.job.resolve import Request
from slurmddp.launch.named_file import JOB_SUFFIXES, job_name
from slurmddp.launch.prepare import prepare
from slurmddp.launch.schemas import schema_file
from slurmddp.scripts.check.fix import fix_script
from slurmddp.scripts.check.script import parse, read
from slurmddp.scripts.imports.commands import carry_commands
from slurmddp.scripts.imports.imported import Imported
from slurmddp.scripts.imports.options import carry_options
from slurmddp.scripts.imports.program import carry_program, launch_commands, main_launch, refuse_others
from slurmddp.scripts.imports.proof import evaluated, prove, refuse_started
from slurmddp.sites.catalogue import Catalogue
from slurmddp.sites.draft.choose import Made, address, choose_site
from slurmddp.visible import one_line

#: What bash or sbatch cannot read is corrected first; how the script launches is read as it stands.
_UNREADABLE = {
    "crlf", "invisible-character", "no-shebang", "broken-continuation", "blank-in-assignment", "no-program",
    "sbatch-option", "sbatch-after-command", "sbatch-variable", "conda-activate",
}  # fmt: skip
_ORDER = ("name", "site", "resources", "container", "environment", "environment_from", "setup", "network", "launch",
          "timeouts", "recovery", "train")  # fmt: skip
_RESOURCES = tuple(Resources.model_fields)
_LONGEST = 120  # characters of a line that is shown in a comment


class JobText(NamedTuple):
    """text: the job file; problems: why slurmddp would not submit it yet; valid: they are not the file's, but depend
    on the shell that submits it, or on you; lost: lines of the script without which another job would start."""

    text: str
    made: Made
    left: int
    lost: list[str]
    problems: list[str]
    valid: bool


def import_script(path: Path, site: str | None, shown: str) -> JobText:
    """Read a batch script and return its job file. shown: the name that the file will have. Raises UserError."""
    _refuse_others(path)
    catalogue = Catalogue(os.environ)
    made = choose_site(catalogue, os.environ, site)
    if made.guessed:  # not `local`, where sbatch is not in PATH: a batch script is for a cluster
        made = made._replace(site="generic")
    _, layer = catalogue.load(made.site)
    fixed = fix_script(read(path), only=_UNREADABLE)
    job = Imported(parse(fixed.text, path), fixed.origins, layer.tree)
    runs = evaluated(job)
    refuse_others(job, refuse_started(job, runs or ()))
    job.set("name", job_name(path))
    job.set("site", made.site)
    carry_options(job)
    launch = main_launch(job)
    carry_commands(job, launch_commands(job, launch), launch)
    problems = []
    if launch:
        carry_program(job, launch)
    elif runs:
        problems.append("no launch of torchrun, accelerate, deepspeed or python was found: set train.script")
    else:
        problems.append("bash could not evaluate the script here, so no launch of it is known: set train.script")
    if launch or runs is None:
        prove(job, runs)
    job.withhold()
    text = _text(job, path, shown)
    refused, missing = _judge(text, shown)
    lost = [
        f"line {_origin(job, line)}: {one_line(text)} -> {one_line(why)}" for line, text, why in sorted(set(job.lost))
    ]
    valid = not refused and launch is not None
    return JobText(text, made, len(set(job.left)), lost, [*problems, *refused, *missing], valid)


def _refuse_others(path: Path) -> None:
    name = one_line(str(path))
    if path.suffix in JOB_SUFFIXES:
        raise UserError("is a job file, not a batch script", where=name, todo=f"slurmddp check {name}")
    if path.suffix == ".py":
        raise UserError(
            "is a Python script, not a batch script", where=name, todo=f"slurmddp init job.yaml --script {name}"
        )


def _text(job: Imported, path: Path, shown: str) -> str:
    import yaml

    tree: dict[str, Any] = {name: {} for name in _ORDER}
    for key, value in job.keys.items():
        node = tree
        for part in key[:-1]:
            node = node.setdefault(part, {})
        node[key[-1]] = value
    lines = [
        f"# Made by `slurmddp import {one_line(str(path))}`. Preview it:  slurmddp submit {shown} --dry-run",
        f"# yaml-language-server: $schema={address(schema_file('job'))}",
        f"# What slurmddp adds to the script: {_added(job)}.",
        *_comments(job),
        "",
    ]
    tree["resources"] = {name: tree["resources"][name] for name in _RESOURCES if name in tree["resources"]}
    body = {name: value for name, value in tree.items() if value not in ({}, [])}
    return "\n".join(lines) + yaml.safe_dump(body, sort_keys=False, width=10**6, allow_unicode=True)


def _added(job: Imported) -> str:
    requeue = job.keys.get(("recovery", "requeue")) != "never"
    added = ["requeue (recovery.requeue)"] * requeue
    return ", ".join(
        [*added, "a stop before the time limit (timeouts.stop)", "restarts of ranks (launch.max_restarts)"]
    )


def _comments(job: Imported) -> list[str]:
    """Return what is not carried over, each with line and text."""
    lines = []
    for line, text, why in sorted(job.left):
        cut = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
        lines.append(f"#   line {_origin(job, line)}: {one_line(cut)}  ->  {one_line(why)}")
    if job.prints:
        numbers = ", ".join(str(each) for each in sorted({_origin(job, line) for line in job.prints}))
        lines.append(f"#   lines that only print, check or wait: {numbers}")
    return ["#", "# Not imported:", *dict.fromkeys(lines)] if lines else []


def _origin(job: Imported, line: int) -> int:
    return job.origins[min(max(line, 1), len(job.origins)) - 1]


def _judge(text: str, shown: str) -> tuple[list[str], list[str]]:
    """(why the job file is not valid, what else `submit` would miss)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            prepare(Request(str(path)), strict=False)
        except UserError as error:
            return [str(error).replace(str(path), shown)], []
        try:
            prepare(Request(str(path)))
        except UserError as error:
            return [], [str(error).replace(str(path), shown)]
    return [], []
