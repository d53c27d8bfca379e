"""Jobs of a script that loads the snapshot which it finds: in the folder of submission, or in a folder of their own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.helpers import Desk, Result

#: Stands for torchrun with one rank.
RANKS = f"""#!/bin/bash
if [[ "$*" != *slurmddp.runtime.begin* ]]; then echo True nothing 3.11 python; exit; fi
while [[ "$1" != slurmddp.runtime.begin ]]; do shift; done
shift
exec {sys.executable} "$@"
"""
#: As pytorch/examples' multigpu_torchrun.py: epochs go on behind those of a snapshot that is there.
SCRIPT = """\
import os, sys
begin = int(open("snapshot.pt").read()) if os.path.exists("snapshot.pt") else 0
print(f"begins at epoch {begin}, {sys.argv[1:]}")
open("snapshot.pt", "w").write(str(begin + 50))
"""


@pytest.fixture(autouse=True)
def ready(desk: Desk) -> None:
    desk.write("train.py", SCRIPT)
    desk.program("ranks", RANKS)


def run(desk: Desk, *options: str) -> Result:
    return desk.command("run", "train.py", "--site", "here", "--set", f"container.python={desk.bin}/ranks", *options)


def runs(desk: Desk) -> list[Path]:
    return sorted((desk.project / "runs").glob("*/"), key=lambda path: path.stat().st_mtime_ns)


def test_only_a_run_with_a_folder_of_its_own_begins_from_zero(desk: Desk) -> None:
    first = run(desk)
    assert first.code == 0 and "begins at epoch 0, []" in first.out, first
    assert f"in      {desk.project}\n" in first.err
    second = run(desk)
    assert "begins at epoch 50, []" in second.out, second
    third = run(desk, "--workdir", "run", "--", "--out={run}/out", "{}")
    (own,) = (path for path in runs(desk) if (path / "work").is_dir())
    assert f"begins at epoch 0, ['--out={own}/out', '{{}}']" in third.out, third
    assert f"in      {own}/work\n" in third.err
    assert (own / "work/snapshot.pt").read_text() == "50"
    assert (desk.project / "snapshot.pt").read_text() == "100"
    assert json.loads((own / "manifest.json").read_text())["workdir"] == f"{own}/work"
