"""`slurmddp clean` and `slurmddp clean`: what runs take on disk, and what of it is to be removed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from slurmddp.report.runs import age_text
from slurmddp.run.pruning import Removal, Skipped
from slurmddp.run.usage import Usage
from slurmddp.shared.units import human
from slurmddp.visible import one_line


def biggest_first(found: Iterable[Usage]) -> list[Usage]:
    """Return them in the order in which they are listed."""
    return sorted(found, key=lambda item: (-item.bytes, item.folder.id))


def as_dict(item: Usage) -> dict[str, Any]:
    """Return what a run takes, for --json. The keys are stable."""
    return {
        "run_id": item.folder.id,
        "run_folder": str(item.folder.path),
        "bytes": item.bytes,
        "files": item.files,
        "checkpoints": item.checkpoints,
        "logs": item.logs,
        "changed": round(item.changed, 3),
    }


def table(found: Sequence[Usage]) -> str:
    """Return one line per run, and one for all. AGE: since the run last wrote anything."""
    if not found:
        return "no runs"
    now = time.time()
    rows: list[tuple[str, ...]] = [("RUN", "SIZE", "CHECKPOINTS", "LOGS", "FILES", "AGE")]
    for item in found:
        sizes = map(human, (item.bytes, item.checkpoints, item.logs))
        rows.append((one_line(item.folder.id), *sizes, str(item.files), age_text(now - item.changed)))
    if len(found) > 1:
        sums = (
            sum(sizes) for sizes in zip(*((item.bytes, item.checkpoints, item.logs) for item in found), strict=True)
        )
        rows.append((f"{len(found)} runs", *map(human, sums), str(sum(item.files for item in found)), ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
    )


def clean_lines(planned: Sequence[Removal], skipped: Sequence[Skipped]) -> list[str]:
    """Return all that is to be removed and its size, after the runs that stay."""
    lines = [one_line(f"stays   {item.folder.id}: {item.why}") for item in skipped]
    for item in planned:
        about = f"{item.state.state}, {age_text(time.time() - item.usage.changed)} old"
        if item.pruning is None:
            lines.append(
                one_line(f"remove  {item.folder.path} ({about}, {item.usage.files} files): {human(item.bytes)}")
            )
        for each in item.pruning.going if item.pruning else ():
            lines.append(one_line(f"remove  {each.path} ({about}): {human(each.bytes)}"))
    return [*lines, _total(planned) if planned else "nothing to remove"]


def removed_line(gone: Sequence[Removal]) -> str:
    """Return the line at the end: how much was removed."""
    return f"removed: {_total(gone)}"


def _total(found: Sequence[Removal]) -> str:
    pruned = sum(len(item.pruning.going) for item in found if item.pruning)
    what = f"{len(found)} run{'s' * (len(found) != 1)}"
    if pruned:
        what = f"{pruned} checkpoint{'s' * (pruned != 1)} of {what}"
    return f"{what}, {human(sum(item.bytes for item in found))}"


def clean_dict(found: Sequence[Removal], skipped: Sequence[Skipped], *, done: bool) -> dict[str, Any]:
    """Return what was, or with done=False would be, removed, for --json. The keys are stable. checkpoints: null where
    the whole run folder is meant."""
    return {
        "removed": [
            {
                "run_id": item.folder.id,
                "run_folder": str(item.folder.path),
                "state": item.state.state,
                "bytes": item.bytes,
                "checkpoints": [str(each.path) for each in item.pruning.going] if item.pruning else None,
            }
            for item in found
        ],
        "kept": [{"run_id": item.folder.id, "why": item.why} for item in skipped],
        "bytes": sum(item.bytes for item in found),
        "done": done,
    }
