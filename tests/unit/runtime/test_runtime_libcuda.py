"""Which libcuda a command gets, with files in place of the node's driver and of the image's libraries."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from slurmddp.runtime import libcuda
from tests.helpers import LM_JOB, ROOT, Desk

CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Sun May 12 19:39:15 UTC 2024\n"
    "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n"
)
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@U22)  Fri Apr 25\n"
TELL = """
import json, os, sys
print(json.dumps([os.getpid(), dict(os.environ), sys.argv[1:], sorted(os.listdir('/proc/self/fd'))]))
"""


@dataclass
class Seen:
    """What the command would get, and the line that was logged."""

    variables: dict[str, str]
    said: str

    @property
    def path(self) -> str | None:
        return self.variables.get("LD_LIBRARY_PATH")


@dataclass
class Node:
    """A node with a driver, and a container with the image's variables."""

    root: Path
    patch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]
    image: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for folder in ("proc", "bin"):
            (self.root / folder).mkdir()

    @property
    def compat(self) -> Path:
        return self.root / "image" / "compat"

    def driver(self, version: str, gpu: str = "NVIDIA A100-SXM4-40GB", text: str = CLOSED) -> None:
        (self.root / "proc" / "version").write_text(text.format(version))
        for bus in ("0000:07:00.0", "0000:0f:00.0"):
            card = self.root / "proc" / "gpus" / bus
            card.mkdir(parents=True, exist_ok=True)
            (card / "information").write_text(f"Model: \t\t {gpu}\nIRQ:   \t\t 18\nGPU UUID: \t GPU-1\n")

    def brings(self, cuda: str, driver: str, *, folder: str = "lib.real", **variables: str) -> None:
        """An image of that CUDA, with the compat libraries of that driver."""
        libraries = self.compat / folder
        libraries.mkdir(parents=True)
        (libraries / f"libcuda.so.{driver}").write_text("")
        (libraries / "libcuda.so.1").symlink_to(f"libcuda.so.{driver}")
        self.image = {"CUDA_VERSION": cuda, "_CUDA_COMPAT_PATH": str(self.compat), **variables}

    def program(self, name: str, text: str) -> None:
        path = self.root / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def environment(self) -> dict[str, str]:
        own = {"PATH": f"{self.root / 'bin'}:/usr/bin:/bin", "SLURMDDP_NVIDIA": str(self.root / "proc")}
        return own | self.image

    def run(self, quiet: str = "") -> Seen:
        started: list[dict[str, str]] = []

        def become(name: str, words: Sequence[str]) -> None:
            assert (name, words) == ("rank", ["rank", "--lr", "1"])
            started.append(dict(os.environ))

        with self.patch.context() as patch:
            for name in os.environ:
                patch.delenv(name)
            for name, text in self.environment().items():
                patch.setenv(name, text)
            patch.setattr(os, "execvp", become)
            patch.setattr(signal, "signal", lambda number, handler: None)
            libcuda.main(["node7", quiet, "rank", "--lr", "1"])
        out, err = self.capsys.readouterr()
        assert err == "" and out.count("\n") == (not quiet)
        return Seen(started[0], out.rstrip("\n"))


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Node:
    return Node(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("site", "options", "there"),
    [
        ("gpus", [], True),
        ("gpus", ["container.compat=false"], False),
        ("gpus", ["container.runtime=none"], False),
        ("cores", ["resources.ranks_per_node=2", "container.runtime=apptainer", "container.image=i.sif"], False),
    ],
)
def test_it_is_in_the_script_of_a_node_with_nvidia_gpus_and_a_container(
    desk: Desk, site: str, options: list[str], there: bool
) -> None:
    text = desk.scripts(LM_JOB.replace("gpus", site), *options)[1]
    assert (" compat=yes " in text) is there


def test_an_older_driver_of_another_major_gets_the_image_s_libraries(node: Node) -> None:
    node.driver("535.183.01")
    node.brings("13.0.1.012", "580.82.07", LD_LIBRARY_PATH="/image/lib:/.singularity.d/libs")
    seen = node.run()
    assert seen.path == f"{node.compat}/lib.real:/image/lib:/.singularity.d/libs"
    assert seen.said == (
        "slurmddp: node node7: NVIDIA driver 535.183.01, NVIDIA A100-SXM4-40GB; "
        "image: CUDA 13.0.1.012, driver 580.82.07; "
        "forward compatibility (the driver is older than 580), which data-center GPUs have; "
        f"compat libraries on ({node.compat}/lib.real)"
    )


