"""Mutations of packages, and how many of them the packages' own unit tests notice.

    python -m benchmarks.mutations [--packages records supervisor causes] [--number 200] [--seed 29] [--processes 2]

Needs pytest-cov. Works on copies of the checkout, never on it. Coverage tells which tests run a line; of those, the
quickest forty are tried on each mutation of the line. Of a line that runs at import or in a process of its own, those
files of the package's tests are tried that name its module, else all. A mutation changes one thing: a comparison, `and`
and `or`, a negation, a number, plus and minus, True and False, or a returned value (None). One that makes the tests
hang is noticed. Exit code 1 where fewer than 75 % are noticed.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from benchmarks.environments import CHECKOUT

TARGET = 0.75
#: Seconds for the tests of one mutation.
LIMIT = 120
TESTS_EACH = 40
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True)
class Mutation:
    """One change: where it is, and the module's text with it."""

    file: str
    line: int
    statement: int
    before: str
    after: str
    text: str


def mutations(file: str, source: str) -> list[Mutation]:
    """All mutations of one module. Strings, docstrings and annotations stay as they are."""
    tree = ast.parse(source)
    annotations = {
        id(part)
        for node in ast.walk(tree)
        for kind in ("annotation", "returns")
        if isinstance(getattr(node, kind, None), ast.AST)
        for part in ast.walk(getattr(node, kind))
    }
    found = []
    # Coverage knows a statement by its first line.
    first_lines = {
        id(part): statement.lineno
        for statement in ast.walk(tree)
        if isinstance(statement, ast.stmt)
        for part in _own_parts(statement)
    }
    for node in ast.walk(tree):
        if id(node) in annotations or not (isinstance(node, (ast.expr, ast.Return))):
            continue
        changed = _changed(node)
        if changed is not None:
            target = node.value if isinstance(node, ast.Return) else node
            assert target is not None
            before = ast.get_source_segment(source, target)
            if before is not None:
                found.append(
                    Mutation(file, node.lineno, first_lines[id(node)], before, changed, _with(source, target, changed))
                )
    return found


def _own_parts(statement: ast.stmt) -> Iterator[ast.AST]:
    """The statement and its expressions, without the statements inside it."""
    yield statement
    waiting = list(ast.iter_child_nodes(statement))
    while waiting:
        node = waiting.pop()
        if not isinstance(node, ast.stmt):
            yield node
            waiting.extend(ast.iter_child_nodes(node))


def _changed(node: ast.AST) -> str | None:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        kind = COMPARISONS[type(node.ops[0])]
        return f"({ast.unparse(ast.Compare(node.left, [kind()], node.comparators))})"
    if isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return f"({ast.unparse(ast.BoolOp(other, node.values))})"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return f"({ast.unparse(node.operand)})"
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        other_op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        return f"({ast.unparse(ast.BinOp(node.left, other_op, node.right))})"
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return str(not node.value)
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return repr(node.value + 1)
    if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        return "None"
    return None


def _with(source: str, node: ast.expr, text: str) -> str:
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    assert node.end_lineno is not None
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + (node.end_col_offset or 0)
    whole = source.encode()
    return (whole[:start] + text.encode() + whole[end:]).decode()


def _tests_by_line(copy: Path, packages: list[str]) -> dict[tuple[str, int], list[str]]:
    """Which tests run which line, as coverage recorded it; the quickest first."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=0", "--durations-min=0.2", "-vv"]
        + [f"--cov=slurmddp/{package}" for package in packages]
        + ["--cov-context=test", "--cov-report=", *(f"tests/unit/{package}" for package in packages)],
        cwd=copy,
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        sys.exit(f"the tests fail without a mutation:\n{run.stdout[-3000:]}")
    seconds: dict[str, float] = {}
    for line in run.stdout.splitlines():
        words = line.split()
        if len(words) >= 3 and words[1] in ("call", "setup") and words[0].endswith("s"):
            name = " ".join(words[2:])
            seconds[name] = seconds.get(name, 0.0) + float(words[0][:-1])
    with sqlite3.connect(copy / ".coverage") as data:
        rows = data.execute(
            "select file.path, context.context, line_bits.numbits from line_bits"
            " join file on file.id = line_bits.file_id join context on context.id = line_bits.context_id"
        ).fetchall()
    tests: dict[tuple[str, int], set[str]] = {}
    for path, context, bits in rows:
        if context:
            for byte, value in enumerate(bits):
                for bit in range(8):
                    if value >> bit & 1:
                        key = (str(Path(path).relative_to(copy)), byte * 8 + bit)
                        tests.setdefault(key, set()).add(context.split("|")[0])
    return {key: sorted(names, key=lambda name: (seconds.get(name, 0.0), name)) for key, names in tests.items()}


def _files_that_name(module: str) -> list[str]:
    """The test files of a module's package that have its name in theirs or in an import or call."""
    _, package, *_ = Path(module).parts
    name = Path(module).stem
    says = re.compile(rf"""[ ."']{name}["']|\b{package}(\.brain)?\.{name}\b|\bimport\b.*\b{name}\b""")
    files = sorted((CHECKOUT / "tests" / "unit" / package).glob("test_*.py"))
    named = [file for file in files if name in file.stem or says.search(file.read_text())]
    return [str(file.relative_to(CHECKOUT)) for file in named or files]


def _noticed(copy: Path, mutation: Mutation, tests: list[str]) -> bool:
    file = copy / mutation.file
    kept = file.read_text()
    file.write_text(mutation.text)
    try:
        run = subprocess.run(
            [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests[:TESTS_EACH]],
            cwd=copy,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=LIMIT,
            check=False,
        )
        return run.returncode != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        file.write_text(kept)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutations", description="What unit tests notice.")
    parser.add_argument("--packages", nargs="+", default=["records", "supervisor", "causes"])
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=29)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for index in range(options.processes):
            copy = Path(folder, str(index))
            shutil.copytree(
                CHECKOUT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "build", "__pycache__", ".gpu")
            )
            copies.put(copy)
        first = copies.get()
        tests = _tests_by_line(first, options.packages)
        copies.put(first)
        everything = [
            mutation
            for package in options.packages
            for file in sorted((CHECKOUT / "slurmddp" / package).rglob("*.py"))
            for mutation in mutations(str(file.relative_to(CHECKOUT)), file.read_text())
        ]
        chosen = random.Random(options.seed).sample(everything, options.number)

        def play(mutation: Mutation) -> bool:
            names = tests.get((mutation.file, mutation.statement)) or _files_that_name(mutation.file)
            copy = copies.get()
            try:
                noticed = _noticed(copy, mutation, names)
            finally:
                copies.put(copy)
            if not noticed:
                print(f"{mutation.file}:{mutation.line}: {mutation.before!r} -> {mutation.after!r}", flush=True)
            return noticed

        with ThreadPoolExecutor(options.processes) as pool:
            results = list(pool.map(play, chosen))
    share = sum(results) / len(results)
    print(
        f"{sum(results)} of {len(results)} mutations noticed ({share:.0%}),"
        f" of {len(everything)} possible ones; seed {options.seed}"
    )
    return 0 if share >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
