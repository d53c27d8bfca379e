"""Reading and writing what others read meanwhile."""

import os
from pathlib import Path

import pytest

from slurmddp.shared.checkpoint import layout
from slurmddp.shared.files import open_plain, write_whole


def test_a_file_is_there_whole_and_alone(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "first")
    write_whole(tmp_path / "a", os.fsdecode(b"\xff\n"))
    assert (tmp_path / "a").read_bytes() == b"\xff\n"
    assert os.listdir(tmp_path) == ["a"]


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    """Whoever opened it plainly would wait for a writer for ever."""
    os.mkfifo(tmp_path / "pipe")
    for read in (open_plain, layout.facts):
        with pytest.raises(OSError, match="not a regular file"):
            read(tmp_path / "pipe")
