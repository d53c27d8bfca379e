"""Jobs of a script that loads the snapshot which it finds: in the folder of submission, or in a folder of their own."""

from __future__ import annotations

import json
import os
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
    (run_a,) = (path for path in runs(desk) if path.name in second.err.split(" changed in ")[0])
    warning = f"warning: snapshot.pt (run {run_a.name}) changed in {desk.project} while an earlier run ran there: "
    assert warning in second.err and "changed in" not in first.err
    status = desk.command("status", "last")
    assert f"changed while this run ran, and before it while others did: snapshot.pt (run {run_a.name})" in (
        status.out + status.err
    ), status
    told = f"before it while others did: snapshot.pt (run {run_a.name})"
    assert told in desk.command("doctor", "last").out
    report = desk.command("report", "last", "-o", "page.html")
    assert report.code == 0 and told in (desk.project / "page.html").read_text(), report
    third = run(desk, "--workdir", "run", "--", "--out={run}/out", "{}")
    (own,) = (path for path in runs(desk) if (path / "work").is_dir())
    assert f"begins at epoch 0, ['--out={own}/out', '{{}}']" in third.out, third
    assert f"in      {own}/work\n" in third.err
    assert (own / "work/snapshot.pt").read_text() == "50"
    assert (desk.project / "snapshot.pt").read_text() == "100"
    assert json.loads((own / "manifest.json").read_text())["workdir"] == f"{own}/work"


def test_rerun_warns_of_what_its_run_wrote_and_can_run_elsewhere(desk: Desk) -> None:
    run(desk)
    (first,) = runs(desk)
    desk.write("notes.md", "edited since")
    desk.write("older.pt", "")
    os.utime(desk.project / "older.pt", (1e9, 1e9))
    again = desk.command("rerun", first.name, "--json")
    assert again.code == 0, again
    text = again.err.split(" changed in ")[0]
    assert text.endswith(f"warning: snapshot.pt (run {first.name})"), again
    own = desk.command("rerun", first.name, "--workdir", "run", "--json")
    assert own.code == 0 and "changed in" not in own.err, own
    facts = json.loads((Path(json.loads(own.out)["run_folder"]) / "manifest.json").read_text())
    assert facts["workdir"].endswith("/work") and facts["files_before"] == {}
