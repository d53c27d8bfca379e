"""Recognises a SIF file by its header, without any tool."""

from __future__ import annotations

from pathlib import Path

# A SIF begins with a launch line of 32 bytes, then the magic word, a version and the code of an architecture, each
# ended by a NUL (sylabs/sif, pkg/sif/sif.go, header; pkg/sif/arch.go).
_MAGIC_OFFSET = 32
_MAGIC = b"SIF_MAGIC\0"
_ARCHITECTURE = slice(45, 47)
_ARCHITECTURES = {
    b"01": "386",
    b"02": "amd64",
    b"03": "arm",
    b"04": "arm64",
    b"05": "ppc64",
    b"06": "ppc64le",
    b"11": "s390x",
    b"12": "riscv64",
}


def is_sif(path: Path) -> bool:
    """Return whether the file begins as a SIF does. Raises OSError where it cannot be read."""
    return _header(path)[_MAGIC_OFFSET : _MAGIC_OFFSET + len(_MAGIC)] == _MAGIC


def sif_architecture(path: Path) -> str | None:
    """Return the architecture of a SIF in Go's words (amd64, arm64); None if it does not say, or is no SIF.

    Raises OSError where it cannot be read.
    """
    return _ARCHITECTURES.get(_header(path)[_ARCHITECTURE]) if is_sif(path) else None


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_ARCHITECTURE.stop)
