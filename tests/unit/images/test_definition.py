"""Definition files, whole.

`SLURMDDP_UPDATE_GOLDEN=1 pytest tests/unit/images` writes the golden files anew.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from slurmddp.errors import UserError
from slurmddp.images.base import Base, Pin
from slurmddp.images.definition import render_definition
from slurmddp.images.recipe import Ingredients, check_requirement
from slurmddp.images.releases import releases

DIGEST = f"sha256:{'0123456789abcdef' * 4}"
GOLDEN = Path(__file__).parent / "definitions"
NGC = Base("docker", releases()["25.04"].reference, releases()["25.04"])
CASES = {
    "ngc-25.04": (NGC, ()),
    "ngc-25.04-pip": (
        NGC,
        (
            "datasets>=3",
            "einops",
            "foo[bar]==1.2; python_version<'3.13'",
            "x @ git+https://example.org/x#egg=x",
        ),
    ),
    "localimage": (Base("localimage", "/shared/my images/base.sif"), ("einops==0.8.1",)),
    "all": (NGC, ("einops",)),
}
#: What a recipe can say besides.
MORE: dict[str, Any] = {
    "title": "Everything at once",
    "apt": ("git", "libnuma1=2.0.14-1"),
    "requirements": Path("/home/me/my project/requirements.txt"),
    "index": "https://example.org/simple",
    "installer": "uv",
    "files": ((Path("/home/me/my project/src"), "/opt/project/src"),),
    "environment": (("MODEL", "it's $5"), ("PLAIN", "yes")),
    "setup": ("cat > /etc/motd <<'END'\n  hello $USER\nEND", "ldconfig"),
    "test": ("python3 -c 'import einops'",),
    "labels": (("org.example.team", "vision and sound"),),
}


def case(name: str) -> str:
    """One case's whole text."""
    more = MORE if name == "all" else {}
    commit = "0123abc" if name == "all" else None
    pins = {NGC.source: Pin("mirror.example/nvidia/pytorch", DIGEST)} if name == "all" else {}
    return render_definition(image(*CASES[name], **more), "1.2.3", pins, commit)


def image(base: Base, pip: tuple[str, ...] = (), **more: Any) -> Ingredients:
    return Ingredients("image", base, pip=pip, **more)


@pytest.mark.parametrize("name", CASES)
def test_the_whole_text(name: str) -> None:
    text = case(name)
    file = GOLDEN / f"{name}.def"
    if os.environ.get("SLURMDDP_UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()
    assert max(map(len, text.splitlines())) <= 120


def section(text: str, name: str) -> str:
    """One section's script as Apptainer cuts it out: a line whose first word begins with % opens the next."""
    match = re.search(rf"^%{name}\n(.*?)(?=^\s*%|\Z)", text, re.DOTALL | re.MULTILINE)
    assert match
    return match.group(1)


@pytest.mark.parametrize("name", CASES)
def test_the_scripts_are_shell(name: str) -> None:
    text = case(name)
    for part in ("post", "environment", "test"):
        script = section(text, part)
        subprocess.run(["sh", "-n"], input=script, text=True, check=True)
        if shutil.which("shellcheck"):
            done = subprocess.run(["shellcheck", "-s", "sh", "-"], input=script, text=True, capture_output=True)
            assert done.returncode == 0, done.stdout


PYTHON = """#!/bin/sh
case "$*" in
  -c*metadata*) [ ! -s "$STATE/torch" ] || cat "$STATE/torch" ;;
  *torch_facts.py) echo "torch $(cat "$STATE/torch")" ;;
  *freeze*) echo einops==0.8.1 ;;
  *pip*)
    for argument; do printf '<%s>' "$argument" >> "$STATE/pip"; done
    while [ $# -gt 0 ]; do [ "$1" != --constraint ] || cat "$2" > "$STATE/pins"; shift; done
    if [ -n "$REPLACES" ]; then echo "$REPLACES" > "$STATE/torch"; fi ;;
esac
"""


def in_folder(script: str, folder: Path) -> str:
    """What it writes into the image goes into a folder."""
    return script.replace("/usr/local/share/slurmddp", f"{folder}/share")


def run_post(folder: Path, pip: tuple[str, ...], torch: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """%post, as Apptainer runs it, where python3 is a stand-in and torch is said to be of that version."""
    (folder / "torch").write_text(torch)
    (folder / "python3").write_text(PYTHON)
    (folder / "python3").chmod(0o755)
    environment = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "STATE": str(folder),
        "SINGULARITY_LABELS": str(folder / "labels"),
        **variables,
    }
    script = in_folder(section(render_definition(image(NGC, pip), "1"), "post"), folder)
    return subprocess.run(["sh", "-ex"], input=script, text=True, env=environment, capture_output=True)


def test_packages_reach_pip_as_they_were_written_and_torch_is_pinned(tmp_path: Path) -> None:
    done = run_post(tmp_path, ("a>=1", "b; python_version<'3.13'", 'c @ https://x/$(id)`id`"#e'), "2.7.0a0+79a.nv25.4")
    assert done.returncode == 0, done.stderr
    said = (tmp_path / "pip").read_text()
    assert said.endswith("<a>=1><b; python_version<'3.13'><c @ https://x/$(id)`id`\"#e>")
    assert (tmp_path / "pins").read_text() == "torch==2.7.0a0+79a.nv25.4\n"
    assert (tmp_path / "labels").read_text() == "slurmddp.torch 2.7.0a0+79a.nv25.4\n"
    assert (tmp_path / "share/packages.txt").read_text() == "einops==0.8.1\n"


def run_test(folder: Path, base: str | None, now: str) -> "subprocess.CompletedProcess[str]":
    """%test, where the base had one torch (None: none) and the image has another."""
    (folder / "share").mkdir()
    (folder / "python3").write_text(PYTHON)
    (folder / "python3").chmod(0o755)
    (folder / "torch").write_text(now)
    if base is not None:
        (folder / "share/torch_of_the_base").write_text(f"torch {base}\n")
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "STATE": str(folder)}
    script = in_folder(section(render_definition(image(NGC, test=("echo mine",)), "1"), "test"), folder)
    return subprocess.run(["sh", "-e"], input=script, text=True, env=environment, capture_output=True)


