"""What node.sh refuses to start ranks with, by the Pythons that a node may have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from slurmddp.records.refusal import Refusal, read
from tests.helpers import ROOT

OLD = sorted(Path.home().glob(".pyenv/versions/3.6.*/bin/python"))
START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from slurmddp.supervisor.__main__ import main; main()"


class Answer(NamedTuple):
    code: int
    said: str
    refusal: Refusal | None


class Node:
    def __init__(self, root: Path, python: str) -> None:
        self.root, self.python = root, python
        (root / "bin").mkdir()

    def check(self, *words: str) -> Answer:
        environment = {
            "PATH": f"{self.root / 'bin'}:/usr/bin:/bin", "SLURMDDP_NODE": "node7", "SLURMDDP_LOGS": str(self.root),
        }  # fmt: skip
        command = [self.python, "-c", START, str(ROOT), *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        told = self.root / "preflight" / "node7.failed"
        refusal = read(told.read_text()) if told.exists() else None
        assert done.stderr == (f"slurmddp: node node7: {refusal.text}\n" if refusal else "")
        return Answer(done.returncode, done.stdout, refusal)

    def program(self, name: str, text: str) -> None:
        path = self.root / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)


@pytest.fixture(params=[pytest.param(sys.executable, id="new"), pytest.param(OLD[-1:], id="3.6")])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Node:
    if not request.param:
        pytest.skip("no Python 3.6 here")
    return Node(tmp_path, request.param if isinstance(request.param, str) else str(request.param[0]))


def test_images_are_told_apart_by_their_size_head_and_tail(node: Node) -> None:
    image = node.root / "image.sif"
    said = []
    for place in (None, 0, (3 << 20) - 1, 3 << 19):
        content = bytearray(3 << 20)
        if place is not None:
            content[place] = 1
        image.write_bytes(content)
        said.append(node.check("mounts", "yes", str(image)).said)
    assert said[0].startswith("3145728 bytes, checksum ") and said[0] == said[3]
    assert len({*said}) == 3


def test_an_image_that_is_a_folder_is_known_by_its_labels(node: Node) -> None:
    labels = node.root / "image" / ".singularity.d" / "labels.json"
    labels.parent.mkdir(parents=True)
    labels.write_text("{}")
    assert node.check("mounts", "yes", str(node.root / "image")).said.startswith("2 bytes, checksum ")


def test_an_image_that_is_not_there_is_refused(node: Node) -> None:
    says = "cannot read the image /no/image.sif: No such file or directory"
    assert node.check("mounts", "yes", "/no/image.sif") == Answer(1, "", Refusal(says))


def test_without_an_image_there_is_nothing_to_say(node: Node) -> None:
    assert node.check("mounts", "yes", "", "--bind", "/usr:/host:ro") == Answer(0, "\n", None)


INSTALL = "install it in the image, or correct container.python"
PYTHONS = {
    "good": ("echo a warning >&2; echo True nothing 3.12 /opt/python", None),
    "old": (
        "echo False torch 3.9 /opt/my python",
        Refusal("container.python: /opt/my python is Python 3.9; the ranks need 3.10 or newer", "user"),
    ),
    "bare": ("echo True torch 3.12 /opt/python", Refusal(f"no torch in /opt/python: {INSTALL}", "user")),
    "lone": ("echo True accelerate 3.12 /opt/python", Refusal(f"no accelerate in /opt/python: {INSTALL}", "user")),
    "broken": (
        "echo Trouble >&2; echo libpython: no such file >&2; exit 127",
        Refusal("container.python: broken does not work: libpython: no such file", "user"),
    ),
}


@pytest.mark.parametrize("name", PYTHONS)
def test_a_python_that_cannot_run_the_ranks_is_refused(node: Node, name: str) -> None:
    text, refusal = PYTHONS[name]
    node.program(name, text)
    (node.root / "accelerate.yaml").touch()
    found = node.check("python", "yes", "apptainer", name, "PYTHONPATH=/own", str(node.root), "env")
    assert found == Answer(int(refusal is not None), "" if refusal else "\n", refusal)


def test_accelerate_is_asked_for_only_where_the_job_uses_it(node: Node) -> None:
    node.program("asked", f'shift 2; echo "$PYTHONPATH $*" >{node.root}/words; echo True nothing 3.12 /opt/python')
    node.check("python", "yes", "none", "asked", "PYTHONPATH=/own", str(node.root))
    assert (node.root / "words").read_text() == "/own torch\n"


@pytest.mark.parametrize(
    ("runtime", "where"),
    [("apptainer", "in the image: correct it"), ("none", "on this node: correct it, or load or activate it in setup")],
)
def test_a_python_that_is_not_there_is_named(node: Node, runtime: str, where: str) -> None:
    container = [] if runtime == "none" else ["env"]
    found = node.check("python", "yes", runtime, "python9", "PYTHONPATH=/own", str(node.root), *container)
    assert found.refusal == Refusal(f"container.python: there is no python9 {where}", "user")


def test_a_container_that_does_not_start_is_not_the_user_s_python(node: Node) -> None:
    node.program("apptainer", "echo FATAL: no namespaces >&2; exit 255")
    container = [os.path.join(node.root, "bin", "apptainer"), "exec"]
    found = node.check("python", "yes", "apptainer", "python3", "PYTHONPATH=/own", str(node.root), *container)
    assert found.refusal == Refusal("cannot start python3: FATAL: no namespaces")
