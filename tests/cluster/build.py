"""The cache of everything that takes long: built once, named by a hash of what it is made of."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import debian, roots
from .errors import ClusterUnavailable
from .variant import variant

CACHE_VARIABLE = "SLURMDDP_CLUSTER_CACHE"


@dataclass(frozen=True)
class Parts:
    """The finished folders that a cluster is put together from."""

    host_root: Path
    image_roots: Path
    login_venv: Path

    def folders(self) -> tuple[Path, ...]:
        """All of them."""
        return (self.host_root, self.image_roots, self.login_venv)


def cache_folder() -> Path:
    """Where built folders are kept: $SLURMDDP_CLUSTER_CACHE, else /var/cache/slurmddp-cluster."""
    return Path(os.environ.get(CACHE_VARIABLE) or "/var/cache/slurmddp-cluster").absolute()


def digest(*inputs: object) -> str:
    """A short hash of a part's inputs and of the text of the modules that build it."""
    text = [Path(module.__file__ or "").read_text() for module in (debian, roots)]
    return hashlib.sha256(repr([*text, *inputs]).encode()).hexdigest()[:12]


def wanted() -> Parts:
    """The folders that this checkout asks for, whether they exist yet or not."""
    cache = cache_folder()
    made_of = variant()
    host = digest(made_of.suites, made_of.packages, *(path.read_text() for path in roots.host_files()))
    pins = roots.LOCK.read_text()
    venv = cache / f"venv-{digest(made_of.python, roots.login_requirements(), pins)}"
    return Parts(cache / f"host-{host}", cache / f"image-{digest(pins)}", venv)


def is_built(parts: Parts) -> bool:
    """True where every part is in the cache."""
    return all(path.is_dir() for path in parts.folders())


def build(report: Callable[[str], None] = lambda line: None) -> Parts:
    """The parts from the cache; what is missing is built first, the two roots beside each other.

    Raises ClusterUnavailable where this machine cannot build them.
    """
    parts = wanted()
    if is_built(parts):
        return parts
    if os.geteuid() != 0:
        raise ClusterUnavailable("building the cluster's roots needs root")
    with locked(cache_folder() / "lock"):
        debian.ensure_builder()
        with ThreadPoolExecutor(max_workers=2) as pool:
            image = pool.submit(make, parts.image_roots, roots.make_image_roots, report)
            make(parts.host_root, roots.make_host_root, report)
            make(parts.login_venv, lambda target: roots.make_login_venv(target, parts.host_root), report)
            image.result()
    return parts


def make(final: Path, recipe: Callable[[Path], None], report: Callable[[str], None]) -> None:
    """Build one part under a temporary name and rename it, so that a part that has its name is whole."""
    if final.is_dir():
        return
    started = time.monotonic()
    for left_over in final.parent.glob(final.name + ".building*"):
        shutil.rmtree(left_over)
    temporary = final.with_name(final.name + ".building")
    recipe(temporary)
    temporary.chmod(0o755)
    temporary.rename(final)
    report(f"built {final} in {time.monotonic() - started:.0f} s")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; a second builder waits for the first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def prune(in_use: Sequence[Parts], report: Callable[[str], None]) -> None:
    """Remove parts, and images made of them, that neither this checkout nor a running cluster uses."""
    keep = {path.name for parts in [wanted(), *in_use] for path in parts.folders()}
    with locked(cache_folder() / "lock"):
        for path in sorted(cache_folder().iterdir()):
            if path.name != "lock" and path.name.split(".")[0] not in keep:
                subprocess.run(["rm", "-rf", "--one-file-system", str(path)], check=True)
                report(f"removed {path}")
