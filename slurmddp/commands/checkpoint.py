"""checkpoint list, verify, prune, export: the checkpoints of a run."""

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from slurmddp.commands import options as opt
from slurmddp.commands.help import App
from slurmddp.commands.listed import BY_NAME
from slurmddp.commands.terminal import exit_on_signals
from slurmddp.errors import ExternalError, UserError
from slurmddp.launch.find import find_own_run, find_run
from slurmddp.report.status import run_status
from slurmddp.run import checkpoints
from slurmddp.run.checkpoints import Leftover, Pruning, Stored, leftovers, survey
from slurmddp.run.layout import RunFolder
from slurmddp.shared.checkpoint import export as exporting
from slurmddp.shared.checkpoint import layout
from slurmddp.shared.checkpoint.checkpoints import Checkpoints
from slurmddp.shared.units import human
from slurmddp.styled import columns, join, labelled, styled
from slurmddp.visible import one_line

#: Bytes between two lines of progress while a checkpoint is hashed: a few seconds' work.
SAY_EVERY = 4 * 2**30


def as_dict(item: Stored, stored: list[Stored]) -> dict[str, Any]:
    """Return a checkpoint for --json. The keys are stable. complete: no fault is known; fault: what is wrong."""
    return {
        "step": item.step,
        "path": str(item.path),
        "run_id": item.run,
        "own": item.own,
        "complete": item.fault is None,
        "fault": item.fault,
        "resumed_from": item is checkpoints.resumed_from(stored),
        "saved": round(item.saved, 3),
        "bytes": item.bytes,
        "files": item.files,
        "world": item.world,
    }


def table(folder: RunFolder, stored: list[Stored], left: list[Leftover]) -> str:
    """Return one line per checkpoint: step, time, size, files, ranks, run and state."""
    lines: list[str] = []
    if stored:
        others = any(not item.own for item in stored)
        chosen = checkpoints.resumed_from(stored)
        rows = [("STEP", "SAVED", "SIZE", "FILES", "RANKS", "RUN", "STATE")]
        for item in stored:
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


def checked(item: Stored) -> Stored:
    """Compare the checkpoint's content with its hashes, and report progress every few GiB."""
    hashed = reported = 0

    def progress(count: int) -> None:
        nonlocal hashed, reported
        hashed += count
        if hashed - reported >= SAY_EVERY and hashed < item.bytes:
            reported = hashed
            opt.say(f"step {item.step}: {human(hashed)} of {human(item.bytes)} verified")

    if item.bytes >= SAY_EVERY:
        opt.say(f"step {item.step}: verifying {human(item.bytes)}")
    return checkpoints.check(item, progress)


def pruning_end(planned: Pruning, *, done: bool) -> str:
    """Return lines about what is skipped, what is (or would be) freed, and what is kept."""
    lines = [f"left alone: {item.path.name}{_why(item)}" for item in planned.left]
    steps = ", ".join(str(item.step) for item in planned.kept[:20]) + (", ..." if len(planned.kept) > 20 else "")
    freed = f"{human(planned.bytes)} {'freed' if done else 'would be freed'}"
    if not planned.going:
        freed = "nothing to remove"
    return "\n".join([*lines, f"{freed}; kept {len(planned.kept)}: step{'s' * (len(planned.kept) > 1)} {steps}"])


def pruning_dict(planned: Pruning, *, done: bool) -> dict[str, Any]:
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


def list_checkpoints(run: opt.Run = opt.LAST, as_json: opt.Json = False) -> None:
    """List the checkpoints of a run and of the runs it resumed from, and mark the one to resume from."""
    folder = find_run(run, os.environ)
    stored = survey(folder)
    opt.show(as_json, [as_dict(item, stored) for item in stored], table(folder, stored, leftovers(folder)))


def verify(run: opt.Run = opt.LAST, step: Step = None, as_json: opt.Json = False) -> None:
    """Check every file of a run's checkpoints against its hash. Exit code: 0 all good, 1 some damaged."""
    stored = checkpoints.own(find_run(run, os.environ))
    verified = []
    for item in map(checked, stored if step is None else [checkpoints.at_step(stored, step)]):
        verified.append(item)
        if not as_json:
            extent = f"{human(item.bytes)} in {item.files} files"
            verdict = f"good, {extent}" if item.fault is None else f"NOT USABLE: {one_line(item.fault)}"
            typer.echo(f"step {item.step}  {verdict}")
    if as_json:
        typer.echo(opt.json_text([as_dict(item, verified) for item in verified]))
    raise typer.Exit(int(any(item.fault is not None for item in verified)))