WORDS = [sys.executable, "-m", "slurmddp.runtime.libcuda", "node7", ""]


def test_no_process_and_no_descriptor_of_it_stays_and_arguments_arrive_as_they_are(node: Node) -> None:
    argument = 'it\'s $HOME `id` "*"\n\\n {a,b}; exit 3'
    node.driver("535.183.01")
    node.brings("13.0.1", "580.82.07")
    environment = node.environment() | {"PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"}
    seen = []
    for before in ([], WORDS):
        process = subprocess.Popen(
            [*before, sys.executable, "-c", TELL, argument], env=environment, stdout=subprocess.PIPE, text=True
        )
        pid, *told = json.loads(process.communicate(timeout=60)[0].splitlines()[-1])
        assert pid == process.pid
        seen.append(told)
    (variables, arguments, descriptors), through = seen
    assert arguments == [argument]
    assert through == [variables | {"LD_LIBRARY_PATH": f"{node.compat}/lib.real"}, arguments, descriptors]


def test_a_command_is_ended_by_a_broken_pipe_as_without_it(node: Node) -> None:
    environment = node.environment() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*WORDS, "sh", "-c", "kill -PIPE $$"], env=environment, stdout=subprocess.DEVNULL, check=False
    )
    assert done.returncode == -signal.SIGPIPE


def test_a_command_that_is_not_there_is_named(node: Node) -> None:
    environment = node.environment() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*WORDS, "ranks"], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        127,
        "slurmddp: node node7: cannot start ranks: No such file or directory\n",
    )


def test_beside_the_ranks_it_says_nothing(node: Node) -> None:
    node.driver("535.183.01")
    node.brings("13.0.1", "580.82.07")
    seen = node.run(quiet="yes")
    assert (seen.path, seen.said) == (f"{node.compat}/lib.real", "")


@pytest.mark.parametrize("driver", ["580.82.07", "580.82.08", "580.105.08", "595.45.04", "1000.1"])
def test_a_driver_that_is_not_older_never_gets_them(node: Node, driver: str) -> None:
    """CUDA error 803: also where the image itself has them in its path."""
    node.driver(driver)
    node.brings("13.0.1", "580.82.07", LD_LIBRARY_PATH=f"/a b:{node.compat}/lib.real:{node.compat}/lib:/*")
    seen = node.run()
    assert seen.path == f"/a b:{node.compat}/lib:/*"
    assert f"; native; compat libraries off ({node.compat}/lib.real)" in seen.said


@pytest.mark.parametrize("path", ["", "/a::/b:", ":/a b:*", None])
def test_a_path_without_them_stays_as_it_is(node: Node, path: str | None) -> None:
    node.driver("580.82.07")
    node.brings("13.0.1", "580.82.07", **({} if path is None else {"LD_LIBRARY_PATH": path}))
    assert node.run().path == path


@pytest.mark.parametrize(
    ("driver", "cuda", "own", "on"),
    [
        ("580.0", "13.2.0", "595.45.04", False),
        ("580.65.06", "13.2.0", "595.45.04", False),
        ("579.99.99", "13.2.0", "595.45.04", True),
        ("525.60.13", "12.9.0", "575.51.02", False),
        ("525.60.9", "12.9.0", "575.51.02", True),
        ("525.60.09", "12.9.0", "575.51.02", True),
        ("450.80.02", "11.8.0", "520.61.03", False),
        ("450.80", "11.8.0", "520.61.03", True),
    ],
)
def test_within_a_major_release_they_stay_off(node: Node, driver: str, cuda: str, own: str, on: bool) -> None:
    node.driver(driver)
    node.brings(cuda, own, LD_LIBRARY_PATH="/image/lib")
    seen = node.run()
    assert seen.path == (f"{node.compat}/lib.real:/image/lib" if on else "/image/lib")
    assert ("minor-version compatibility" in seen.said) is not on


def test_they_may_lie_in_the_folder_itself(node: Node) -> None:
    """As in NVIDIA's CUDA base images, and in those of the package cuda-compat."""
    node.driver("535.183.01")
    node.brings("13.0.1", "580.82.07", folder=".")
    assert node.run().path == str(node.compat)


@pytest.mark.parametrize("gpu", ["NVIDIA GeForce RTX 3090", "NVIDIA TITAN RTX"])
def test_a_consumer_s_gpu_does_not_get_them(node: Node, gpu: str) -> None:
    node.driver("535.183.01", gpu)
    node.brings("13.0.1", "580.82.07")
    seen = node.run()
    assert seen.path is None
    assert f"impossible: forward compatibility is not for {gpu}; compat libraries off" in seen.said


