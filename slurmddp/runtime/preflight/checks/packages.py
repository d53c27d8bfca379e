"""Which software the ranks of this node would run: names and versions, without importing any of it."""

import importlib.util
import json
import os
import platform
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from slurmddp.records.job_events import USER
from slurmddp.records.preflight import Finding, bad
from slurmddp.runtime.preflight.node_settings import NodeSettings
from slurmddp.shared.run_folder import RunFolder

#: What a message names first.
_FIRST = ("python", "torch", "cuda", "hip", "nccl", "numpy")
_MOST = 4


def check(settings: NodeSettings) -> Iterator[Finding]:
    needed = ["torch", "accelerate"] if RunFolder(settings.run).accelerate.exists() else ["torch"]
    for name in needed:
        if importlib.util.find_spec(name) is None:
            yield bad(f"no {name} in {sys.executable}", "install it in the image, or correct container.python", USER)


def installed(settings: NodeSettings) -> str:
    """Return a JSON object, name -> version: Python, what torch was built for, and every package on the path."""
    found = packages(sys.path)
    found["python"] = platform.python_version()
    found |= _built_for()
    nccl = [version for name, version in found.items() if name.startswith("nvidia-nccl-")]
    if nccl:
        found["nccl"] = nccl[0]
    return json.dumps(found, sort_keys=True)


def packages(path: list[str]) -> dict[str, str]:
    """Return the packages in the folders of sys.path, from the names of their metadata; the first folder counts."""
    found: dict[str, str] = {}
    for folder in path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for name in sorted(names):
            match = re.fullmatch(r"(.+?)-([^-]+)(?:-py[\d.]+)?\.(?:dist|egg)-info", name)
            if match:
                found.setdefault(re.sub(r"[-_.]+", "-", match[1]).lower(), match[2])
    return found


def _built_for() -> dict[str, str]:
    """CUDA's or ROCm's version, from the text of torch/version.py."""
    try:
        text = Path(str(metadata.distribution("torch").locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except (metadata.PackageNotFoundError, OSError):
        return {}
    return dict(re.findall(r"^(cuda|hip)\b[^=\n]*= *['\"]([^'\"]+)", text, re.M))


def differs(own: str, others: str) -> str:
    """Return which packages are not the same, the important ones first."""
    mine: dict[str, str] = json.loads(own or "{}")
    theirs: dict[str, str] = json.loads(others or "{}")
    names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    names.sort(key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name))
    said = [f"{name} {mine.get(name, 'missing')} (the others: {theirs.get(name, 'missing')})" for name in names[:_MOST]]
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return f"has different software: {', '.join(said)}{more}"