def prune(
    keep: int = opt.value("N", "Keep the N newest good checkpoints", default=..., min=1),
    run: opt.Run = opt.LAST,
    keep_every: int | None = opt.value("M", "Also keep checkpoints whose step is a multiple of M", min=1),
    dry_run: bool = opt.flag("--dry-run", "Show what would be removed; remove nothing"),
    force: bool = opt.flag("--force", "Prune even while the run is pending or running"),
    as_json: opt.Json = False,
) -> None:
    """Remove old, unfinished and damaged checkpoints of a run, but never the newest good one."""
    folder = find_own_run(run, os.environ, to="prune its checkpoints")
    if not force and (state := run_status(folder).state).going:  # or its state is unknown
        todo = f"wait, cancel it (`slurmddp cancel {folder.id}`), or use --force"
        raise UserError(f"run {folder.id} is still {state.state} and prunes its own checkpoints", todo=todo)
    planned = checkpoints.plan_pruning(folder, keep=keep, keep_every=keep_every, running=force, checked=checked)
    for item in planned.going if dry_run else checkpoints.prune(folder, planned):
        if not as_json:
            reason = _why(item) if isinstance(item, Stored) else " (an unfinished save)"
            typer.echo(f"{'would remove' if dry_run else 'removed'} {item.path.name}{reason}, {human(item.bytes)}")
    opt.show(as_json, pruning_dict(planned, done=not dry_run), pruning_end(planned, done=not dry_run))


def export(
    run: opt.Run = opt.LAST,
    step: int | None = opt.value("N", "Step of the checkpoint  [default: the newest good one]", min=0),
    format_: str | None = opt.value(
        "pt|safetensors", "File format  [default: from the suffix of FILE, else pt]", "--format"
    ),
    output: Path | None = opt.value(
        "FILE", "File to write  [default: model.pt or model.safetensors]", "-o", "--output"
    ),
    what: str = opt.value("model|all", "Export the model's weights, or all tensors of the checkpoint", default="model"),
    force: bool = opt.flag("--force", "Replace FILE if it exists"),
    as_json: opt.Json = False,
) -> None:
    """Export the weights of a checkpoint to one file. Needs neither PyTorch nor the run's image."""
    folder = find_run(run, os.environ)
    stored = checkpoints.own(folder)
    form, target = _export_target(format_, output, what, force)
    item = _to_export(folder, stored, step)
    opt.say(f"exporting step {item.step} of run {folder.id}")
    try:
        with exit_on_signals():
            count = Checkpoints.export(item.path, target, form=form, what=what)
    except (exporting.ExportError, layout.Rejected) as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise ExternalError(f"{error.filename or target}: {error.strerror or error}") from error
    opt.say(f"exported {count} tensors, {human(target.stat().st_size)}")
    typer.echo(opt.json_text({"run_id": folder.id, "file": str(target)}) if as_json else target)


def _export_target(form: str | None, output: Path | None, what: str, force: bool) -> tuple[str, Path]:
    """Return format and absolute path of the file. Raises UserError for what cannot be written."""
    formats = exporting.FORMATS
    if form is not None and form not in formats:
        raise UserError(f"--format {form!r} is not one of {', '.join(formats)}")
    if what not in exporting.CONTENTS:
        raise UserError(f"--what {what!r} is not one of {', '.join(exporting.CONTENTS)}")
    named = next((name for name, suffix in formats.items() if output and output.suffix == suffix), None)
    if form and named and form != named:
        raise UserError(f"--format {form} does not match the file name {output}")
    form = form or named or "pt"
    target = Path(os.path.abspath(output or f"model{formats[form]}"))
    if target.is_dir():
        raise UserError(f"{target} is a folder", todo=f"add a file name: --output {target}/model{formats[form]}")
    if not target.parent.is_dir():
        raise UserError(f"the folder {target.parent} does not exist", todo="create it first, or choose another folder")
    if target.exists() and not force:
        raise UserError(f"{target} exists", todo="choose another file with --output, or replace it with --force")
    if not os.access(target.parent, os.W_OK):
        todo = "choose a file in another folder: --output FILE"
        raise UserError(f"cannot write to the folder {target.parent}", todo=todo)
    return form, target


def _to_export(folder: RunFolder, stored: list[Stored], step: int | None) -> Stored:
    """Return the checkpoint to export, verified. Raises UserError if it is damaged or none is good."""
    if step is not None:
        item = checked(checkpoints.at_step(stored, step))
        if item.fault is None:
            return item
        todo = "export another one: `slurmddp checkpoint verify` shows which are good"
        raise UserError(f"this checkpoint is not usable: {item.fault}", where=str(item.path), todo=todo)
    for item in stored:
        item = checked(item) if item.fault is None else item
        if item.fault is None:
            return item
        opt.say(labelled("warning", f"skipping {item.path.name}: {item.fault}"))
    raise UserError(f"run {folder.id} has no good checkpoint to export")


group = App(name="checkpoint", help=BY_NAME["checkpoint"].summary)
group.add(list_checkpoints, "list", "slurmddp checkpoint list last")
group.add(verify, example="slurmddp checkpoint verify last")
group.add(prune, example="slurmddp checkpoint prune last --keep 3 --dry-run")
group.add(export, example="slurmddp checkpoint export last -o model.safetensors")
