"""`slurmddp checkpoint`: the checkpoints of a run, for people and programs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from slurmddp.commands import options as opt
from slurmddp.commands.help import App
from slurmddp.commands.listed import BY_NAME
from slurmddp.commands.options import Json
from slurmddp.commands.run_options import LAST, Run
from slurmddp.errors import UserError
from slurmddp.launch.export import Wanted
from slurmddp.launch.export import export as export_now
from slurmddp.launch.find import find_own_run, find_run
from slurmddp.report.status import run_status
from slurmddp.run import checkpoints, pruning
from slurmddp.run.checkpoints import Leftover, Stored, leftovers, survey
from slurmddp.run.layout import RunFolder
from slurmddp.run.pruning import Pruning
from slurmddp.shared.units import human
from slurmddp.styled import columns, join, styled
from slurmddp.visible import one_line

#: Bytes between two lines of progress while a checkpoint is hashed: a few seconds' work.
SAY_EVERY = 4 * 2**30


def as_dict(item: Stored, found: list[Stored]) -> dict[str, Any]:
    """Return a checkpoint for --json. The keys are stable. complete: no fault is known; fault: what is wrong."""
    return {
        "step": item.step,
        "path": str(item.path),
        "run_id": item.run,
        "own": item.own,
        "complete": item.fault is None,
        "fault": item.fault,
        "resumed_from": item is checkpoints.resumed_from(found),
        "saved": round(item.saved, 3),
        "bytes": item.bytes,
        "files": item.files,
        "world": item.world,
    }


def table(folder: RunFolder, found: list[Stored], left: list[Leftover]) -> str:
    """Return one line per checkpoint: step, time, size, files, ranks, run and state."""
    lines: list[str] = []
    if found:
        others = any(not item.own for item in found)
        chosen = checkpoints.resumed_from(found)
        rows = [("STEP", "SAVED", "SIZE", "FILES", "RANKS", "RUN", "STATE")]
        for item in found:
            if item.fault is None:
                state = styled("complete", "good") + " (content not compared)"
            else:
                state = styled("not usable", "bad") + f": {one_line(item.fault)}"
            world = "" if item.world is None else str(item.world)
            more = "; --resume starts here" if item is chosen else ""
            rows.append(
                (str(item.step), _when(item.saved), human(item.bytes), str(item.files), world, one_line(item.run),
                 state + more)
            )  # fmt: skip
        lines += columns([row if others else (*row[:5], row[6]) for row in rows])
        if chosen is None:
            lines.append("no usable checkpoint: a resumed run would start from the beginning")
    else:
        lines.append(f"run {folder.id} has no checkpoints yet")
    lines += [one_line(f"unfinished save: {item.path.name}, {human(item.bytes)}") for item in left]
    return join("\n", lines)


def checked(item: Stored, say: Callable[[str], None]) -> Stored:
    """Compare the checkpoint's content with its hashes, and report progress every few GiB."""
    hashed = told = 0

    def progress(count: int) -> None:
        nonlocal hashed, told
        hashed += count
        if hashed - told >= SAY_EVERY and hashed < item.bytes:
            told = hashed
            say(f"step {item.step}: {human(hashed)} of {human(item.bytes)} verified")

    if item.bytes >= SAY_EVERY:
        say(f"step {item.step}: verifying {human(item.bytes)}")
    return checkpoints.check(item, progress)


def verified(folder: RunFolder, step: int | None, say: Callable[[str], None]) -> Iterator[Stored]:
    """Verify the run's checkpoints, or that of one step. Raises UserError if there is none."""
    found = checkpoints.own(folder)
    for item in [checkpoints.at_step(found, step)] if step is not None else found:
        yield checked(item, say)


def verdict(item: Stored) -> str:
    """Return one line: the step, and whether the checkpoint is good."""
    extent = f"{human(item.bytes)} in {item.files} files"
    verdict = f"good, {extent}" if item.fault is None else f"NOT USABLE: {one_line(item.fault)}"
    return f"step {item.step}  {verdict}"


def refuse_while_going(folder: RunFolder) -> None:
    """Raise UserError if the run may still write checkpoints: it runs, is pending, or its state is unknown."""
    found = run_status(folder).state
    if found.going:
        raise UserError(
            f"run {folder.id} is still {found.state} and prunes its own checkpoints",
            todo=f"wait, cancel it (`slurmddp cancel {folder.id}`), or use --force",
        )


def removal(item: Stored | Leftover, *, done: bool) -> str:
    """Return one line about a folder that is, or would be, removed."""
    what = _why(item) if isinstance(item, Stored) else " (an unfinished save)"
    return f"{'removed' if done else 'would remove'} {item.path.name}{what}, {human(item.bytes)}"


