"""The Dockerfiles in examples/images, whole.

`SLURMDDP_UPDATE_GOLDEN=1 pytest tests/unit/images/dockerfile` writes the golden files anew.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from slurmddp import __version__
from slurmddp.images.dockerfile import convert

from .conftest import Dock, cut

EXAMPLES = Path(__file__).resolve().parents[4] / "examples" / "images"
GOLDEN = Path(__file__).parents[1] / "definitions"
NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/Dockerfile"))


@pytest.mark.parametrize("name", NAMES)
def test_the_whole_text(name: str) -> None:
    made = convert(EXAMPLES / name / "Dockerfile")
    text = made.definition.replace(str(EXAMPLES), "EXAMPLES").replace(__version__, "VERSION")
    file = GOLDEN / f"dockerfile-{name}.def"
    if os.environ.get("SLURMDDP_UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()
    assert all(path.exists() for path in made.sources)


@pytest.mark.parametrize("name", NAMES)
def test_the_scripts_are_shell(name: str) -> None:
    for part in cut(convert(EXAMPLES / name / "Dockerfile").definition):
        for section in ("%post", "%environment", "%runscript", "%startscript"):
            script = part.sections.get(section, "")
            subprocess.run(["sh", "-n"], input=script, text=True, check=True)
            if script and shutil.which("shellcheck"):
                command = ["shellcheck", "-s", "sh", "-S", "warning", "-"]
                done = subprocess.run(command, input="set -e\n" + script, text=True, capture_output=True)
                assert done.returncode == 0, done.stdout


def test_the_pinned_one_runs_as_its_dockerfile_says(dock: Dock) -> None:
    shutil.copytree(EXAMPLES / "pinned", dock.context, dirs_exist_ok=True)
    text = (dock.context / "Dockerfile").read_text().replace("/opt/app", f"{dock.root}/opt/app")
    made = dock.convert(text, GREETING="it's", USER_ID="5")
    (part,) = cut(made.definition)
    done = dock.post(part)
    assert done.returncode == 0, done.stderr
    app = dock.root / "opt/app"
    assert (app / "settings.ini").stat().st_mode & 0o777 == 0o644
    assert f"chown<5:5><{app}/bin>" in dock.said()
    assert dock.run(part) == f"it's {app}\nmade with an exec form\n<two words> in {app}\n"
    assert dock.run(part, "greet", "settings.ini", "x") == f"[app]\nname = pinned\n<x> in {app}\n"
    assert any("USER 5" in note for note in made.notes)


def test_the_wheel_one_copies_only_the_wheel(dock: Dock, tmp_path: Path) -> None:
    _, second = cut(convert(EXAMPLES / "wheel" / "Dockerfile").definition)
    assert list(second.sections) == [
        "%files from build",
        "%post",
        "%environment",
        "%labels",
        "%runscript",
        "%startscript",
    ]
    wheels = tmp_path / "built" / "wheels"
    wheels.mkdir(parents=True)
    for name in ("a.whl", "b.whl", "notes.txt"):
        (wheels / name).write_text("")
    dock.stub("pip", "python")
    script = (
        second.sections["%post"]
        .replace("/tmp-wheels", f"{dock.root}/wheels")
        .replace("/etc/built", f"{dock.root}/built")
    )
    second.sections["%post"] = script
    done = dock.post(second, stages={"build": tmp_path / "built"})
    assert done.returncode == 0, done.stderr
    pip = [line for line in dock.said() if line.startswith("pip")]
    assert pip == [f"pip<install><--no-cache-dir><{dock.root}/wheels/{name}.whl>" for name in "ab"]
    assert (dock.root / "built").read_text() == "the wheel is in\n"
    dock.run(second, "7")
    assert dock.said()[-1] == "python<-m><steps><7>"
