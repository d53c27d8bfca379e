"""Files of a run folder that others may read at any moment."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file such that nobody ever sees half of it. Raises OSError."""
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
