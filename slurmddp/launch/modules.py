"""Where a Python module of the user's own lies."""

from __future__ import annotations

from pathlib import Path


def module_file(folder: str, module: str) -> Path | None:
    """Return the file that `python -m MODULE` runs in a folder; None if there is none."""
    path = Path(folder, *module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__main__.py") if file.is_file()), None)
