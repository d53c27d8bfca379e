"""Recognises a SIF file by its header, without any tool."""

from __future__ import annotations

from pathlib import Path

# A SIF begins with a launch line of 32 bytes, then the magic word, ended by a NUL (sylabs/sif,
# pkg/sif/sif.go, Header).
_MAGIC_OFFSET = 32
_MAGIC = b"SIF_MAGIC\0"


def is_sif(path: Path) -> bool:
    """Whether the file begins as a SIF does. Raises OSError where it cannot be read."""
    with path.open("rb") as file:
        return file.read(_MAGIC_OFFSET + len(_MAGIC))[_MAGIC_OFFSET:] == _MAGIC
