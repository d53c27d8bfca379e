"""A stand-in for Apptainer: a small script on PATH that does what the settings beside it say."""

import shlex
from pathlib import Path

import pytest


def sif(architecture: bytes = b"00") -> bytes:
    """The header of a SIF; 02 is amd64, 04 arm64, and 00 does not say."""
    return b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\0" + b"01\0" + architecture + b"\0"


SIF = sif()

FAKE = r"""#!/bin/bash
# $FAKE_BUILD is what `build` does; $FAKE_CALLS gets one line a call. Not from the environment: that one is the user's
. "${0%/*}/settings"
echo "$(basename "$0") $*" >> "$FAKE_CALLS"
case $1 in
  --version) echo "${FAKE_VERSION-apptainer version 1.4.5-1}"; exit "${FAKE_VERSION_CODE:-0}" ;;
  inspect)
    [ -z "$FAKE_INSPECT_FAILS" ] || { echo "FATAL: no image" >&2; exit 255; }
    echo '{"data": {"attributes": {"labels": {"slurmddp.torch": "2.7.0"}}}, "type": "container"}' ;;
  exec)
    [ -z "$FAKE_EXEC_FAILS" ] || { echo "FATAL: no user namespaces" >&2; exit 255; }
    printf 'einops==0.8.1\ntorch==2.7.0\n' ;;
  build)
    image=${@: -2:1} definition=${@: -1}
    grep -q ^Bootstrap: "$definition" || exit 3
    eval "$FAKE_BUILD" ;;
esac
"""

GOOD_BUILD = (
    "echo 'INFO: starting' >&2; echo '+ pip install'; "
    r"printf '#!/usr/bin/env run-singularity\n\0SIF_MAGIC\0%s' new > $image"
)


class Apptainer:
    """The stand-in; `calls` are the command lines it was given."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        self._calls = folder / "calls"
        patch.setenv("PATH", f"{self.bin}:/usr/bin:/bin")
        self.set("CALLS", str(self._calls))
        self.builds(GOOD_BUILD)

    def install(self, name: str = "apptainer", version: str | None = None, code: int = 0) -> None:
        (self.bin / name).write_text(FAKE)
        (self.bin / name).chmod(0o755)
        if version is not None:
            self.set("VERSION", version)
        self.set("VERSION_CODE", str(code))

    def builds(self, script: str) -> None:
        self.set("BUILD", script)

    def set(self, name: str, value: str) -> None:
        with (self.bin / "settings").open("a") as file:
            file.write(f"FAKE_{name}={shlex.quote(value)}\n")

    @property
    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines() if self._calls.exists() else []


@pytest.fixture
def no_apptainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Apptainer:
    """A PATH on which nothing builds images until `install` is called."""
    monkeypatch.delenv("SPYTHON_SINGULARITY_VERSION", raising=False)
    return Apptainer(tmp_path, monkeypatch)


@pytest.fixture
def apptainer(no_apptainer: Apptainer) -> Apptainer:
    no_apptainer.install()
    return no_apptainer


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A .sif to start from."""
    path = tmp_path / "base.sif"
    path.write_bytes(SIF)
    return path
