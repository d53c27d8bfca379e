"""What spython's parser reads wrong, which is why it reads no Dockerfile here."""

import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Dock, cut

# What spython 0.3.14 makes of each, handed over as it is, was tried; it is in the comment
TRAPS = {
    "a continued line that begins with a keyword": "RUN show \\\nadd \\\ncopy b\n",  # %files: `add`, and `copy b`
    "lower case": "run show add copy b\n",  # a line of %post that begins with `run`
    "an exec form": 'RUN ["show", "add", "copy", "b"]\n',  # a line of %post that begins with [
    "env for later commands": "ENV A=copy\nRUN show add $(printenv A) b\n",  # not exported
    "env with an escape": "ENV A=add\\ copy\nRUN show ${A%% *} ${A#* } b\n",  # IndexError
    "a comment within": "RUN show add \\\n # no\n copy b\n",  # stays, so the shell ends the command there
}


@pytest.mark.parametrize("trap", TRAPS)
def test_its_traps_within_a_stage(dock: Dock, trap: str) -> None:
    dock.stub("show")
    (part,) = cut(dock.convert("FROM debian:12\n" + TRAPS[trap]).definition)
    done = dock.post(part)
    assert done.returncode == 0, done.stderr
    assert dock.said() == ["show<add><copy><b>"]


def test_its_traps_about_stages(dock: Dock) -> None:
    # It reads From: docker.io/x/atl, Stage: as one, takes the second stage for a part of the first, and drops --from=1
    text = "FROM docker.io/x/atlas as one\nRUN true\nFROM y/bas\nRUN true\nFROM z/alias AS three\n"
    text += "COPY --from=one /a /a\nCOPY --from=1 /b /b\n"
    parts = cut(dock.convert(text).definition)
    assert [part.header["from"] for part in parts] == ["docker.io/x/atlas", "y/bas", "z/alias"]
    assert [part.header["stage"] for part in parts] == ["one", "stage-1", "three"]
    assert "%files from one" in parts[2].sections and "%files from stage-1" in parts[2].sections


def test_a_conversion_imports_no_spython(dock: Dock) -> None:
    path = dock.file("Dockerfile", "FROM debian:12 AS one\nFROM one\nENV A=1\nWORKDIR /a\nLABEL a=b\nCMD a\n")
    code = (
        "import pathlib, sys, slurmddp.images.image_spec as wanted\n"
        f"wanted.of_dockerfile(pathlib.Path({str(path)!r}), {{}}, None)\n"
        "sys.exit('spython' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[4])
