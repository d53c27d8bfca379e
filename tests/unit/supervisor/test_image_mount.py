"""Which images are mounted before Apptainer starts, and what happens where that is not possible."""

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from slurmddp.run.rank_starts import without_notices
from slurmddp.supervisor import image_mount
from slurmddp.supervisor.image_mount import NotPossible, partition, squashfuse_of
from tests.helpers import typed

#: Data types of a SIF; file systems and kinds of a partition (sylabs/sif, pkg/sif/descriptor.go).
LABELS, PARTITION = 0x4003, 0x4004
SQUASHFS, EXT3, ENCRYPTED = 1, 2, 5
PRIMARY, DATA, OVERLAY = 2, 3, 4


def sif(path: Path, *parts: tuple[int, bool, int, int, int]) -> str:
    """Write a SIF with these descriptors: data type, used, offset, file system, kind."""
    head = b"#!/usr/bin/env run-singularity\n\0" + b"SIF_MAGIC\0" + b"01\0" + b"02\0" + bytes(16)
    head += struct.pack("<qqqqqqqq", 0, 0, 48 - len(parts), 48, 4096, 48 * 585, 32768, 0)
    table = b""
    for number, (data, used, offset, system, kind) in enumerate(parts, 1):
        table += struct.pack("<i?IIIqqqqqqq", data, used, number, 1, 0, offset, 9, 9, 1, 1, 0, 0)
        table += b"a name".ljust(128, b"\0") + struct.pack("<ii", system, kind).ljust(384, b"\0")
    path.write_bytes(head.ljust(4096, b"\0") + table)
    return str(path)


def test_a_plain_image_has_one_squashfs_partition(tmp_path: Path) -> None:
    labels, root = (LABELS, True, 32768, 0, 0), (PARTITION, True, 36864, SQUASHFS, PRIMARY)
    removed, data = (PARTITION, False, 9, EXT3, OVERLAY), (PARTITION, True, 99, EXT3, DATA)
    assert partition(sif(tmp_path / "a.sif", labels, removed, data, root)) == 36864
    (tmp_path / "b.sif").write_bytes(b"hsqs" + bytes(200))
    assert partition(str(tmp_path / "b.sif")) == 0
    for other in (
        [root, (PARTITION, True, 99, EXT3, OVERLAY)],
        [(PARTITION, True, 9, ENCRYPTED, PRIMARY)],
        [labels],
    ):
        with pytest.raises(NotPossible, match="not one plain squashfs partition"):
            partition(sif(tmp_path / "c.sif", *other))


def apptainer(folder: Path, *programs: str) -> str:
    """Make an Apptainer that says where its programs are."""
    binaries = folder / "libexec/apptainer/bin"
    binaries.mkdir(parents=True, exist_ok=True)
    for name in programs:
        (binaries / name).write_text("#!/bin/sh\n")
        (binaries / name).chmod(0o755)
    main = folder / "apptainer"
    main.write_text(f"#!/bin/sh\n[ $1 != buildcfg ] || printf 'PREFIX=/\\nLIBEXECDIR={folder}/libexec\\n'\n")
    main.chmod(0o755)
    return str(main)


def test_only_an_apptainer_without_setuid_uses_squashfuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    program = apptainer(tmp_path, "starter", "squashfuse")
    assert squashfuse_of(program) == f"{tmp_path}/libexec/apptainer/bin/squashfuse"
    apptainer(tmp_path, "squashfuse_ll")
    assert squashfuse_of(program) == f"{tmp_path}/libexec/apptainer/bin/squashfuse_ll"
    apptainer(tmp_path, "starter-suid")
    assert squashfuse_of(program) == ""
    assert squashfuse_of(apptainer(tmp_path / "other")) == "" == squashfuse_of("/nowhere/singularity")
    bare = apptainer(tmp_path / "bare", "starter")
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(NotPossible, match="neither squashfuse_ll nor squashfuse"):
        squashfuse_of(bare)
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert squashfuse_of(program) == ""


class Started(Exception):
    """What would have become of this process."""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run main; return the command that it becomes. The result of `enter` is the caller's."""
    image = sif(tmp_path / "a.sif", (PARTITION, True, 36864, SQUASHFS, PRIMARY))
    monkeypatch.setattr(image_mount, "squashfuse_of", lambda _: "/bin/squashfuse")
    monkeypatch.setattr(image_mount, "_close", lambda _: None)
    monkeypatch.setattr(image_mount, "_reset", lambda _: None)

    def become(program: str, words: list[str], variables: dict[str, str]) -> None:
        raise Started(words)

    monkeypatch.setattr(os, "execvpe", become)

    def run(enter: Any, *options: str, **variables: str) -> list[str]:
        known = {"SLURMDDP_RUN": str(tmp_path), "SLURMDDP_ATTEMPT": "3", "SLURMDDP_NODE": "node7", **variables}
        monkeypatch.setattr(image_mount, "environment", lambda _: known)
        monkeypatch.setattr(image_mount, "enter", enter)
        with pytest.raises(Started) as found:
            image_mount.main([str(tmp_path / "image"), image, "apptainer", "exec", *options, image, "python3", image])
        return [word.replace(str(tmp_path), "") for word in found.value.args[0]]

    return run


def test_apptainer_starts_on_the_mount(start: Any, tmp_path: Path) -> None:
    mounts: list[image_mount.Mount] = []
    assert start(mounts.append) == ["apptainer", "exec", "/image/a.sif", "python3", "/a.sif"]
    (mount,) = mounts
    assert (mount.offset, mount.words) == (36864, 3) and os.path.isdir(mount.point)
    assert start(mounts.append, "--unsquash") == ["apptainer", "exec", "--unsquash", "/a.sif", "python3", "/a.sif"]
    assert len(mounts) == 1 and not (tmp_path / "events.jsonl").exists()


def test_without_a_mount_apptainer_starts_on_the_image_and_status_says_why(start: Any, tmp_path: Path) -> None:
    def fail(_: object) -> None:
        raise NotPossible("no /dev/fuse")

    plain = ["apptainer", "exec", "/a.sif", "python3", "/a.sif"]
    assert start(fail, SLURMDDP_STEP="preflight") == plain == start(fail, SLURM_LOCALID="1")
    assert not (tmp_path / "events.jsonl").exists()
    assert start(fail, SLURM_LOCALID="0") == plain
    (event,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    (text,) = without_notices(typed(event, {**event, "node": "node2"}))
    assert event["attempt"] == 3
    assert text == (
        "scancel and requeues leave the ranks no time to save: Slurm's SIGTERM ends the image's mount on node2, node7: "
        "no /dev/fuse"
    )


def test_a_host_without_user_namespaces_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *_: object) -> None:
        raise OSError(1, f"{name}: Operation not permitted")

    monkeypatch.setattr(image_mount, "_call", refuse)
    mount = image_mount.Mount("/bin/squashfuse", "/a.sif", 9, str(tmp_path), ["apptainer"], 1)
    with pytest.raises(NotPossible, match="unshare: Operation not permitted"):
        image_mount.enter(mount)
