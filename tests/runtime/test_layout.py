"""Checkpoint folders: what makes one good, and which are removed. No torch needed."""

import json
from pathlib import Path

import pytest

from slurmddp.records.checkpoint import Manifest
from slurmddp.shared.checkpoint import layout
from slurmddp.shared.checkpoint.checkpoints import Checkpoints
from tests.checkpoints import NO_TENSORS


def make(root: Path, step: int, complete: bool = True) -> Path:
    folder = root / layout.folder_name(step)
    (folder / "rng").mkdir(parents=True)
    names = ["__0_0.distcp", "rng/rank-00000.pt", ".metadata"]
    for name in names:
        (folder / name).write_bytes(NO_TENSORS if name == ".metadata" else f"{name} of {step}".encode() * 100)
    files = {name: layout.facts(folder / name) for name in names}
    layout.write_json(folder / layout.MANIFEST, Manifest(step, 1, files).write())
    if complete:
        layout.mark_complete(folder)
    return folder


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_good_one_verifies(tmp_path: Path) -> None:
    assert Checkpoints.verify(make(tmp_path, 10)).step == 10


def test_every_kind_of_damage_is_found_and_the_file_named(tmp_path: Path) -> None:
    shard = "__0_0.distcp"
    cases = {
        1: (lambda folder: flip(folder / shard), shard, "other content"),
        2: (lambda folder: (folder / shard).write_bytes(b"short"), shard, "has 5 bytes"),
        3: (lambda folder: (folder / shard).unlink(), shard, "is missing"),
        4: (lambda folder: (folder / layout.COMPLETE).unlink(), layout.COMPLETE, "never finished"),
        5: (lambda folder: flip(folder / layout.MANIFEST), layout.MANIFEST, "does not match the hash"),
        6: (lambda folder: (folder / layout.MANIFEST).unlink(), layout.MANIFEST, "is missing"),
        7: (lambda folder: (folder / layout.COMPLETE).write_bytes(b""), layout.MANIFEST, "does not match the hash"),
        8: (lambda folder: flip(folder / "rng/rank-00000.pt"), "rng/rank-00000.pt", "other content"),
    }
    for step, (damage, file, why) in cases.items():
        folder = make(tmp_path, step)
        damage(folder)
        with pytest.raises(layout.Rejected) as caught:
            Checkpoints.verify(folder)
        assert (caught.value.folder, caught.value.file) == (folder, file)
        assert why in caught.value.why


def test_a_manifest_that_is_none_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path, 1, complete=False)
    for content in ("[]", "{}", "no JSON", json.dumps({"schema": 99, "files": {}})):
        (folder / layout.MANIFEST).write_text(content)
        layout.mark_complete(folder)
        with pytest.raises(layout.Rejected):
            Checkpoints.verify(folder)


def test_newest_first_and_nothing_else(tmp_path: Path) -> None:
    for step in (2, 30, 7):
        make(tmp_path, step, complete=step != 30)
    (tmp_path / "notes").mkdir()
    (tmp_path / layout.temporary_name("saving", 40, 0, "ab")).mkdir()
    assert [step for step, _ in Checkpoints(tmp_path).folders()] == [30, 7, 2]
    assert Checkpoints(tmp_path / "none").folders() == []


def test_pruning_keeps_good_ones_only(tmp_path: Path) -> None:
    folders = {step: make(tmp_path, step, complete=step != 5) for step in (1, 2, 3, 4, 5, 6, 9)}
    removed = Checkpoints(tmp_path).prune(keep=2, keep_every=None, committed=6, rejected=[folders[4]], attempt=0)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == [folders[step].name for step in (3, 6, 9)]
    assert sorted(removed) == [folders[step] for step in (1, 2, 4, 5)]


def test_pruning_keeps_every_nth(tmp_path: Path) -> None:
    for step in (2, 3, 4, 5, 6, 7, 8):
        make(tmp_path, step, complete=step != 4)
    Checkpoints(tmp_path).prune(keep=1, keep_every=2, committed=7, rejected=[], attempt=0)
    assert [step for step, _ in Checkpoints(tmp_path).folders()] == [8, 7, 6, 2], "an unfinished one is never kept"


def test_a_file_in_the_way_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / layout.folder_name(3)
    path.write_text("mine")
    with pytest.raises(NotADirectoryError, match="is not a folder, but a checkpoint needs its name"):
        layout.discard(path, attempt=0)
    assert path.read_text() == "mine"


def test_leftovers_of_dead_attempts_go(tmp_path: Path) -> None:
    names = [layout.temporary_name("saving", 5, attempt, "ab") for attempt in (0, 1, 2)]
    names.append(layout.temporary_name("old", 5, 0, "cd"))
    for name in names:
        (tmp_path / name).mkdir()
    good = make(tmp_path, 5)
    Checkpoints(tmp_path).remove_leftovers(attempt=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [names[2], good.name]


def test_a_write_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    layout.write_durably(path, b"one")
    layout.write_durably(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]
