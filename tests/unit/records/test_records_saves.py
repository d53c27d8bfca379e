"""The newest whole save of a script, told by its content."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest

from slurmddp.records import saves
from slurmddp.records.saves import measure, newest

NOW = 1_700_000_000.0


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", b"x" * 500)


def tensors(path: Path) -> None:
    header = json.dumps({"__metadata__": {}, "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"12345678")


def pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps({"step": list(range(99))}, protocol=2))


WRITERS = {"a torch file": zipped, "b safetensors": tensors, "c pickle": pickled}


def at(path: Path, seconds: float) -> Path:
    os.utime(path, (NOW + seconds, NOW + seconds))
    return path


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_is_cut_off_is_no_save(tmp_path: Path, name: str) -> None:
    WRITERS[name](at_old := tmp_path / "old")
    WRITERS[name](new := tmp_path / "new")
    at(at_old, 0)
    found = newest([str(tmp_path)])
    assert found and (found.path, found.bytes) == (str(new), new.stat().st_size)
    new.write_bytes(new.read_bytes()[:-7])
    found = newest([str(tmp_path)])
    assert found and found.path == str(at_old)


@pytest.mark.parametrize(
    "content", [b"", b"step 7 loss 3.2\n" * 9, b'{"step": 7, "loss": 3.2, "more": 1}', b"\x80", b"PK"]
)
def test_what_else_lies_there_is_no_save(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "log.txt").write_bytes(content)
    zipped(tmp_path / ".hidden")
    zipped(tmp_path / "other.pt")
    (tmp_path / "link.pt").symlink_to(tmp_path / "other.pt")
    found = newest([str(tmp_path)])
    assert found and found.path == str(tmp_path / "other.pt")


def test_folders_of_files(tmp_path: Path) -> None:
    """A folder counts as a whole: what the Trainer of transformers and torch.distributed.checkpoint write."""
    for step in (10, 20):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        tensors(at(folder, 0) / "model.safetensors")
        (folder / "trainer_state.json").write_text("{}")
        for file in folder.iterdir():
            at(file, step)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/events.out").write_bytes(b"later, and no save")
    found = newest([str(tmp_path)])
    assert found and found.path == str(tmp_path / "checkpoint-20") and found.time == NOW + 20
    dcp = tmp_path / "step-30"
    dcp.mkdir()
    (dcp / "__0_0.distcp").write_bytes(b"anything")
    assert newest([str(tmp_path)]) == found, "its .metadata is missing"
    (dcp / ".metadata").write_bytes(b"x")
    found = newest([str(tmp_path)])
    assert found and found.path == str(dcp)


def test_places_and_patterns(tmp_path: Path) -> None:
    for number, name in enumerate(("one/epoch=1.ckpt", "two/epoch=2.ckpt", "snapshot[1].pt")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        zipped(tmp_path / name)
        at(tmp_path / name, number)
    path = str(tmp_path)

    def found(*places: str) -> str | None:
        save = newest([f"{path}/{place}" for place in places])
        return save and save.path.removeprefix(path + "/")

    assert found("one", "nothing") == "one/epoch=1.ckpt"
    assert found("*/*.ckpt") == "two/epoch=2.ckpt"
    assert found("snapshot[1].pt", "one") == "snapshot[1].pt"
    assert found("t*") == "two"
    assert found("none/*", "none") is None
    assert newest([path], since=NOW + 3) is None and newest([path], since=NOW + 2)


@pytest.mark.parametrize("whose", ["file", "folder/model", "folder/inner", "folder"])
def test_what_belongs_to_another_user_is_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str) -> None:
    (tmp_path / "folder/inner").mkdir(parents=True)
    for name in ("file", "folder/model", "folder/inner/model"):
        zipped(tmp_path / name)
    theirs, really = str(tmp_path / whose), os.lstat

    def lstat(path: str) -> os.stat_result:
        facts = list(really(path))
        facts[4] += path == theirs
        return os.stat_result(facts)

    top = tmp_path / whose.partition("/")[0]
    assert measure(str(top))
    monkeypatch.setattr(os, "lstat", lstat)
    assert measure(str(top)) is None
    found = newest([str(tmp_path)])
    assert found and found.path == str(tmp_path / ("folder" if whose == "file" else "file"))


def test_what_a_file_became_since_it_was_listed_is_not_read(tmp_path: Path) -> None:
    zipped(tmp_path / "a")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError):
            saves._kind(str(tmp_path / name))


def test_headers_that_are_too_deep_or_too_long(tmp_path: Path) -> None:
    deep = b'{"a":' + b"[" * 100000
    (tmp_path / "deep").write_bytes(len(deep).to_bytes(8, "little") + deep)
    (tmp_path / "long").write_bytes((11 * 2**20).to_bytes(8, "little") + b"{}" + b" " * 11 * 2**20)
    assert newest([str(tmp_path)]) is None
    assert saves._kind(str(tmp_path / "long")) == saves.OTHER
