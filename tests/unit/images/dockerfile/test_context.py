"""Where COPY takes files from, and that they arrive as they were."""

import os
import stat
from pathlib import Path

import pytest

from slurmddp.errors import UserError
from slurmddp.images.context.staging import FOLDER, Item, gathered
from slurmddp.images.dockerfile import convert

from .conftest import Dock, cut


def test_the_context_is_another_folder(dock: Dock) -> None:
    dock.files(**{"src/a": "A", "docker/gpu/Dockerfile": "FROM debian:12\nCOPY src ../../src/a /x/\n"})
    path = dock.context / "docker/gpu/Dockerfile"
    with pytest.raises(UserError) as caught:
        convert(path)
    assert f"'src' is not in {path.parent}" in str(caught.value)
    assert f"-> it is in {dock.context}: --context {dock.context}" in str(caught.value)
    made = convert(path, context=dock.context)
    assert made.sources == (dock.context / "src", dock.context / "src/a")


def test_the_dockerignore_is_the_context_s_and_the_dockerfile_s_own_precedes_it(dock: Dock) -> None:
    dock.files(**{"a": "", "b": "", ".dockerignore": "a", "docker/.dockerignore": "b"})
    path = dock.file("docker/Dockerfile", "FROM debian:12\nCOPY ? /x/\n")
    assert convert(path, context=dock.context).sources == (dock.context / "b",)
    dock.file("docker/Dockerfile.dockerignore", "b")
    assert convert(path, context=dock.context).sources == (dock.context / "a",)


def test_a_pattern_that_nothing_matches_copies_nothing(dock: Dock) -> None:
    dock.file("a")
    made = dock.convert("FROM debian:12\nCOPY a none* /x/\nCOPY none* /y/\n")
    assert made.sources == (dock.context / "a",)
    (part,) = cut(made.definition)
    assert "/y/" not in part.sections["%post"] and dock.post(part).returncode == 0


def test_parents_and_exclude(dock: Dock) -> None:
    dock.files(**{"a/b/c.txt": "C", "a/b/d.md": "D", "a/e": "E", "x/y/z": "Z", "x/y/w": "W"})
    (dock.context / "a/b").chmod(0o750)
    made = dock.convert(
        "FROM debian:12\nCOPY --parents a/b/c.txt a/e @/one/\nCOPY --parents x/./y @/two/\n"
        "COPY --exclude=b/*.md --exclude=e a @/three\nCOPY --exclude=w x/y/* @/four/\n"
    )
    (part,) = cut(made.definition)
    done = dock.post(part)
    assert done.returncode == 0, done.stderr
    found = sorted(str(path.relative_to(dock.root)) for path in dock.root.rglob("*") if path.is_file())
    assert found == ["four/z", "one/a/b/c.txt", "one/a/e", "three/b/c.txt", "two/y/w", "two/y/z"]
    assert stat.S_IMODE((dock.root / "one/a/b").stat().st_mode) == 0o750


def test_files_keep_times_modes_and_links(dock: Dock) -> None:
    dock.files(**{"d/a": "A", "d/sub/%weird {{ x }}": "W", "d/shut/s": "S", "one": "1"})
    os.link(dock.context / "d/a", dock.context / "d/b")
    (dock.context / "d/link").symlink_to("/etc/passwd")
    (dock.context / "d/sub").chmod(0o750)
    (dock.context / "d/shut").chmod(0o555)
    for name in ("d/a", "d/sub", "d", "one"):
        os.utime(dock.context / name, (1e9, 1e9))
    (dock.root / "old").symlink_to("kept")
    (dock.root / "kept").write_text("kept")
    (dock.root / "there").mkdir(mode=0o700)
    made = dock.convert("FROM debian:12\nCOPY d @/new\nCOPY d @/there\nCOPY one @/old\nCOPY one @/one\n")
    (part,) = cut(made.definition)
    done = dock.post(part)
    assert done.returncode == 0, done.stderr
    new = dock.root / "new"
    assert {(new / name).stat().st_mtime for name in ("a", "sub", ".")} == {1e9}
    assert (new / "a").stat().st_ino == (new / "b").stat().st_ino != (dock.context / "d/a").stat().st_ino
    assert os.readlink(new / "link") == "/etc/passwd" and (new / "sub/%weird {{ x }}").read_text() == "W"
    assert [stat.S_IMODE((dock.root / name).stat().st_mode) for name in ("new", "new/sub", "there")] == [
        0o755, 0o750, 0o700,
    ]  # fmt: skip
    assert (dock.root / "kept").read_text() == "1" and (dock.root / "old").is_symlink()
    assert (dock.root / "one").stat().st_nlink == 1


def test_what_is_gathered_goes_again(tmp_path: Path) -> None:
    shut = tmp_path / "context/shut"
    shut.mkdir(parents=True)
    (shut / "a").write_text("A")
    (shut / "out").symlink_to(tmp_path)
    shut.chmod(0o500)
    with gathered([Item("files/1/from", tmp_path / "context", whole=False), Item("files/1/from/x", shut)], tmp_path):
        assert (tmp_path / FOLDER / "1/from/x/a").read_text() == "A"
        assert stat.S_IMODE((tmp_path / FOLDER / "1/from/x").stat().st_mode) == 0o500
    assert os.listdir(tmp_path) == ["context"] and stat.S_IMODE(shut.stat().st_mode) == 0o500
    with (
        pytest.raises(UserError, match=r"cannot copy .*none for the build"),
        gathered([Item("files/1/x", tmp_path / "none")], tmp_path),
    ):
        pass
    assert os.listdir(tmp_path) == ["context"]


def test_the_folder_itself_is_not_gathered(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("A")
    drafts = tmp_path / "below/.image.sif.abcd.part"
    drafts.mkdir(parents=True)
    (tmp_path / "below/.image.sif.building").touch()
    with gathered([Item("files/1/from", tmp_path)], drafts):
        found = [path.name for path in (drafts / FOLDER / "1/from").rglob("*")]
    assert sorted(found) == ["a", "below"]
