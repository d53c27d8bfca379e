"""A user without any login or proxy, with a home folder of their own; and the real registry."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.registry import Registry

_OURS = ("APPTAINER", "SINGULARITY", "DOCKER", "SSL_CERT", "SLURMDDP_REGISTRY")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in list(os.environ):
        if name.startswith(_OURS) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    """Open to everybody on this machine."""
    with Registry.started(tmp_path) as running:
        yield running
