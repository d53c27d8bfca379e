"""The script and the local modules that it imports: found by path, parsed, never imported. Bounded in all respects."""

from __future__ import annotations

import ast
import os
import stat
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from slurmddp.program.facts import Unread

FILE_BYTES = 512 * 1024
ALL_BYTES = 1024 * 1024
FILES = 100
SECONDS = 5.0
_PYTHON_2 = ("Missing parentheses in call to 'print'", "multiple exception types must be parenthesized")


class Source(NamedTuple):
    """module: its dotted name, __main__ for the script; package: what its relative imports start from."""

    module: str
    package: str
    path: str
    tree: ast.Module
    lines: list[str]


class Sources(NamedTuple):
    """read: the script first; foreign: top names of modules that are not beside the script, each with its line."""

    read: list[Source]
    foreign: dict[str, tuple[str, int]]
    unread: list[Unread]


class CannotReadError(Exception):
    """Why a file was not read."""


def parse(path: str) -> tuple[ast.Module, list[str], int]:
    """Return the tree, lines and size of a file. Raises CannotReadError with the reason."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not block
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CannotReadError("not a regular file")
            data = file.read(FILE_BYTES + 1)
    except OSError as error:
        raise CannotReadError(error.strerror or str(error)) from None
    if len(data) > FILE_BYTES:
        raise CannotReadError(f"larger than {FILE_BYTES // 1024} KB")
    if path.endswith(".ipynb"):
        raise CannotReadError("a notebook: slurmddp runs scripts; `jupyter nbconvert --to script` makes one of it")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the user's own strings; Python says them where the script runs
            tree = ast.parse(data)
    except SyntaxError as error:
        at = f" in line {error.lineno}" if error.lineno else ""
        what = "Python 2" if any(text in str(error.msg) for text in _PYTHON_2) else f"{error.msg}"
        raise CannotReadError(f"not Python {sys.version_info[0]}.{sys.version_info[1]}: {what}{at}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise CannotReadError(f"cannot be parsed: {error or 'too deeply nested'}") from None
    return tree, data.decode("utf-8", errors="replace").splitlines(), len(data)


def runs(node: ast.stmt) -> bool:
    """Return whether a statement at the top of a file does something, more than to define or import."""
    defines = isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    return not defines and any(isinstance(each, ast.Call) for each in ast.walk(node))


def read_sources(script: str, roots: Sequence[str], module: str = "") -> Sources:
    """Read a script and, breadth first, the modules below the roots that it imports. module: for `python -m`."""
    found = Sources([], {}, [])
    base = os.path.dirname(os.path.abspath(script))
    places = list(dict.fromkeys([*roots] if module else [base, *roots]))
    package = module if os.path.basename(script) == "__main__.py" else module.rpartition(".")[0]
    waiting: deque[tuple[str, str, str]] = deque([("__main__", package, script)])
    seen = {os.path.realpath(script)}
    size, until = 0, time.monotonic() + SECONDS
    while waiting:
        name, package, path = waiting.popleft()
        if len(found.read) >= FILES or size > ALL_BYTES or time.monotonic() > until:
            found.unread.append(
                Unread(f"{len(waiting) + 1} more files", "the limit of files, bytes or time is reached")
            )
            break
        try:
            tree, lines, length = parse(path)
        except CannotReadError as error:
            found.unread.append(Unread(path, str(error)))
            continue
        size += length
        source = Source(name, package, path, tree, lines)
        found.read.append(source)
        for wanted, line in imported(source):
            local = list(_files(wanted, places))
            top = wanted.split(".")[0]
            if not (local or top in sys.stdlib_module_names or any(_is_local(place, top) for place in places)):
                found.foreign.setdefault(top, (path, line))
            for of, file in local:
                if (real := os.path.realpath(file)) not in seen:
                    seen.add(real)
                    init = os.path.basename(file) == "__init__.py"
                    waiting.append((of, of if init else of.rpartition(".")[0], file))
    return found


def absolute_name(node: ast.ImportFrom, package: str) -> str:
    """Return the absolute name of the module that `from ... import` names."""
    if not node.level:
        return node.module or ""
    parts = package.split(".") if package else []
    kept = parts[: len(parts) - node.level + 1]
    return ".".join([*kept, *([node.module] if node.module else [])])


def imported(source: Source) -> Iterator[tuple[str, int]]:
    """Yield each module name that a file may import, with the line; `from a import b` gives a and a.b."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((each.name, node.lineno) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute_name(node, source.package)
            if base:
                yield base, node.lineno
            yield from ((f"{base}.{each.name}".lstrip("."), node.lineno) for each in node.names if each.name != "*")
        elif isinstance(node, ast.Call) and (name := _executed(node)):
            yield name, node.lineno


def _executed(node: ast.Call) -> str:
    """Return "configurator" for `exec(open("configurator.py").read())`."""
    if not (isinstance(node.func, ast.Name) and node.func.id == "exec" and node.args):
        return ""
    inner = node.args[0]
    opened = inner.func.value if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) else None
    if isinstance(opened, ast.Call) and isinstance(opened.func, ast.Name) and opened.func.id == "open" and opened.args:
        path = opened.args[0]
        if isinstance(path, ast.Constant) and isinstance(path.value, str) and path.value.endswith(".py"):
            return path.value[:-3].replace("/", ".")
    return ""


def _files(name: str, roots: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the modules and files that `import NAME` runs: a/__init__.py, a/b/__init__.py, a/b.py."""
    parts = name.split(".")
    for root in roots:
        if not _is_local(root, parts[0]):
            continue
        for count in range(1, len(parts) + 1):
            stem = Path(root, *parts[:count])
            of = ".".join(parts[:count])
            if os.path.isfile(stem / "__init__.py"):
                yield of, str(stem / "__init__.py")
            elif os.path.isfile(f"{stem}.py"):
                yield of, f"{stem}.py"
        if os.path.isdir(Path(root, parts[0])) or os.path.isfile(f"{Path(root, parts[0])}.py"):
            return


def _is_local(root: str, name: str) -> bool:
    """Return whether a root has a module or package; a folder without Python files is data (./datasets, ./wandb)."""
    folder = Path(root, name)
    if os.path.isfile(f"{folder}.py") or os.path.isfile(folder / "__init__.py"):
        return True
    try:
        return any(entry.name.endswith(".py") or entry.is_dir() for entry in os.scandir(folder))
    except OSError:
        return False
