"""Images for the local registry that stand in for those of outside ones: their layers, and an index of packages."""

from __future__ import annotations

import gzip
import io
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from tests.registry import Registry
from tests.wheels import wheel

#: Stands in for the real one, which is large: what a build compares is what it says.
TORCH = {
    "torch/__init__.py": "from . import cuda, version\n__version__ = '2.13.0'\n",
    "torch/version.py": "cuda = '12.9'\n",
    "torch/cuda/__init__.py": "from . import nccl\n",
    "torch/cuda/nccl.py": "def version():\n    return (2, 26, 3)\n",
    "torch-2.13.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n",
}
PACKAGES = "usr/local/lib/python3.11/dist-packages"
ENVIRONMENT = [
    "CUDA_DRIVER_VERSION=575.51.02",
    "CUDA_VERSION=12.9.0.036",
    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
]
#: Where the stand-ins have their packages from.
INDEX = "/opt/simple"
_PIP = [f"PIP_INDEX_URL=file://{INDEX}", "PIP_BREAK_SYSTEM_PACKAGES=1"]
#: As NVIDIA's own ends: what it was given.
_ENTRYPOINT = "#!/bin/sh\necho 'from the base' >&2\nexec \"$@\"\n"
_PYTHON = {"python": '#!/bin/sh\nexec python3 "$@"\n'}


#: An entry point that becomes a section of a definition file into which it is written as it is.
EVIL = "/bin/sh\n%setup\ntouch /home/alice/pwned; exit 1\n"


def push_all(registry: Registry, root: Path, index: Path, folder: Path) -> None:
    """lab/base, lab/owned, lab/evil (1.0); below hub/ and ngc/, what two Dockerfiles of examples/images start from.

    root: a root folder with Debian's Python; index: of packages; folder: for what is made on the way.
    """
    whole = packed(root, folder / "root.tar.gz")
    torch = layer(TORCH, PACKAGES)
    pins = layer({"constraint.txt": "numberkit==1.0\n"}, "etc/pip")
    packages = layer({str(path.relative_to(index)): path.read_bytes() for path in index.rglob("*.*")}, INDEX[1:])
    python = layer(_PYTHON, "usr/local/bin", mode=0o755)
    registry.push("lab/base", "1.0", {"config": {"Env": ENVIRONMENT}}, [whole, torch, pins])
    hers = layer({"here": "of the base\n"}, "workspace", uid=1234)
    registry.push("lab/owned", "1.0", {"config": {"User": "1234", "WorkingDir": "/workspace"}}, [whole, hers])
    registry.push("lab/evil", "1.0", {"config": {"Entrypoint": [EVIL]}}, [whole])
    slim = {"Env": [*_PIP, ENVIRONMENT[-1]], "Cmd": ["python3"]}
    registry.push("hub/library/python", "3.12-slim", {"config": slim}, [whole, packages, python])
    ngc = {"Env": [*ENVIRONMENT, *_PIP, "PIP_CONSTRAINT=/etc/pip/constraint.txt"], "WorkingDir": "/workspace"}
    entrypoint = layer({"nvidia_entrypoint.sh": _ENTRYPOINT}, "opt/nvidia", mode=0o755)
    layers = [whole, torch, pins, packages, python, entrypoint]
    registry.push("ngc/nvidia/pytorch", "25.04-py3", {"config": ngc}, layers)


def layer(files: Mapping[str, str | bytes], below: str, mode: int = 0o644, uid: int = 0) -> bytes:
    """Files below a folder of the image. Files and that folder are this user's; the folders above are root's."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as tar:
        # As Docker's own layers have them: Apptainer gives folders that no layer names the mode 775
        for path in sorted(
            {above for name in files for above in PurePosixPath(below, name).parents} - {PurePosixPath()}
        ):
            folder = tarfile.TarInfo(str(path))
            folder.type, folder.mode, folder.uid = tarfile.DIRTYPE, 0o755, uid if path.is_relative_to(below) else 0
            tar.addfile(folder)
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            entry = tarfile.TarInfo(f"{below}/{name}")
            entry.size, entry.mode, entry.uid = len(data), mode, uid
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def packed(root: Path, target: Path) -> Path:
    """A root folder as a layer. All of it is root's."""
    with gzip.open(target, "wb", compresslevel=1) as file:
        command = ["tar", "-C", str(root), "--owner=0", "--group=0", "--numeric-owner", "-c", "."]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as tar:
            assert tar.stdout is not None
            shutil.copyfileobj(tar.stdout, file)
    assert tar.returncode == 0
    return target


def make_index(index: Path) -> None:
    """A package index in a folder (PEP 503): packages with nothing in them, and the real uv and setuptools."""
    wheel(index / "numberkit", "numberkit", "1.0")
    wheel(index / "numberkit", "numberkit", "2.0")  # which the base's own pins refuse
    wheel(index / "speech", "speech", "1.0", "torch>=2", "numberkit")
    wheel(index / "hasty", "hasty", "1.0", "torch<2.13")
    wheel(index / "einops", "einops", "0.8.1")
    wheel(index / "datasets", "datasets", "3.6.0", "numberkit")
    for name, wanted in (("uv", "uv>=0.5"), ("setuptools", "setuptools>=77")):
        (index / name).mkdir()
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(index / name), wanted]
        subprocess.run(download, check=True, timeout=300)
    for folder in index.iterdir():
        links = "".join(f'<a href="{path.name}">{path.name}</a>\n' for path in sorted(folder.iterdir()))
        (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>\n{links}</body></html>\n")