@pytest.mark.parametrize("base", [None, "2.7.0, CUDA 12.9, NCCL (2, 26, 3)"])
def test_an_image_is_tested_with_the_recipes_own_commands_too(tmp_path: Path, base: str | None) -> None:
    now = "2.7.0, CUDA 12.9, NCCL (2, 26, 3)"
    done = run_test(tmp_path, base, now)
    assert (done.returncode, done.stdout) == (0, f"torch {now}\nmine\n")


def test_another_nccl_than_the_bases_fails_the_test(tmp_path: Path) -> None:
    done = run_test(tmp_path, "2.7.0, CUDA 12.9, NCCL (2, 26, 3)", "2.7.0, CUDA 12.9, NCCL (2, 27, 3)")
    assert done.returncode == 1
    assert "NCCL (2, 26, 3), and the image has torch 2.7.0, CUDA 12.9, NCCL (2, 27, 3)" in done.stderr


def test_a_replaced_torch_fails_the_build(tmp_path: Path) -> None:
    done = run_post(tmp_path, ("a",), "2.7.0", REPLACES="2.13.0")
    assert done.returncode == 1
    assert "slurmddp: torch was 2.7.0 in the base and is 2.13.0 now" in done.stderr


def test_a_base_without_torch_may_get_one(tmp_path: Path) -> None:
    done = run_post(tmp_path, ("torch",), "", REPLACES="2.13.0")
    assert done.returncode == 0
    assert (tmp_path / "pins").read_text() == ""
    assert (tmp_path / "labels").read_text() == "slurmddp.torch 2.13.0\n"


@pytest.mark.parametrize(
    ("item", "what"),
    [
        ("-r requirements.txt", "option or a path"),
        ("--index-url=x", "option or a path"),
        ("./here", "option or a path"),
        ("%post", "option or a path"),
        ("", "option or a path"),
        ("a\nb", "line break"),
        ("a\0", "control character"),
        ("a{{b", "build argument"),
        ("a\\", "backslash"),
        ("a @ https://user:word@example.org/a.whl", "user name or password"),
        ("git+https://token@example.org/a", "user name or password"),
    ],
)
def test_what_no_requirement_may_be(item: str, what: str) -> None:
    with pytest.raises(UserError) as caught:
        check_requirement(item)
    assert what in caught.value.what
    assert caught.value.where == "--pip"


def test_an_address_with_a_user_but_no_password_passes() -> None:
    assert "ssh://git@example.org" in check_requirement("a @ git+ssh://git@example.org/a")


def test_nothing_is_left_that_apptainer_would_replace() -> None:
    with pytest.raises(UserError, match="build argument"):
        render_definition(image(NGC), "{{ 1 }}")
