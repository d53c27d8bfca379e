"""What bash would start for a script, in imagined jobs that differ in what only a job knows."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from slurmddp.scripts.check.directives import exported
from slurmddp.scripts.check.script import Script
from slurmddp.scripts.check.values import EARLY, SET_BY_SHELL, names_in
from slurmddp.scripts.sandbox.evaluate import Evaluated, Job, Unavailable, available, evaluate, variables_of
from slurmddp.shared.files import read_plain

_BESIDE = re.compile(
    r"^[ \t]*(?:srun\s[^\n]*\s)?(?:source|\.|bash|sh)\s+[\"']?(?:\$\{?SLURM_SUBMIT_DIR\}?/|\./)?([\w.][\w./-]*)", re.M
)
_ASSIGNED = re.compile(
    r"(?<![\w,-])([A-Za-z_]\w*)(?:\[[^]\n]{0,200}\])?\+?=|\b(?:for|read|mapfile|readarray|local|declare|printf)\s+(?:-\w+\s+)*([A-Za-z_]\w*)"
)
_ASSIGNS = re.compile(r"([A-Za-z_]\w*)\+?=(?!\()")
_LARGEST = 64 * 1024  # bytes of a file that the script reads


def unset_names(text: str) -> set[str]:
    """Return the variables that a script reads and never sets: those of the shell that submits it."""
    code = re.sub(r"(?m)^[ \t]*#.*$", "", text)
    assigned = {one or other for one, other in _ASSIGNED.findall(code)}
    return {
        name
        for name in names_in(code) - assigned
        if not name.startswith(("SLURM_", "SANDBOX_", "BASH")) and not SET_BY_SHELL.fullmatch(name)
    }


def imagined(
    script: Script, variables: Mapping[str, str] | None = None, other: Mapping[str, str] | None = None
) -> list[Job]:
    """Return the jobs to evaluate a script in. variables: what the shell that submits it has; other: what it may have
    besides (`given`), so that what follows from it is unknown; None: every variable that the script reads.
    variables=None: an empty shell, and also one whose batch shell exports all of its own (`shown`)."""
    slurm = {name: value for name, value in script.slurm.items() if "\0" not in value and "NODES" not in name}
    nodes, tasks = min(script.job.nodes or 1, 64), script.job.tasks_per_node or 1

    def job(count: int, more: Mapping[str, str], role: str = "", *, second: bool = False) -> Job:
        number, prefix, first = (5353007, "n", 107) if second else (4242001, "gpu-a", 1)
        hosts = tuple(f"{prefix}{each}" for each in range(first, first + count))
        nodelist = f"{prefix}[{first}-{first + count - 1}]" if count > 1 else hosts[0]
        array = {"SLURM_ARRAY_TASK_ID": str(1 + second), "SLURM_ARRAY_JOB_ID": str(number)}
        return Job(
            number, hosts, nodelist, tasks, script.job.gpus_per_node or (6 if second else 4), not second,
            1811214799 if second else 1700000000,  # no field of the date is the same
            20000 + number % 9973, script.option("chdir") or "",
            {**(variables or {}), **more, **exported(script.option("export"))},
            slurm | array if script.option("array") else slurm, role=role,
        )  # fmt: skip

    jobs = [job(nodes, {}), job(nodes, {}, second=True)]
    if script.option("nodes") is None or "-" in (script.option("nodes") or ""):
        jobs.append(job(nodes + 1, {}))
    if variables is not None and nodes > 1:  # an import takes nothing from the form of a list, such as its brackets
        hosts = tuple(f"r{each}n{5 * each}" for each in range(1, nodes + 1))
        jobs.append(replace(jobs[1], hosts=hosts, nodelist=",".join(hosts)))
    slurms = {name for name in names_in(script.text) if name.startswith("SLURM_")} - set(variables_of(jobs[1]))
    positional = re.search(r"\$\{?[@*1-9]", script.text) is not None
    names = slurms | (unset_names(script.text) if other is None else set())
    if names or other or positional:
        there = job(nodes, {**{name: f"@{name}@" for name in names}, **(other or {})}, "given")
        jobs.append(replace(there, arguments=("@1@", "@2@") if positional else ()))
    if variables is None:
        words = [word for each in script.commands for word in each.words]
        own = {match[1] for match in map(_ASSIGNS.match, words) if match and not SET_BY_SHELL.fullmatch(match[1])}
        own = {name for name in own if not name.startswith(("SLURM_", "SANDBOX_", "LD_"))}
        jobs.append(job(nodes, {**dict.fromkeys(own, ""), **EARLY}, "shown"))
    return jobs


def beside(script: Script) -> dict[str, str]:
    """Return the text files of the script's folder that it sources or runs. A link that leads out of it is not read."""
    found: dict[str, str] = {}
    folder = script.path.parent.resolve()
    for name in dict.fromkeys(_BESIDE.findall(script.text)):
        if any(part.startswith(".") and part != ".env" for part in Path(name).parts):
            continue  # .git/config and the like hold credentials, which the script could show us as a word
        try:
            if len(data := read_plain(folder / name, _LARGEST + 1, below=folder)) <= _LARGEST:
                found[name] = data.decode("utf-8", errors="replace")
        except OSError:
            continue  # the script's own matter: bash goes on without it
    return found


def place(path: Path) -> str:
    """Return the path of a script as `scontrol show job` has it, from the folder of submission where it is below."""
    whole, here = os.path.abspath(path), os.getcwd()
    return os.path.relpath(whole, here) if whole.startswith(f"{here.rstrip('/')}/") else whole


def record(
    script: Script, variables: Mapping[str, str] | None = None, other: Mapping[str, str] | None = None
) -> tuple[Evaluated, ...] | None:
    """Return what each imagined job starts; None, if this machine has no sandbox, or the script no end."""
    if not script.is_shell or "\r" in script.text or not available():
        return None
    try:
        runs = evaluate(script.text, imagined(script, variables, other), place(script.path), beside(script))
    except Unavailable:
        return None
    ended = all(each.ended for each in runs if not each.job.role)
    return tuple(each for each in runs if each.ended) if runs and ended else None
