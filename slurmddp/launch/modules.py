"""Where a Python module of the user's own lies, and which files only start as a module."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path
from typing import NamedTuple


def module_file(folder: str, module: str) -> Path | None:
    """Return the file that `python -m MODULE` runs in a folder; None if there is none."""
    path = Path(folder, *module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__main__.py") if file.is_file()), None)


class OfPackage(NamedTuple):
    """A file that Python can only start as a module. line: its first relative import; folder: of the package."""

    line: int
    folder: Path
    module: str


def of_package(script: Path) -> OfPackage | None:
    """Return as what a file would start that dies as a script, in a relative import; None if it does not.

    Only imports that always run count: not those of a function, or below `if` or `try`.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the user's own strings; Python says them where the script runs
            body = ast.parse(script.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # whatever is wrong with it, Python will say
    relative = [node for node in body if isinstance(node, ast.ImportFrom) and node.level]
    if not relative:
        return None
    folder = script.parent
    names = [script.stem]
    for _ in range(max(node.level for node in relative)):
        names.insert(0, folder.name)
        folder = folder.parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return OfPackage(relative[0].lineno, folder, ".".join(names))
