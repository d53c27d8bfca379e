"""What .slurmddpignore leaves out of the copy of a project; git itself is the judge of its syntax."""

import subprocess
from pathlib import Path

import pytest

from slurmddp.errors import UserError
from slurmddp.run.survey import survey

FILES = [
    "train.py",
    "a.log",
    "deep/b.log",
    "data/x.bin",
    "data/keep.csv",
    "deep/data/y.bin",
    "out/run1/c.txt",
    "out/run1/d.txt",
    "docs/e.md",
    "docs/img/f.png",
    "deep/docs/g.md",
    "x1.tmp",
    "x2.tmp",
    "xa.tmp",
    "notes#1",
    "#hash",
    "a/b/c/z.bin",
    "a/z.bin",
    "cache/h/i.py",
]
PATTERNS = {
    "names": "*.log\n",
    "anchored": "/data\n",
    "anywhere": "data\n",
    "folders": "data/\ndocs/\n",
    "one path": "docs/img\n",
    "exception": "*.md\n!e.md\n",
    "no exception below a folder": "data\n!data/keep.csv\n",
    "classes": "x[!0-9].tmp\nx[2-3].tmp\n",
    "stars": "a/**/z.bin\n",
    "leading stars": "**/img\n",
    "trailing stars": "out/**\n",
    "stars in a name": "d**s\n",
    "question mark": "x?.tmp\n",
    "comments and spaces": "# *.py\n\n\\#hash\n*.tmp   \n",
    "contents of a folder": "data/*\n!data/keep.csv\n",
}


@pytest.mark.parametrize("name", PATTERNS)
def test_as_git_reads_it(tmp_path: Path, name: str) -> None:
    plain, judged = tmp_path / "plain", tmp_path / "judged"
    for root, file in ((plain, ".slurmddpignore"), (judged, ".gitignore")):
        for path in FILES:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text("x\n")
        (root / file).write_text(PATTERNS[name])
    subprocess.run(["git", "init", "-q"], cwd=judged, check=True)
    command = ["git", "ls-files", "-o", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=judged, check=True, capture_output=True, text=True).stdout
    kept = {path for path in listed.split("\0") if path} - {".gitignore"}
    assert kept < set(FILES), "the pattern matches something"
    assert {item.relative for item in survey(plain).items} - {".slurmddpignore"} == kept


def test_files_that_git_tracks_are_left_out_too(tmp_path: Path) -> None:
    (tmp_path / "big.bin").write_text("x")
    (tmp_path / "train.py").write_text("x")
    (tmp_path / ".slurmddpignore").write_text("big.bin\n")
    (tmp_path / ".gitignore").write_text("data\n*.pyc\n")
    (tmp_path / "a.pyc").touch()
    for number in range(3):  # of a folder that is ignored as a whole, nobody counts the files
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / f"data/{number}").touch()
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    found = survey(tmp_path)
    assert [item.relative for item in found.items] == [".gitignore", ".slurmddpignore", "train.py"]
    without = "; left out: 2 that git ignores, 1 by .slurmddpignore"
    assert found.summary() == f"3 files, {found.size} B of {tmp_path}{without}"


def test_a_broken_pattern_is_named(tmp_path: Path) -> None:
    (tmp_path / ".slurmddpignore").write_text("*.log\nx[1\n")
    with pytest.raises(UserError, match=r"x\[1.* is broken") as error:
        survey(tmp_path)
    assert str(error.value.where).endswith(".slurmddpignore:2")


def test_what_is_left_out_is_counted_by_reason(tmp_path: Path) -> None:
    (tmp_path / ".slurmddpignore").write_text("data\n*.log\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "runs").mkdir()
    for name in ("train.py", "a.log", "b.log", "x.sif", ".npmrc", "data/1", "runs/1"):
        (tmp_path / name).touch()
    said = survey(tmp_path, exclude=[tmp_path / "runs"]).summary()
    expected = {"3 by .slurmddpignore", "1 as credentials", "1 as container images", "1 as runs or caches"}
    assert set(said.partition("; left out: ")[2].split(", ")) == expected
