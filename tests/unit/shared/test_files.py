"""Reading and writing what others read meanwhile."""

import os
from pathlib import Path

import pytest

from slurmddp.commands.terminal import write_new
from slurmddp.shared.checkpoint import layout
from slurmddp.shared.files import open_plain, write_whole


def test_a_file_is_there_whole_and_alone(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "first")
    write_whole(tmp_path / "a", os.fsdecode(b"\xff\n"))
    assert (tmp_path / "a").read_bytes() == b"\xff\n"
    assert os.listdir(tmp_path) == ["a"]


def test_no_link_of_somebody_else_is_followed(tmp_path: Path) -> None:
    """Neither one of the file's name, nor one of a temporary name that could be guessed."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folder = tmp_path / "folder"
    folder.mkdir()
    names = ("a", "b", f"a.part-{os.getpid()}", f"b.part-{os.getpid()}")
    for name in names:
        (folder / name).symlink_to(victim)
    write_whole(folder / "a", "new")
    write_new(folder / "b", "new", force=True)
    assert victim.read_text() == "mine"
    assert [(folder / name).is_symlink() for name in names] == [False, False, True, True]
    assert (folder / "b").read_text() == "new"


def test_a_file_is_writable_by_its_owner_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        write_whole(tmp_path / "a", "")
    finally:
        os.umask(old)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    """Whoever opened it plainly would wait for a writer for ever."""
    os.mkfifo(tmp_path / "pipe")
    for read in (open_plain, layout.facts):
        with pytest.raises(OSError, match="not a regular file"):
            read(tmp_path / "pipe")
