"""What an image may start from."""

from pathlib import Path

import pytest

from slurmddp.errors import UserError
from slurmddp.images.base import Base, check_architecture, parse_base
from slurmddp.images.releases import releases

from .conftest import sif

NGC = "nvcr.io/nvidia/pytorch:25.04-py3"


@pytest.mark.parametrize("text", ["25.04", "25.04-py3", f"docker://{NGC}"])
def test_an_ngc_release(text: str, tmp_path: Path) -> None:
    found = parse_base(text, tmp_path)
    assert found == Base("docker", NGC, releases()["25.04"])
    assert found.reference == f"docker://{NGC}"


def test_an_ngc_release_that_the_table_does_not_have(tmp_path: Path) -> None:
    assert parse_base("26.12", tmp_path) == Base("docker", "nvcr.io/nvidia/pytorch:26.12-py3")


@pytest.mark.parametrize(
    "name",
    [
        "debian:12",
        "localhost:5000/a/b:tag",
        "ghcr.io/a/b@sha256:" + "0" * 64,
        "nvcr.io/nvidia/pytorch:99.01-py3",
    ],
)
def test_any_image_of_a_registry(name: str, tmp_path: Path) -> None:
    assert parse_base(f"docker://{name}", tmp_path) == Base("docker", name)


@pytest.mark.parametrize(
    ("code", "machine", "refused"),
    [
        (b"04", "x86_64", "base.sif is for arm64, but this machine is amd64"),
        (b"02", "aarch64", "base.sif is for amd64, but this machine is arm64"),
        (b"02", "x86_64", ""),
        (b"04", "aarch64", ""),
        (b"00", "x86_64", ""),
        (b"", "x86_64", ""),
    ],
)
def test_a_sif_for_other_processors(
    code: bytes, machine: str, refused: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base.write_bytes(sif(code))
    monkeypatch.setattr("platform.machine", lambda: machine)
    found = parse_base(str(base), Path("/"))  # a dry run may look at it anywhere
    if not refused:
        check_architecture(found)
        return
    with pytest.raises(UserError, match=refused):
        check_architecture(found)


def test_an_image_by_its_path(base: Path, tmp_path: Path) -> None:
    expected = Base("localimage", str(base))
    assert parse_base("base.sif", tmp_path) == expected
    assert parse_base(str(base), Path("/")) == expected
    assert parse_base("./x/../base.sif", tmp_path) == expected


def test_an_archive(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"")
    expected = Base("docker-archive", str(tmp_path / "a.tar"))
    for text in (
        "docker-archive:a.tar",
        f"docker-archive:{tmp_path}/a.tar",
        f"docker-archive://{tmp_path}/a.tar",
    ):
        assert parse_base(text, tmp_path) == expected
    assert parse_base(expected.reference, tmp_path) == expected


def test_a_root_folder(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    (root / "usr/bin").mkdir(parents=True)
    with pytest.raises(UserError, match="is not a root filesystem: it has no bin/sh"):
        parse_base("root", tmp_path)
    (root / "usr/bin/sh").symlink_to("/nowhere/dash")
    assert parse_base("root", tmp_path) == Base("localimage", str(root))


@pytest.mark.parametrize(
    ("text", "what", "todo"),
    [
        ("", "is empty", "an NGC release"),
        ("none.sif", "none.sif does not exist", "an NGC release"),
        ("ubuntu:22.04", "does not exist", "docker://ubuntu:22.04"),
        (NGC, "does not exist", f"docker://{NGC}"),
        ("docker:debian", "is not an image in a registry", "docker://HOST/NAME:TAG"),
        ("docker://", "the image name is empty", "HOST/NAME:TAG"),
        ("docker://a b", "'a b' contains a space", "HOST/NAME:TAG"),
        ("docker://$(id)", "the invalid name '$(id)'", "HOST/NAME:TAG"),
        ("docker://host/Name", "has capital letters in its name", "host/name"),
        ("docker://a@sha256:12", "has an invalid digest", "64 characters"),
        ("docker://a:-x", "has the invalid tag '-x'", "a tag is"),
        ("library://a/b", "unknown kind of base: 'library'", "docker://REFERENCE"),
        ("docker-archive:none.tar", "does not exist", "docker save"),
        ("plain.txt", "is not a SIF image", "an NGC release"),
        ("image.tar", "is not a SIF image", "docker-archive:image.tar"),
        ("/", "this machine's own root", ""),
        (".", "is not a root filesystem", ".sif"),
        ("a{{b}}", "build argument", "rename"),
        ("a\nBootstrap: x", "line break", "rename"),
        ("a#b.sif", "'#'", "rename"),
        ("a\\", "backslash", "rename"),
        ("a\udcff", "UTF-8", "rename"),
        ("x" * 5000, "does not exist", ""),
    ],
)
def test_what_is_refused(text: str, what: str, todo: str, tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("text")
    (tmp_path / "image.tar").write_text("text")
    with pytest.raises(UserError) as caught:
        parse_base(text, tmp_path)
    assert what in caught.value.what
    assert todo in str(caught.value.todo)
    assert caught.value.where == "--base"


def test_a_folder_above_may_spoil_a_path_too(tmp_path: Path, base: Path) -> None:
    folder = tmp_path / "{{x}}"
    folder.mkdir()
    base.rename(folder / "base.sif")
    with pytest.raises(UserError, match="build argument"):
        parse_base("base.sif", folder)
