"""A checkpoint of somebody who means harm, as a login node checks it: nothing of it runs, and the message says what."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmddp.records.checkpoint import FileFacts
from slurmddp.run import checkpoints
from slurmddp.run.layout import RunFolder
from slurmddp.shared.checkpoint import contents, layout
from tests.checkpoints import NO_TENSORS, Touch, make_run, replace
from tests.helpers import Result

Cli = Callable[..., Result]
_METADATA = b"torch.distributed.checkpoint.metadata"


def fault(folder: RunFolder) -> str | None:
    (item,) = checkpoints.survey(folder)
    return checkpoints.check(item).fault


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_verify_runs_nothing_and_names_the_class(cli: Cli, tmp_path: Path, protocol: int) -> None:
    folder = make_run(tmp_path / "run", 1)
    sign = tmp_path / "sign"
    evil = pickle.dumps({"state_dict_metadata": Touch(sign)}, protocol=protocol)
    replace(folder.checkpoints / "step-00000001", ".metadata", evil)
    done = cli("checkpoint", "verify", str(folder.path))
    assert (done.code, done.err) == (1, "")
    assert done.out.startswith("step 1  NOT USABLE: .metadata names posix.system, which no checkpoint of slurmddp")
    assert not sign.exists()
    pickle.loads(evil)
    assert sign.exists()  # the test's own pickle does what it should


@pytest.mark.parametrize(
    "code",
    [
        b"cbuiltins\neval\n(X\x01\0\0\x001tR.",
        b"(S'touch x'\nios\nsystem\n.",  # INST
        b"ctorch.distributed.checkpoint.metadata\nMetadata.__init__.__globals__\n.",
        b"ctorch\nload\n.",
        b"ctorch\nfloat32.__class__\n.",
        b"ctorch.storage\n_load_from_bytes\n.",
        b"ctorch.distributed.checkpoint.filesystem\npickle\n.",
        b"cbuiltins\ngetattr\n(c" + _METADATA + b"\nMetadata\nX\x08\0\0\0__init__tR.",
        b"cbuiltins\ngetattr\n(c" + _METADATA + b"\n_MEM_FORMAT_ENCODING\nctorch\nSize\ntR.",
        b"\x82\x01.",  # EXT1
        b"P1\n.",  # PERSID
        b"c" + _METADATA + b"\nMetadata\n}(X\x03\0\0\0abcK\x01ub.",  # the state of a class
        b"c" + _METADATA + b"\nMetadata\nN}(X\x0c\0\0\0__setstate__c" + _METADATA + b"\nMetadata\nu\x86b.",
        b"",
        b"(" * 100_000,
        b"]" + b"]a" * 100_000 + b".",
        NO_TENSORS[:-1],
        NO_TENSORS.replace(b"storage_data", b"storage_dato"),
    ],
)
def test_pickles_that_are_no_metadata(tmp_path: Path, code: bytes) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(code)
    with pytest.raises(contents.Refused, match=r"^(names|is damaged: )"):
        contents.read(path)


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "a/../../b"])
def test_files_outside_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = make_run(tmp_path / "run", 1)
    checkpoint = folder.checkpoints / "step-00000001"
    manifest = layout.read_manifest(checkpoint)
    manifest = manifest._replace(files={**manifest.files, name: FileFacts(1, "0")})
    layout.write_json(checkpoint / layout.MANIFEST, manifest.write())
    layout.mark_complete(checkpoint)
    assert fault(folder) == f"manifest.json names the file {name!r}, which is not in the checkpoint's folder"


@pytest.mark.parametrize("name", ["COMPLETE", "manifest.json", "__0_0.distcp"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_never_ends_is_not_read(tmp_path: Path, name: str, kind: str) -> None:
    folder = make_run(tmp_path / "run", 1)
    path = folder.checkpoints / "step-00000001" / name
    size = path.stat().st_size
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    assert size
    found = fault(folder)
    assert found is not None and name in found


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "{}", '{"schema": 1}', '{"schema": 1, "step": -1, "world": 1, "files": {}}', "\xff"]
)
def test_manifests_that_lie(tmp_path: Path, text: str) -> None:
    folder = make_run(tmp_path / "run", 1)
    checkpoint = folder.checkpoints / "step-00000001"
    (checkpoint / layout.MANIFEST).write_bytes(text.encode("latin-1"))
    layout.mark_complete(checkpoint)
    found = fault(folder)
    assert found is not None and found.startswith("manifest.json is not a manifest")


def test_metadata_that_nothing_vouches_for(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 1)
    checkpoint = folder.checkpoints / "step-00000001"
    manifest = layout.read_manifest(checkpoint)
    manifest = manifest._replace(files={name: at for name, at in manifest.files.items() if name != ".metadata"})
    layout.write_json(checkpoint / layout.MANIFEST, manifest.write())
    layout.mark_complete(checkpoint)
    assert fault(folder) == ".metadata is not listed in manifest.json, so its content cannot be verified"
