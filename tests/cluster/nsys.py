"""NVIDIA Nsight Systems from Debian's non-free packages, for a container that binds it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from .build import cache_folder, locked
from .debian import KEYRING, apt_settings, debian_mirror

SUITE, PACKAGE = "bookworm", "nsight-systems-target"
INSIDE = Path("usr/lib/x86_64-linux-gnu/nsight-systems/target-linux-x64")


def nsys_folder() -> Path:
    """The folder with the program nsys, downloaded once; skips the test where the mirror has none."""
    cached = cache_folder() / f"{PACKAGE}-{SUITE}"
    with locked(cached.with_suffix(".lock")):
        if not cached.is_dir():
            made = cached.with_suffix(".new")
            shutil.rmtree(made, ignore_errors=True)
            for folder in ("lists/partial", "archives/partial"):
                (made / "apt" / folder).mkdir(parents=True)
            _download(made)
            made.rename(cached)
    return cached / INSIDE


def _download(made: Path) -> None:
    """apt with lists of its own: the machine's have no non-free packages."""
    apt = made / "apt"
    source = f"deb [check-valid-until=no signed-by={KEYRING}] {debian_mirror()} {SUITE} non-free\n"
    (apt / "nsys.list").write_text(source)
    places = {"Etc::sourcelist": apt / "nsys.list", "Etc::sourceparts": "/nonexistent", "State::lists": apt / "lists"}
    lines = [f'Dir::{name} "{place}";' for name, place in {**places, "Cache": apt}.items()]
    (apt / "apt.conf").write_text("\n".join([*lines, *apt_settings(), 'Acquire::Languages "none";\n']))
    environment = {**os.environ, "APT_CONFIG": str(apt / "apt.conf")}
    for words in (["update"], ["download", PACKAGE]):
        done = subprocess.run(["apt-get", "-q", *words], cwd=made, env=environment, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no {PACKAGE} from this machine's Debian mirror: {done.stderr.strip()[-300:]}")
    (package,) = made.glob("*.deb")
    subprocess.run(["dpkg-deb", "--extract", package, made], check=True)
