"""InfiniBand and RoCE as NCCL will find them in the container: the adapters' device files, and the library with a
driver for them. Where one is missing, NCCL uses TCP without a message: warnings, since the run works, only slower.
"""

import ctypes
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from slurmddp.records.preflight import Finding, warn
from slurmddp.runtime.preflight.node_settings import NodeSettings

_LIBRARY = "libibverbs.so.1"
_SLOW = "NCCL falls back to TCP"
_RECIPE = "the image needs rdma-core: NVIDIA's images have it, the recipe ngc-pytorch-ofed adds it"
#: The kernel's driver of an adapter, and what libibverbs calls its part; others are not told apart.
_PROVIDERS = {"mlx5_core": "mlx5", "mlx4_core": "mlx4", "efa": "efa", "bnxt_en": "bnxt_re"}


def check(settings: NodeSettings) -> Iterator[Finding]:
    """Yield warnings about RDMA adapters, if ranks of several nodes use NCCL and it may use InfiniBand."""
    if wanted(settings, os.environ):
        yield from look()


def wanted(settings: NodeSettings, environ: Mapping[str, str]) -> bool:
    """Return whether ranks of several nodes use NCCL, and it may use InfiniBand or RoCE."""
    return settings.gpus > 0 and len(settings.nodes) > 1 and not refused(environ)


def refused(environ: Mapping[str, str]) -> bool:
    """Return whether NCCL uses another transport: by a setting, or by a plugin for the network (libfabric, UCX)."""
    disabled = environ.get("NCCL_IB_DISABLE", "0") not in ("", "0")
    return disabled or environ.get("NCCL_NET", "IB").upper() != "IB" or bool(environ.get("NCCL_NET_PLUGIN"))


def look(root: Path = Path("/"), find: Callable[[], Path | None] = lambda: folder_of(_LIBRARY)) -> Iterator[Finding]:
    """root: where dev and sys lie. find: the library's folder."""
    adapters = drivers(root / "sys/class/infiniband")
    if not adapters:
        return
    names = ", ".join(adapters)
    files = sorted((root / "dev/infiniband").glob("uverbs*"))
    refusals = [why for why in map(_refusal, files) if why]
    if not files:
        todo = "put --contain in container.options, so that slurmddp binds /dev/infiniband; or load ib_uverbs"
        yield warn(f"has {names}, but sees no /dev/infiniband/uverbs*: {_SLOW}", todo)
    elif len(refusals) == len(files):
        todo = "remove /dev/infiniband from container.binds: user binds are mounted nodev"
        yield warn(f"has {names}, but cannot open {files[0]} ({refusals[0]}): {_SLOW}", todo)
    folder = find()
    if folder is None:
        yield warn(f"has {names}, but cannot load {_LIBRARY}: {_SLOW}", _RECIPE)
        return
    there = providers(folder)
    lacking = {_PROVIDERS[driver] for driver in adapters.values() if driver in _PROVIDERS} - there
    if lacking or not there:
        what = " and ".join(sorted(lacking)) or "any adapter"
        yield warn(f"has {names}, but no libibverbs driver for {what} in {folder}: {_SLOW}", _RECIPE)


def drivers(adapters: Path) -> dict[str, str]:
    """Adapter -> the kernel's driver of its device, empty if the kernel does not say."""
    try:
        names = sorted(os.listdir(adapters))
    except OSError:
        return {}
    found = {}
    for name in names:
        try:
            found[name] = os.path.basename(os.readlink(adapters / name / "device" / "driver"))
        except OSError:
            found[name] = ""
    return found


def folder_of(library: str) -> Path | None:
    """Return where the loader finds a shared library; None if it does not. It stays loaded."""
    try:
        ctypes.CDLL(library)
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    paths = [Path(line.split(maxsplit=5)[5]) for line in maps if "/" in line]
    stem = library.split(".so")[0] + ".so"
    return next((path.parent for path in paths if path.name.startswith(stem)), None)


def providers(folder: Path) -> set[str]:
    """Return the drivers that libibverbs has beside it: mlx5 for libmlx5-rdmav34.so."""
    files = [*folder.glob("libibverbs/lib*-rdmav*.so"), *folder.glob("lib*-rdmav*.so")]
    return {match[1] for file in files if (match := re.fullmatch(r"lib(.+)-rdmav\d+\.so", file.name))}


def _refusal(file: Path) -> str:
    try:
        os.close(os.open(file, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return error.strerror or str(error)
    return ""
