"""Which packages a script imports from elsewhere than the copy of the code: a later edit changes a job that waits.

Known are the files of this machine. Of a Python in a container, or one that a module brings, nothing is said.
"""

import ast
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from slurmddp.job.plan.model import Plan
from slurmddp.program.source import CannotReadError, parse
from slurmddp.run.survey import Survey, shown

#: What makes a script or the ranks look elsewhere: then nothing is known.
_ELSEWHERE = "PYTHONPATH"
_ACTIVATE = re.compile(r"""(?:source|\.)\s+["']?(/[^\s"'$]*)/bin/activate["']?""")
_BYTES = 1_000_000


def imported_elsewhere(plan: Plan, found: Survey, script: str) -> Iterator[str]:
    """Yield a warning for each package that the script imports, and that the ranks do not import from the copy."""
    path = found.root / script
    names, text = _imports(path)
    if "sys.path" in text or _ELSEWHERE in " ".join(plan.job.setup) or _ELSEWHERE in _variables(plan):
        return
    bases = _bases(plan)
    for name in names:
        # The run folder has a copy of slurmddp itself.
        if name in {"slurmddp", *sys.stdlib_module_names} or _there(found.root, name) or _there(path.parent, name):
            continue
        place = next((base for base in bases if _package(base, name)), None)
        if place is not None:
            message = f"{shown(script)} imports {name}, an editable install: the ranks import {shown(str(place))}"
            message += ", where a later edit changes a job that waits, not the copy"
        elif (place := _beside(path, name)) is not None:
            copied = "the copy has it where Python does not look" if _inside(place, found.root) else "it is not copied"
            message = f"{shown(script)} imports {name}, and {shown(str(place))} is not what the ranks import: {copied}"
        else:
            continue
        root = Path(os.path.commonpath([found.root, place]))
        if root not in (found.root, found.root.parent):  # the script and the package are not of one project
            yield f"{message}; to run a copy, install it without -e"
            continue
        options = [] if root == found.root else [f"--set train.project={shown(str(root))}"]
        if place != root:
            options.append(f"--set environment.PYTHONPATH={{run}}/code/project/{place.relative_to(root)}")
        yield f"{message}; to run the copy of it: {' '.join(options)}"


def _variables(plan: Plan) -> set[str]:
    return {variable.name for group in plan.environment for variable in group.variables}


def _imports(path: Path) -> tuple[list[str], str]:
    """Return the first names of the modules that a script imports, and its text; empty if it cannot be read."""
    try:
        tree, lines, _ = parse(str(path))
    except CannotReadError:
        return [], ""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.append(node.module)
    return list(dict.fromkeys(name.split(".")[0] for name in names)), "\n".join(lines)


def _there(folder: Path, name: str) -> bool:
    return (folder / name).is_dir() or (folder / f"{name}.py").is_file()


def _package(folder: Path, name: str) -> bool:
    return (folder / name / "__init__.py").is_file() or (folder / f"{name}.py").is_file()


def _inside(path: Path, folder: Path) -> bool:
    return os.path.realpath(path).startswith(os.path.realpath(folder) + "/")


def _beside(script: Path, name: str) -> Path | None:
    """Return the folder above the script's, or `src` in it or beside the script, that has a package of this name."""
    above = script.parent.parent
    places = (script.parent / "src", above / "src", above)
    return next((place for place in places if _package(place, name)), None)


def _bases(plan: Plan) -> list[Path]:
    """Return the folders from which the ranks' Python imports what is installed in editable mode, as far as known."""
    if plan.container.image:
        return []
    activated = [match[1] for line in plan.job.setup if (match := _ACTIVATE.search(line))]
    if plan.job.setup and not activated and plan.container.python_of_setup:
        return []  # a module or conda line may bring another Python
    prefix = Path(activated[-1]) if activated else Path(plan.container.python).parent.parent
    folders: list[Path] = []
    for packages in prefix.glob("lib/python3*/site-packages") if prefix.is_absolute() else ():
        for each in sorted(packages.glob("*.dist-info/direct_url.json")):
            root = _editable(each)
            folders += [] if root is None else [root / "src", root]
        for each in sorted([*packages.glob("*.pth"), *packages.glob("*.egg-link")]):
            try:
                lines = each.read_text(encoding="utf-8", errors="replace")[:_BYTES].splitlines()
            except OSError:
                continue  # Python cannot read it, either
            folders += [Path(line.strip()) for line in lines if line.startswith("/")]
    return folders


def _editable(record: Path) -> Path | None:
    """Return the folder of a package that pip or uv has installed in editable mode (direct_url.json, PEP 610)."""
    try:
        origin = json.loads(record.read_bytes()[:_BYTES])
        url = urlsplit(origin["url"])
        return Path(unquote(url.path)) if url.scheme == "file" and origin["dir_info"].get("editable") else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # not installed from a folder
