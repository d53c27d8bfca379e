"""A folder of images that two users share: what bob lays there, alice's commands neither trust nor remove nor wait for.

alice is the user of these tests. bob is another one: what is "his" is given to him.
"""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurmddp.commands.image import as_dict, details, table
from slurmddp.errors import UserError
from slurmddp.images.build_lock import holder, is_held, only_build
from slurmddp.images.inventory import held, on_shelf, removable, remove, shelved
from slurmddp.images.make import Rules
from slurmddp.images.provenance import lock_path, lock_text, read_lock
from slurmddp.images.workspace import RECORD, make_folders, workspace

from .conftest import GOOD_BUILD, Apptainer
from .test_build import make
from .test_unchanged import build, builds

BOB = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="giving files to another user takes root")
pytestmark = as_root


def put(path: Path, age: int = 0, owner: int = -1, **lock: object) -> Path:
    """An image with its lock, so many seconds old."""
    path.write_bytes(b"x" * 64)
    os.utime(path, (1_800_000_000 - age,) * 2)
    state = path.stat()
    lock_path(path).write_text(lock_text({"bytes": state.st_size, "mtime": state.st_mtime, "recipe": "ngc", **lock}))
    for each in (path, lock_path(path)):
        os.chown(each, owner, -1)
    return path


def give(path: Path) -> None:
    os.chown(path, BOB, BOB, follow_symlinks=False)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def names(folder: Path, keep: int = 1) -> list[str]:
    return [path.name for item in removable(folder, keep, []) for path in item.paths]


def test_his_newer_images_and_links_do_not_count_against_hers(shared: Path) -> None:
    put(shared / "hers.sif", age=100)
    put(shared / "his.sif", owner=BOB)
    (shared / "latest.sif").symlink_to("hers.sif")
    assert names(shared) == []
    put(shared / "older.sif", age=200)
    assert names(shared) == ["older.sif", "older.sif.lock.json"]
    assert all("his" not in name for name in names(shared, keep=0))


def test_what_he_lays_beside_her_image_stays(shared: Path) -> None:
    put(shared / "hers.sif")
    (shared / "hers.sif.def").write_text("his")
    give(shared / "hers.sif.def")
    assert names(shared, keep=0) == ["hers.sif", "hers.sif.lock.json"]


@pytest.mark.parametrize("kind", ["dangling", "loop", "pipe", "folder", "link to a device"])
def test_what_is_no_image_stops_neither_list_nor_gc(shared: Path, kind: str) -> None:
    put(shared / "hers.sif")
    trap = shared / "trap.sif"
    if kind == "pipe":
        os.mkfifo(trap)
    elif kind == "folder":
        trap.mkdir()
    else:
        trap.symlink_to({"dangling": "gone", "loop": "trap.sif", "link to a device": "/dev/zero"}[kind])
    give(trap)
    assert [(image.path.name, image.state) for image in on_shelf(shared)] == [
        ("hers.sif", "whole"), ("trap.sif", "unreadable"),
    ]  # fmt: skip
    assert "trap.sif" in table(on_shelf(shared)) and names(shared) == []
    with pytest.raises(UserError, match="cannot read the image"):
        shelved(trap)


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero"])
def test_a_lock_file_that_never_ends_is_none(shared: Path, kind: str) -> None:
    image = put(shared / "hers.sif")
    lock_path(image).unlink()
    if kind == "pipe":
        os.mkfifo(lock_path(image))
    else:
        lock_path(image).symlink_to(kind)
    give(lock_path(image))
    code = (
        "from slurmddp.images.provenance import read_lock\n"
        f"from pathlib import Path\nprint(read_lock(Path({str(image)!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "None\n", done.stderr


def test_his_lock_for_her_image_is_none(shared: Path) -> None:
    image = put(shared / "hers.sif")
    assert read_lock(image) is not None
    give(lock_path(image))
    assert read_lock(image) is None and shelved(image).state == "changed"
    give(image)  # his own lock for his own image
    assert read_lock(image) is not None


WRONG: tuple[dict[str, object], ...] = (
    {"registry": "x"}, {"registry": {"cuda": {"a": 1}}}, {"registry": [1]}, {"inputs": [1]}, {"inputs": {"files": 1}},
    {"builder": "x"}, {"digests": 3}, {"recipe": {"a": 1}}, {"base": [1]}, {"torch": {}}, {"packages": {"a": 1}},
    {"mtime": float("inf")}, {"mtime": float("nan")}, {"mtime": 10**400}, {"mtime": True}, {"bytes": "64"},
)  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=[str(list(wrong)) + str(index) for index, wrong in enumerate(WRONG)])
def test_a_lock_with_other_types_is_no_traceback(shared: Path, wrong: dict[str, Any]) -> None:
    image = shelved(put(shared / "his.sif", owner=BOB, **wrong))
    assert details(image, "535.183.01", "h100") and table([image]) and json.dumps(as_dict(image))
    assert not names(shared, keep=0)


def draft(folder: Path, name: str, temporary: Path) -> Path:
    path = folder / name
    path.mkdir(mode=0o700)
    temporary.mkdir(parents=True)
    (temporary / "file").touch()
    (path / RECORD).symlink_to(temporary)
    return path


