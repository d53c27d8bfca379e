"""Why a build failed: from what real pip says here, and from the builders' words."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurmddp.images.log import explain
from tests.wheels import wheel


def pip_says(folder: Path, wanted: str) -> list[str]:
    for name, version, *requires in (("torch", "2.13.0"), ("torch", "2.14.0"), ("lightfast", "1.0", "torch>=2.14")):
        wheel(folder, name, version, *requires)
    (folder / "pins").write_text("torch==2.13.0\n")
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--find-links", str(folder)]
    more = ["--constraint", str(folder / "pins"), "--target", str(folder / "out"), wanted]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment["PIP_CONFIG_FILE"] = os.devnull  # this machine's own constraints would be part of what pip says
    done = subprocess.run([*command, *more], capture_output=True, text=True, env=environment)
    assert done.returncode != 0
    return (done.stdout + done.stderr).splitlines()


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (
            "lightfast",
            "lightfast 1.0 depends on torch>=2.14, and the base keeps torch==2.13.0, which matches its CUDA",
        ),
        ("torch==2.14.0", "what was asked for is torch==2.14.0, and the base keeps torch==2.13.0, which matches"),
        pytest.param("nosuchthing", "no package nosuchthing for the image's Python", marks=pytest.mark.long),
        ("lightfast==9", "no package lightfast==9 for"),
    ],
)
def test_pip(tmp_path: Path, wanted: str, why: str) -> None:
    cause = explain(["+ python3 -m pip install", *pip_says(tmp_path, wanted), "FATAL:   exit status 1"])
    assert cause is not None and cause.why.startswith(why)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (  # pip of Debian 12
            "The conflict is caused by:\n    speech 1.0 depends on torch>=2\n    hasty 1.0 depends on torch<2.13\n"
            "    The user requested (constraint) torch==2.13.0\n\nTo fix this you could try to:",
            "speech 1.0 depends on torch>=2; hasty 1.0 depends on torch<2.13, and the base keeps torch==2.13.0, which",
        ),
        (  # uv 0.13
            "error: No solution found when resolving dependencies\n  cause: Because all versions of hasty depend on "
            "torch<2.13 and you require torch==2.13.0, we can conclude\n         that it is unsatisfiable.",
            "the packages conflict: Because all versions of hasty depend on torch<2.13 and you require",
        ),
        (  # uv 0.5
            "  \u00d7 No solution found when resolving dependencies:\n  \u2570\u2500\u25b6 Because hasty==1.0 depends "
            "on torch<2.13\n      and you require hasty, it is unsatisfiable.",
            "the packages conflict: Because hasty==1.0 depends on torch<2.13 and you require hasty, it",
        ),
        ("mksquashfs: write failed: No space left on device", "no disk space or quota left"),
        ("FATAL: While performing build: while creating SIF: write x: no space left on device", "no disk space"),
        ("ERROR: Failed to create user namespace: No space left on device", "this machine does not allow users"),
        ("unshare: unshare failed: No space left on device", "this machine does not allow users to build"),
        ("E: Version '9' for 'git' was not found", "the base's Debian or Ubuntu has no package git"),
        ("INFO:    Running testscript\ncurl: connection refused", "the image's own test failed"),
        ("FATAL: exec /bin/sh failed: exec format error", "the base is for another CPU architecture"),
        ("E: Unable to locate package gitt", "the base's Debian or Ubuntu has no package gitt"),
        ("++ as 7 me '' /bin/sh -c 'x'\n+ exec setpriv\n/bin/sh: cannot create /opt/a: Permission denied\n",
         "line 7: RUN as me may not do this: a build without root gives all files of the base to root"),
        ("slurmddp: torch was 2.7.0 in the base and is 2.13.0 now", "torch was 2.7.0 in the base and is 2.13.0 now"),
        ("FATAL: While performing build: unauthorized: authentication required", "the registry denies access"),
        ("reading manifest 1 in localhost:5000/x: manifest unknown", "the registry does not have this image"),
        ("dial tcp: lookup nvcr.io on 10.0.0.1:53: no such host", "the registry could not be reached"),
        ("WARNING: Retrying after connection broken by 'NewConnectionError(...)'\nERROR: No matching distribution found"
         " for einops", "the build could not reach the internet"),
        ("INFO:    Running testscript\nModuleNotFoundError: No module named 'torch'", "the image's own test failed"),
    ],
)  # fmt: skip
def test_other_words(said: str, why: str) -> None:
    cause = explain(said.splitlines())
    assert cause is not None and cause.why.startswith(why) and cause.todo


def test_what_is_not_known_is_not_explained() -> None:
    assert explain([]) is None
    assert explain(["+ as 7 me /bin/sh -c x", "+ : line 8: RUN", "+ /bin/sh -c y", "y: Permission denied"]) is None
    assert explain(["INFO:    Running testscript", "torch 2.7", "INFO:    Adding labels", "FATAL:   it rains"]) is None