def pruning_end(planned: Pruning, *, done: bool) -> str:
    """Return lines about what is skipped, what is (or would be) freed, and what is kept."""
    lines = [f"left alone: {item.path.name}{_why(item)}" for item in planned.left]
    steps = ", ".join(str(item.step) for item in planned.kept[:20]) + (", ..." if len(planned.kept) > 20 else "")
    freed = f"{human(planned.bytes)} {'freed' if done else 'would be freed'}"
    if not planned.going:
        freed = "nothing to remove"
    return "\n".join([*lines, f"{freed}; kept {len(planned.kept)}: step{'s' * (len(planned.kept) > 1)} {steps}"])


def pruning_dict(planned: Pruning, *, done: bool) -> dict[str, Any]:
    """Return the pruning for --json. The keys are stable."""
    return {
        "removed": [str(item.path) for item in planned.going],
        "kept": [str(item.path) for item in planned.kept],
        "left_alone": [str(item.path) for item in planned.left],
        "bytes": planned.bytes,
        "done": done,
    }


def _why(item: Stored) -> str:
    return f" ({one_line(item.fault)})" if item.fault else ""


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


Step = Annotated[int | None, typer.Option(min=0, metavar="N", help="Verify only the checkpoint of this step")]


def list_checkpoints(run: Run = LAST, as_json: Json = False) -> None:
    """List the checkpoints of a run and of the runs it resumed from, and mark the one to resume from."""
    folder = find_run(run, os.environ)
    found = survey(folder)
    if as_json:
        typer.echo(opt.json_text([as_dict(item, found) for item in found]))
    else:
        typer.echo(table(folder, found, leftovers(folder)))


def verify(run: Run = LAST, step: Step = None, as_json: Json = False) -> None:
    """Check every file of a run's checkpoints against its hash. Exit code: 0 all good, 1 some damaged."""
    found = []
    for item in verified(find_run(run, os.environ), step, opt.say):
        found.append(item)
        if not as_json:
            typer.echo(verdict(item))
    if as_json:
        typer.echo(opt.json_text([as_dict(item, found) for item in found]))
    raise typer.Exit(int(any(item.fault is not None for item in found)))


def prune(
    keep: Annotated[int, typer.Option(min=1, metavar="N", help="Keep the N newest good checkpoints")],
    run: Run = LAST,
    keep_every: Annotated[
        int | None, typer.Option(min=1, metavar="M", help="Also keep checkpoints whose step is a multiple of M")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed; remove nothing")] = False,
    force: Annotated[bool, typer.Option("--force", help="Prune even while the run is pending or running")] = False,
    as_json: Json = False,
) -> None:
    """Remove old, unfinished and damaged checkpoints of a run, but never the newest good one."""
    folder = find_own_run(run, os.environ, to="prune its checkpoints")
    if not force:
        refuse_while_going(folder)
    planned = pruning.plan(
        folder, keep=keep, keep_every=keep_every, running=force, checked=lambda item: checked(item, opt.say)
    )
    for item in planned.going if dry_run else pruning.prune(folder, planned):
        if not as_json:
            typer.echo(removal(item, done=not dry_run))
    if as_json:
        typer.echo(opt.json_text(pruning_dict(planned, done=not dry_run)))
    else:
        typer.echo(pruning_end(planned, done=not dry_run))


def export(
    run: Run = LAST,
    step: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Step of the checkpoint  [default: the newest good one]")
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format", metavar="pt|safetensors", help="File format  [default: from the suffix of FILE, else pt]"
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="File to write  [default: model.pt or model.safetensors]"),
    ] = None,
    what: Annotated[
        str,
        typer.Option(metavar="model|all", help="Export the model's weights, or all tensors of the checkpoint"),
    ] = "model",
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists")] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Run another user's image, setup lines and code with your account")
    ] = False,
    as_json: Json = False,
) -> None:
    """Export the weights of a checkpoint to one file, with the PyTorch of the run's image or environment."""
    folder = find_run(run, os.environ)
    written = export_now(folder, Wanted(step, format_, output, what, force, trust), Path.cwd(), os.environ, opt.say)
    typer.echo(opt.json_text({"run_id": folder.id, "file": str(written)}) if as_json else written)


group = App(name="checkpoint", help=BY_NAME["checkpoint"].summary)
group.add(list_checkpoints, "list", "slurmddp checkpoint list last")
group.add(verify, example="slurmddp checkpoint verify last")
group.add(prune, example="slurmddp checkpoint prune last --keep 3 --dry-run")
group.add(export, example="slurmddp checkpoint export last -o model.safetensors")