def test_no_link_leads_from_a_dead_build_to_a_running_one(shared: Path, tmp_path: Path) -> None:
    draft(shared, ".x.sif.01234567.part", tmp_path / "slurmddp-x")
    trap = shared / ".y.sif.01234567.part"
    trap.symlink_to(".x.sif.01234567.part")
    give(trap)
    with only_build(shared / "x.sif", [].append):
        assert removable(shared, 1, []) == []
    assert removable(shared, 1, [])[0].paths == (shared / ".x.sif.01234567.part", tmp_path / "slurmddp-x")


def test_his_drafts_are_his(shared: Path, tmp_path: Path) -> None:
    path = draft(shared, ".x.sif.01234567.part", tmp_path / "slurmddp-x")
    give(path)
    (shared / ".y.sif.01234567.job").touch()
    give(shared / ".y.sif.01234567.job")
    assert removable(shared, 0, []) == []


def test_a_running_build_is_known_whatever_he_calls_its_folder(
    apptainer: Apptainer, base: Path, tmp_path: Path
) -> None:
    """In a folder of a group that is not sticky, bob can rename it, and remove the lock beside it."""
    out = tmp_path / "out"
    apptainer.builds(
        f'cd {out}; rm .image.sif.building; d=$(echo .image.sif.*.part); cp -a . ../seen; mv "$d" ".y${{d#.image}}"; '
        f"PYTHONPATH={Path(__file__).parents[3]} {sys.executable} -c 'if 1:\n"
        "  from pathlib import Path\n  from slurmddp.images.inventory import removable\n"
        f'  print("found", removable(Path("{out}"), 1, []))\'; mv ".y${{d#.image}}" "$d"; {GOOD_BUILD}'
    )
    _, said = make(tmp_path)
    assert "found []" in said
    assert [item.why for item in removable(tmp_path / "seen", 1, [])] == ["leftover of a killed build"]


def test_the_folder_is_held_and_not_its_name(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    for folder in (shared, tmp_path / "home"):
        put(folder / "a.sif")
    (shared / ".x.sif.01234567.part").mkdir()
    with held(shared) as folder:
        found = removable(folder, 0, [])
        shared.rename(tmp_path / "moved")
        shared.symlink_to(tmp_path / "home")
        for item in found:
            for path in item.paths:
                remove(path)
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == ["a.sif", "a.sif.lock.json"]
    assert list((tmp_path / "moved").iterdir()) == []


@pytest.mark.parametrize("mode", [0o666, 0o600])
def test_a_lock_of_his_names_him_and_hides_no_leftovers(shared: Path, mode: int) -> None:
    target, place = shared / "x.sif", shared / ".x.sif.building"
    place.touch()
    place.chmod(mode)
    give(place)
    (shared / ".x.sif.01234567.part").mkdir(mode=0o700)
    with place.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found = holder(target)
        assert found is not None and "nobody" in found.who and "another file" in found.todo
        assert not is_held(target) and names(shared) == [".x.sif.01234567.part"]
        with pytest.raises(UserError, match=r"nobody.*\.x\.sif\.building"), only_build(target, [].append):
            pass


class TestAnImageThatHePlanted:
    """Its lock says that it was made from just the inputs of alice."""

    @pytest.fixture
    def planted(self, apptainer: Apptainer, base: Path, tmp_path: Path) -> Path:
        first, _ = build(tmp_path)
        for path in (first.target, lock_path(first.target)):
            give(path)
        return first.target

    def test_it_is_not_taken_for_hers(self, apptainer: Apptainer, planted: Path, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="belongs to nobody"):
            build(tmp_path)
        with pytest.raises(UserError, match="belongs to nobody"):
            build(tmp_path, str(planted))
        assert builds(apptainer) == 1

    def test_under_another_name(self, apptainer: Apptainer, planted: Path, tmp_path: Path) -> None:
        other = planted.with_name("image-0.sif")
        planted.rename(other)
        lock_path(planted).rename(lock_path(other))
        (planted.parent / "image-dangling.sif").symlink_to("gone")
        made, _ = build(tmp_path)
        assert not made.up_to_date and made.target == planted and builds(apptainer) == 2
        assert build(tmp_path)[0].up_to_date  # her own


def test_nobody_else_can_write_an_image_whatever_the_umask(apptainer: Apptainer, base: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        result, _ = make(tmp_path)
    finally:
        os.umask(before)
    assert result.built is not None
    for path in (result.target, result.built.lock, result.built.definition):
        assert path.stat().st_mode & 0o022 == 0, path


@pytest.mark.parametrize("mode", [0o1777, 0o777, "his", "link"])
def test_a_cache_that_he_made_first_is_refused(tmp_path: Path, mode: int | str) -> None:
    """Apptainer believes what it finds in its cache."""
    cache = tmp_path / "scratch/images/cache"
    cache.mkdir(parents=True)
    if isinstance(mode, int):
        cache.chmod(mode)
    elif mode == "his":
        give(cache)
    else:
        cache.rmdir()
        (tmp_path / "x").mkdir()
        cache.symlink_to(tmp_path / "x")
        give(cache)
        give(tmp_path / "x")
    with pytest.raises(UserError, match=r"scratch/images/cache .*can"):
        make_folders(workspace(tmp_path / "scratch", {}))
    make_folders(workspace(tmp_path / "scratch", {"APPTAINER_CACHEDIR": str(cache)}))  # named by alice


def test_a_build_stops_at_such_a_cache(apptainer: Apptainer, base: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch/images/cache").mkdir(parents=True)
    give(tmp_path / "scratch/images/cache")
    with pytest.raises(UserError, match="can put files"):
        make(tmp_path, rules=Rules(cache=tmp_path / "scratch"))
