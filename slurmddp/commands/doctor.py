"""doctor: the root cause of a failure in logs."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from slurmddp.commands import options as opt
from slurmddp.doctor.diagnose import Diagnosis, Examination, Hit, Seen
from slurmddp.doctor.rules import UNKNOWN
from slurmddp.doctor.sources import is_done, read_path, read_run, read_stream, start_notes, survived_failures
from slurmddp.errors import UserError
from slurmddp.launch.find import find_run
from slurmddp.run.layout import RunFolder
from slurmddp.run.snapshot_filter import is_run_folder
from slurmddp.run.state import next_commands
from slurmddp.styled import styled
from slurmddp.visible import one_line

#: Characters of a log line that are shown, lines of a traceback, and causes that followed.
_LINE = 400
_TRACEBACK = 30
_FOLLOWED = 6


def lines(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the answer: the cause, its evidence, what to do, and what followed from it."""
    if diagnosis.root is None:
        where = _files(diagnosis)
        if diagnosis.sure == "none":
            yield styled("no failure found", "good") + f" in {where}"
        else:
            yield styled("unknown", "warn") + f"   a part of {where} was not examined"
    else:
        yield from _root(diagnosis, diagnosis.root)
    for each in diagnosis.cascades[:_FOLLOWED]:
        yield f"then      {_where(each)}{each.first.cause.title} ({_place(each.first)})"
    for each in diagnosis.others[:_FOLLOWED]:
        yield f"also      {each.first.cause.title} ({_place(each.first)})"
    for note in diagnosis.notes:
        yield one_line(f"note: {note}")


def _root(diagnosis: Diagnosis, root: Seen) -> Iterator[str]:
    first = root.first
    if diagnosis.sure == "unknown":
        yield "cause     " + styled("unknown", "warn")
        yield f"known     {f'the log says: {_text(first)}' if first.cause.id == UNKNOWN else first.cause.title}"
    else:
        yield "cause     " + styled(first.cause.title, "bad") + f" ({diagnosis.sure}) [{first.cause.id}]"
    if where := _where(root).removesuffix(": "):
        yield f"where     {where}"
    if diagnosis.message:
        yield one_line(f"detail    {diagnosis.message}")
    yield f"evidence  {_place(first)}: {_text(first)}"
    yield f"why       {first.cause.why}"
    yield f"do        {diagnosis.fix}"
    yield f"see       {first.cause.source}"
    if first.traceback and len(first.traceback.lines) > 1:
        yield f"traceback of {'rank ' + str(first.rank) if first.rank is not None else 'the process'}:"
        shown = first.traceback.lines
        shown = shown if len(shown) <= _TRACEBACK else [shown[0], "  ...", *shown[-_TRACEBACK:]]
        yield from (f"    {one_line(line[:_LINE])}" for line in shown)


def as_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the diagnosis for --json, as docs/doctor.md describes it."""
    root: dict[str, Any] | None = None
    if diagnosis.root is not None:
        cause, traceback = diagnosis.root.first.cause, diagnosis.root.first.traceback
        advice = {"why": cause.why, "fix": diagnosis.fix, "source": cause.source}
        root = {**_seen(diagnosis.root), "message": diagnosis.message, **advice}
        root["traceback"] = traceback.lines if traceback else []
    return {
        "schema": 1,
        "files": list(diagnosis.files),
        "sure": diagnosis.sure,
        "root": root,
        "cascades": [_seen(each) for each in diagnosis.cascades],
        "others": [_seen(each) for each in diagnosis.others],
        "notes": list(diagnosis.notes),
    }


def _seen(each: Seen) -> dict[str, Any]:
    first = each.first
    return {
        "cause": first.cause.id,
        "title": first.cause.title,
        "node": first.host,
        "rank": first.rank,
        "nodes": list(each.hosts),
        "ranks": list(each.ranks),
        "count": each.count,
        "evidence": {"file": first.path, "line": first.line, "text": first.text[:_LINE]},
    }


def _where(each: Seen) -> str:
    """`rank 3 on node1: `, or "" where the logs do not say."""
    ranks = [each.first.rank] if each.first.rank is not None else list(each.ranks)
    more = f" (and {len(each.ranks) - 1} more ranks)" if len(each.ranks) > 1 else ""
    rank = f"rank {ranks[0]}{more}" if ranks else ""
    node = each.first.host or ""
    both = f"{rank} on {node}" if rank and node else rank or node
    return one_line(f"{both}: ") if both else ""


def _place(hit: Hit) -> str:
    return one_line(f"{hit.path}:{hit.line}")


def _text(hit: Hit) -> str:
    return one_line(hit.text if len(hit.text) <= _LINE else f"{hit.text[:_LINE]}...")


def _files(diagnosis: Diagnosis) -> str:
    return one_line(diagnosis.files[0]) if len(diagnosis.files) == 1 else f"{len(diagnosis.files)} files"


def doctor(
    targets: list[str] | None = opt.argument(
        "RUN|FILE",
        "Run, log files, folders of logs, or - for standard input (default: last)",
        complete=opt.run_names,
    ),
    as_json: opt.Json = False,
) -> None:
    """Find the root cause of a failure in the logs of a run, also of one that slurmddp did not start. Exit codes: 0 no
    failure found, 1 failure found, 2 a file or run cannot be read, or a part was not examined and
    the rest has no failure."""
    examined, runs = examine(targets or ["last"])
    diagnosis = examined.diagnose()
    if as_json:
        next_ = [each for run in runs for each in next_commands(run.id, "failed")]
        others = [each for each in next_ if not each.startswith("slurmddp doctor ")]
        looks = [f"slurmddp status {run.id}" for run in runs]  # the logs alone do not say whether it goes on
        typer.echo(opt.json_text({**as_dict(diagnosis), "next": looks if diagnosis.root is None else others}))
    else:
        for line in lines(diagnosis):
            typer.echo(line)
    if diagnosis.root is not None:
        raise typer.Exit(1)
    if diagnosis.sure == "unknown":
        raise typer.Exit(2)


def examine(targets: list[str]) -> tuple[Examination, list[RunFolder]]:
    """Read runs and logs, and return which runs. Raises UserError where nothing could be read."""
    examined = Examination()
    runs = [run for target in targets if (run := _read(examined, target))]
    if not examined.files:
        note, _, todo = one_line(examined.notes[0]).partition(" -> ")
        raise UserError(note, todo=todo)
    return examined, runs


def _read(examined: Examination, target: str) -> RunFolder | None:
    """Return the run, if the target is one."""
    path = Path(target)
    if target == "-":
        read_stream(examined, sys.stdin.buffer)
    elif path.is_file() or (path.is_dir() and not is_run_folder(path)):
        read_path(examined, path)
    elif os.sep in target and not path.is_dir():
        read_path(examined, path)  # says why it cannot be read
    else:
        folder = find_run(target, os.environ)
        if is_done(folder):
            examined.files.append(str(folder.path))
            examined.notes.append(f"run {folder.id} finished its work")
            examined.notes += survived_failures(folder)
        else:
            read_run(examined, folder)
        examined.notes += start_notes(folder)
        return folder
    return None
