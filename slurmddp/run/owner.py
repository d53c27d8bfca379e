"""Whether other users can put a run folder of theirs in the place of ours."""

from __future__ import annotations

import stat
from pathlib import Path

from slurmddp.records.owners import written_by_others


def shared_folder(root: Path) -> str | None:
    """Return a warning if other users can replace a folder of runs, or one above it; None if they cannot."""
    for path in (root, *root.parents):
        try:
            facts = path.stat()
        except OSError:  # It will be made, without write access for others.
            continue
        if written_by_others(facts) and not facts.st_mode & stat.S_ISVTX:
            return (
                f"other users can rename folders in {path}, so they can put a run folder of theirs in the place of "
                f"yours: chmod +t {path}, or choose another runs folder: --set paths.runs=FOLDER"
            )
    return None
