"""The snapshot of the code as this node sees it."""

import hashlib
import os
from pathlib import Path

from slurmddp.runtime.preflight.node_settings import NodeSettings

#: Bytes that are read: all of a usual snapshot. Of what lies beyond, names and sizes count.
_READ = 64 << 20
_LARGE = 1 << 20


def fingerprint(settings: NodeSettings) -> str:
    """Hash over the names, sizes and contents of RUN/code. Raises OSError."""
    root = settings.run / "code"
    total = hashlib.sha256()
    left = _READ
    count = 0
    for path in _files(root):
        size = path.stat().st_size
        whole = size <= min(_LARGE, left)
        total.update(f"{path.relative_to(root)}\0{size}\0".encode("utf-8", "surrogateescape"))
        if whole:
            total.update(path.read_bytes())
            left -= size
        count += 1
    return f"{count} files, {total.hexdigest()[:12]}"


def _files(root: Path) -> list[Path]:
    """All files below, without what Python itself writes there, in an order that is the same everywhere."""
    found = []
    for folder, folders, names in os.walk(root, onerror=_refuse):
        folders[:] = [name for name in folders if name != "__pycache__"]
        found += [path for path in (Path(folder, name) for name in names) if path.is_file()]
    return sorted(found)


def _refuse(error: OSError) -> None:
    raise error