def test_without_them_it_is_impossible_and_that_is_said(node: Node) -> None:
    node.driver("535.183.01")
    node.image = {"CUDA_VERSION": "13.0.1", "_CUDA_COMPAT_PATH": str(node.compat), "CUDA_DRIVER_VERSION": "580.82.07"}
    seen = node.run()
    assert seen.path is None
    assert "impossible: CUDA 13.x needs driver 580 or newer; compat libraries none in the image" in seen.said


@pytest.mark.parametrize(("says", "on"), [("CUDA Driver OK", True), ("CUDA Driver UNAVAILABLE", False), ("", False)])
@pytest.mark.parametrize("cuda", ["13.0.1", "14.1.0", ""])
def test_the_image_s_own_check_decides(node: Node, says: str, on: bool, cuda: str) -> None:
    """Also for a CUDA of which we know no least driver. It runs with the compat libraries in front."""
    node.driver("535.183.01")
    node.brings(cuda, "580.82.07", LD_LIBRARY_PATH="/image/lib")
    wanted = f"{node.compat}/lib.real:/image/lib"
    node.program("cudaCheck", f'[ "$LD_LIBRARY_PATH" != "{wanted}" ] || echo "{says}"')
    seen = node.run()
    assert seen.path == (wanted if on else "/image/lib")
    verdict = "forward compatibility, by the image's own check; compat libraries on" if on else f"check says '{says}'"
    assert verdict in seen.said


def test_the_check_is_not_asked_where_nothing_is_to_decide(node: Node) -> None:
    node.driver("580.65.06")
    node.brings("13.2.0", "595.45.04")
    node.program("cudaCheck", f"touch {node.root}/asked; echo CUDA Driver OK")
    node.run()
    assert not (node.root / "asked").exists()


@pytest.mark.parametrize("cuda", ["14.1.0", "", "10.2.89", "what"])
def test_an_unknown_cuda_changes_nothing(node: Node, cuda: str) -> None:
    node.driver("535.183.01")
    node.brings(cuda, "700.10.01", LD_LIBRARY_PATH="/image/lib")
    seen = node.run()
    assert seen.path == "/image/lib"
    assert "; unknown; compat libraries left as the image has them" in seen.said


def test_an_image_that_says_nothing_is_left_alone(node: Node) -> None:
    node.driver("535.183.01")
    node.image = {"_CUDA_COMPAT_PATH": str(node.compat)}
    seen = node.run()
    assert seen.path is None
    assert "image: CUDA ?, driver ?; unknown; compat libraries none in the image" in seen.said


@pytest.mark.parametrize("text", [CLOSED, OPEN, OPEN.replace("x86_64", "aarch64")])
@pytest.mark.parametrize("version", ["535.183.01", "418.67"])
def test_the_driver_is_read_from_its_file(node: Node, text: str, version: str) -> None:
    node.driver(version, text=text)
    assert f"NVIDIA driver {version}, NVIDIA A100" in node.run().said


SMI = '[ "$*" = "--query-gpu=driver_version,name --format=csv,noheader" ] || exit 9'


def test_else_by_nvidia_smi(node: Node) -> None:
    node.program("nvidia-smi", f"{SMI}\necho '570.86.10, NVIDIA H100 80GB HBM3'\necho '570.86.10, NVIDIA H100'")
    node.brings("12.9.0", "575.51.02")
    assert "NVIDIA driver 570.86.10, NVIDIA H100 80GB HBM3; image" in node.run().said


@pytest.mark.parametrize("smi", ['echo "NVIDIA-SMI has failed because it couldn\'t communicate"; exit 9', "exit 1", ""])
@pytest.mark.parametrize("version", ["", "NVRM version: what\n"])
def test_an_unknown_driver_changes_nothing(node: Node, smi: str, version: str) -> None:
    if smi:
        node.program("nvidia-smi", smi)
    if version:
        (node.root / "proc" / "version").write_text(version)
    node.brings("13.0.1", "580.82.07", LD_LIBRARY_PATH=f"{node.compat}/lib.real")
    seen = node.run()
    assert seen.path == f"{node.compat}/lib.real"
    assert "NVIDIA driver ?, GPU ?; image: CUDA 13.0.1, driver 580.82.07; the driver is unknown;" in seen.said
