"""The working directory of an own program: which relative paths it changes."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from slurmddp.errors import ElsewhereError, UserError
from slurmddp.job.document import RUN
from slurmddp.job.plan.model import Plan
from slurmddp.launch.prepare import Prepared
from slurmddp.run.written import files_text, written_before
from slurmddp.shared.units import listed
from slurmddp.visible import one_line

_SCRIPT_BYTES = 512 * 1024
_SHOWN = 3
#: A relative path in quotes: what a script calls its data. In a bash script, any word may be one.
_QUOTED = re.compile(r"""["']((?:\./)?[\w-][\w.-]*(?:/[\w.-]+)*/?)["']""")
_WORD = re.compile(r"""(?<![^\s"'=])((?:\./)?[\w-][\w.-]*(?:/[\w.-]+)*/?)(?![^\s"';])""")


def workdir_in(plan: Plan, folder: Path) -> str | None:
    """Return where an own program of this run folder runs; None for a bundled task."""
    return plan.workdir.replace(RUN, str(folder)) if plan.program.own else None


def files_before(prepared: Prepared) -> dict[str, str]:
    """Return the files in the working directory that changed while earlier runs ran there, each with its run.

    Empty for a run that continues another one: it is meant to load what that run saved.
    """
    plan = prepared.plan
    if not plan.program.own or not plan.workdir.startswith("/") or prepared.resumed.runs:
        return {}
    exclude = {path for path in (plan.runs_root, plan.cache, plan.node_folder) if path}
    return written_before(plan.workdir, exclude)


def shared_files(plan: Plan, files: Mapping[str, str]) -> list[str]:
    """Return the warning about these `files_before`."""
    if not files:
        return []
    it = "one of them" if len(files) > 1 else "it"
    return [
        f"{files_text(files)} changed in {plan.workdir} while an earlier run ran there: a script that loads {it} does "
        "not begin from the start; with --workdir run, it runs in a folder of its own"
    ]


def relative_paths(plan: Plan) -> list[str]:
    """Return a warning if the program names relative paths that exist where the job is submitted, but runs elsewhere.

    Looked at: its arguments, and quoted texts of the script (of a bash script, all words).
    """
    if not plan.program.own or plan.workdir == plan.cwd:
        return []
    relative = dict.fromkeys(name for name in _named(plan) if _is_here(plan, name))
    if not relative:
        return []
    names = listed([*map(one_line, relative)], _SHOWN)
    of_many = "are relative and exist" if len(relative) > 1 else "is relative and exists"
    there = plan.workdir.replace(RUN, "RUN_FOLDER")
    return [
        f"{names} {of_many} in {plan.cwd}, but train.workdir makes the script look in {there}: give absolute "
        "paths, or set train.workdir to submit"
    ]


def _named(plan: Plan) -> Iterator[str]:
    for word in plan.program.args:
        yield word.rpartition("=")[2] if word.startswith("-") else word
    if plan.program.script:  # one that cannot be read is refused by the check of the program
        yield from named_paths(Path(plan.program.source), _WORD if plan.program.bash else _QUOTED)


def named_paths(script: Path, pattern: re.Pattern[str] = _QUOTED) -> list[str]:
    """Return the relative paths with a folder or a suffix that a script's text names; none if it cannot be read."""
    try:
        with script.open(encoding="utf-8", errors="replace") as file:
            names = pattern.findall(file.read(_SCRIPT_BYTES))
    except OSError:
        return []
    return [name for name in names if "/" in name or "." in name]


def _is_here(plan: Plan, name: str) -> bool:
    if not name or name.startswith(("/", "-")) or "\0" in name or len(name) > 1000:
        return False
    return os.path.exists(os.path.join(plan.cwd, name)) and os.path.normpath(name) not in (".", "..")


def absent_workdir(prepared: Prepared) -> Iterator[UserError]:
    """Yield the error of a working directory that is not there, and that no node would make."""
    plan = prepared.plan
    if plan.program.own and plan.workdir.startswith("/") and not os.path.isdir(plan.workdir):
        yield ElsewhereError(
            f"the working directory {plan.workdir} does not exist",
            where=prepared.resolved.location("train", "workdir"),
            todo="create it, or correct train.workdir",
        )
