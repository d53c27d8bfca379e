"""launch/readonly.py: a command behind it writes in its own folders only, whatever it is written in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

PROGRAM = ROOT / "slurmddp/launch/readonly.py"
SCRIPT = """
cd "$1" || exit 9
echo changed >file; rm file; rm -r folder; echo new >more; mv file other; truncate -s 0 file
python3 -c 'import shutil; shutil.rmtree("folder")'
python3 -c 'import sqlite3; sqlite3.connect("file").execute("create table a (b)")'
echo own >"$2/own" && cat "$2/own"
echo temporary >/tmp/slurmddp-readonly && cat /tmp/slurmddp-readonly "$TMPDIR/slurmddp-readonly"
echo >/dev/null && touch /dev/shm/slurmddp-readonly && rm /dev/shm/slurmddp-readonly && echo devices
exit 7
"""


def behind(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    (folder / "own").mkdir()
    words = [sys.executable, "-I", "-S", str(PROGRAM), str(folder / "own"), str(folder / "own/tmp"), "--", *command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode == 97:
        pytest.skip(f"this machine: {done.stderr}")
    return done


def test_it_writes_in_its_own_folders_only(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    (theirs / "folder").mkdir(parents=True)
    for name in ("file", "folder/file"):
        (theirs / name).write_text("precious")
    done = behind(tmp_path, "bash", "-c", SCRIPT, "bash", str(theirs), str(tmp_path / "own"))
    assert (done.returncode, done.stdout) == (7, "own\ntemporary\ntemporary\ndevices\n"), done.stderr
    left = {str(path.relative_to(theirs)): path.read_text() for path in theirs.rglob("*") if path.is_file()}
    assert left == {"file": "precious", "folder/file": "precious"}
    assert not Path("/tmp/slurmddp-readonly").exists()
    assert (tmp_path / "own/tmp/slurmddp-readonly").read_text() == "temporary\n"


def test_what_was_there_before_is_seen_in_tmp(tmp_path: Path) -> None:
    (tmp_path / "seen").write_text("seen")
    done = behind(tmp_path, "cat", str(tmp_path / "seen"))
    assert (done.returncode, done.stdout) == (0, "seen"), done.stderr
