"""spython's traps, each with the library itself and a stand-in for the program that it runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurmddp.errors import ExternalError
from slurmddp.images import spython_adapter

from .conftest import Apptainer


@pytest.mark.parametrize("name", ["singularity", "apptainer"])
def test_a_missing_program_is_a_typed_error(name: str, no_apptainer: Apptainer) -> None:
    with pytest.raises(ExternalError, match=f"`{name} --version` failed"):
        spython_adapter.version_text(name)
    with pytest.raises(ExternalError, match=f"`{name} inspect .*x.sif` failed"):
        spython_adapter.labels(name, Path("/x.sif"))


@pytest.mark.parametrize("name", ["singularity", "apptainer"])
def test_a_program_that_fails_is_a_typed_error(name: str, no_apptainer: Apptainer) -> None:
    no_apptainer.install(name, "no such module", code=1)
    with pytest.raises(ExternalError, match=f"`{name} --version` failed"):
        spython_adapter.version_text(name)
    no_apptainer.set("INSPECT_FAILS", "1")
    with pytest.raises(ExternalError, match="FATAL: no image"):
        spython_adapter.labels(name, Path("/x.sif"))


@pytest.mark.parametrize("name", ["singularity", "apptainer"])
def test_version_and_labels(
    name: str, no_apptainer: Apptainer, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_apptainer.install(name, "singularity-ce version 4.1.0")
    monkeypatch.setenv("SPYTHON_SINGULARITY_VERSION", "9.9.9")  # spython would take this for the truth
    assert spython_adapter.version_text(name) == "singularity-ce version 4.1.0"
    assert spython_adapter.labels(name, Path("/x.sif")) == {"slurmddp.torch": "2.7.0"}
    assert capfd.readouterr() == ("", "")  # stdout is the command's own


@pytest.mark.parametrize("name", ["singularity", "apptainer"])
def test_a_program_of_an_image_gets_nothing_of_the_user_s(
    name: str, no_apptainer: Apptainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"
    no_apptainer.install(name)
    text = (no_apptainer.bin / name).read_text().replace("case $1 in", f"env >> {seen}\ncase $1 in")
    (no_apptainer.bin / name).write_text(text)
    monkeypatch.setenv("WANDB_API_KEY", "S3CRET")
    monkeypatch.setenv("APPTAINERENV_TOKEN", "S3CRET")
    monkeypatch.setenv("APPTAINER_DOCKER_PASSWORD", "S3CRET")
    spython_adapter.version_text(name)
    spython_adapter.labels(name, Path("/x.sif"))
    spython_adapter.output_in(name, Path("/x.sif"), "cat", "/etc/x")
    assert "PATH=" in seen.read_text() and "S3CRET" not in seen.read_text()
    runs = [call for call in no_apptainer.calls if " exec " in call]
    assert len(runs) == 1 and all("--contain --no-home --cleanenv" in call for call in runs)
    assert os.environ["WANDB_API_KEY"] == "S3CRET"  # this process keeps its own


def test_what_is_no_json_is_a_typed_error(no_apptainer: Apptainer) -> None:
    for name in ("singularity", "apptainer"):
        (no_apptainer.bin / name).write_text("#!/bin/sh\necho '<html>'\n")
        (no_apptainer.bin / name).chmod(0o755)
        with pytest.raises(ExternalError, match="inspect"):
            spython_adapter.labels(name, Path("/x.sif"))


def test_spython_is_imported_only_when_singularity_is_asked() -> None:
    code = (
        "import sys, slurmddp.images.make, slurmddp.launch.image\n"
        "sys.exit(any(name in sys.modules for name in ('spython', 'yaml', 'pydantic', 'jinja2', 'ssl')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
