"""`slurmddp build-image` where it cannot: one clear message, the log's end where there is one, and no half image."""

import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slurmddp.images.registry.documents import ARCHITECTURES
from tests.helpers import Desk, Result
from tests.registry import Registry
from tests.registry_answers import closed_port

Cli = Callable[..., Result]

#: What stands for Apptainer: it does what the file BUILD says with $image, and knows the calls after a build.
APPTAINER = """#!/bin/bash
case $1 in
  --version) echo "apptainer version 1.4.5-1" ;;
  inspect) echo '{"data": {"attributes": {"labels": {}}}, "type": "container"}' ;;
  exec) exit 255 ;;
  build) image=${@: -2:1}; echo "$*" >> "$HOME/builds"; . BUILD ;;
esac
"""
SIF = r"printf '#!/usr/bin/env run-singularity\n\0SIF_MAGIC\00001\00000\0' > $image"
HERE = ARCHITECTURES.get(platform.machine(), platform.machine())
OTHER = "arm64" if HERE == "amd64" else "amd64"


def sif(code: str) -> bytes:
    return b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\x00" + b"01\x00" + code.encode() + b"\x00"


@pytest.fixture
def builds(tmp_path: Path) -> Path:
    """The file that says what the builder does, which gets none of the tests' variables."""
    (tmp_path / "builds").write_text(SIF)
    return tmp_path / "builds"


@pytest.fixture
def bench(desk: Desk, builds: Path) -> Desk:
    """A desk with a builder, and a base and an image that must stay as they are."""
    desk.program("apptainer", APPTAINER.replace("BUILD", str(builds)))
    (desk.project / "base.sif").write_bytes(sif("00"))
    (desk.project / "old.sif").write_bytes(b"the old one")
    return desk


@pytest.fixture
def refused(bench: Desk, cli: Cli) -> Callable[..., str]:
    """What is said; with `log` the build was begun, and its log alone is new."""

    def run(*arguments: str, code: int = 2, log: str = "", **variables: str) -> str:
        before = bench.tree(times=False)
        done = cli("build-image", *arguments, **variables)
        assert (done.code, done.out) == (code, ""), done
        assert "Traceback" not in done.err and done.err.strip()
        new = {name: entry for name, entry in bench.tree(times=False).items() if before.get(name) != entry}
        assert sorted(new) == (sorted(["home/builds", log]) if log else []), new
        if log:
            assert f"the whole log: {bench.root / log}" in done.err
        return done.err

    return run


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with Registry.started(tmp_path / "registry") as running:
        yield running


def test_a_registry_that_nobody_reaches(refused: Callable[..., str]) -> None:
    with closed_port() as port:
        said = refused("--base", f"docker://127.0.0.1:{port}/lab/a:1", code=1)
    assert f"cannot reach 127.0.0.1:{port}: connection refused\n  -> check host and port" in said


def test_a_registry_that_wants_to_know_who_we_are(tmp_path: Path, refused: Callable[..., str]) -> None:
    with Registry.started(tmp_path / "private", users={"me": "right"}) as registry:
        registry.push("lab/a", "1", {})
        base = f"docker://{registry.reference('lab/a', '1')}"
        assert "apptainer registry login" in refused("--base", base)
        wrong = {"APPTAINER_DOCKER_USERNAME": "me", "APPTAINER_DOCKER_PASSWORD": "wr0ng"}
        said = refused("--base", base, **wrong)
        assert registry.host in said and "wr0ng" not in said


def test_a_digest_and_a_tag_that_are_gone(registry: Registry, refused: Callable[..., str], cli: Cli) -> None:
    digest = registry.push("lab/a", "1", {"architecture": HERE}).digest
    base = f"docker://{registry.reference('lab/a', digest)}"
    assert cli("build-image", "--base", base, "--dry-run").code == 0
    assert cli("build-image", "mine.sif", "--base", base).code == 0
    registry.delete_manifest("lab/a", digest)
    said = refused("mine.sif", "--base", base, "--force")
    assert f"@{digest} does not exist at {registry.host}, or was removed" in said and "pin the tag again" in said
    said = refused("other.sif", "--base", f"docker://{registry.reference('lab/a', '1')}")
    assert "has no such tag\n  -> check the tag" in said


def test_a_base_in_a_registry_for_other_processors(registry: Registry, refused: Callable[..., str]) -> None:
    registry.push("lab/a", "1", {"architecture": OTHER})
    said = refused("--base", f"docker://{registry.reference('lab/a', '1')}")
    assert f"is not available for {HERE}; it has: {OTHER}\n  -> use an image for the architecture of the nodes" in said


def test_a_sif_for_other_processors(bench: Desk, refused: Callable[..., str], cli: Cli) -> None:
    (bench.project / "theirs.sif").write_bytes(sif("04" if OTHER == "arm64" else "02"))
    said = refused("new.sif", "--base", "theirs.sif")
    assert f"theirs.sif is for {OTHER}, but this machine is {HERE}\n  -> use a base for {HERE}" in said
    shown = cli("build-image", "--base", "theirs.sif", "--dry-run")  # of another machine's image it may well be
    assert shown.code == 0 and f"warning: the base {bench.project}/theirs.sif is for {OTHER}" in shown.err


#: As Apptainer 1.4, apt and pip write them.
NO_PIP = """\
+ python3 -m pip install --no-cache-dir --constraint /tmp/tmp.1 nosuchthing
ERROR: Could not find a version that satisfies the requirement nosuchthing (from versions: none)
ERROR: No matching distribution found for nosuchthing
FATAL:   While performing build: while running engine: exit status 1"""
NO_APT = """\
+ apt-get install -y --no-install-recommends gitt
Reading package lists...
E: Unable to locate package gitt
FATAL:   While performing build: while running engine: exit status 100"""
NO_APT_VERSION = """\
E: Version '9' for 'git' was not found
FATAL:   While performing build: while running engine: exit status 100"""
TEST = """\
INFO:    Adding testscript
INFO:    Running testscript
curl: (7) Failed to connect to localhost port 80: connection refused
FATAL:   While performing build: failed to execute %test script: exit status 7"""


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (NO_PIP, "no package nosuchthing for the image's Python and architecture\n  -> check its name"),
        (NO_APT, "the base's Debian or Ubuntu has no package gitt\n  -> check its name"),
        (NO_APT_VERSION, "the base's Debian or Ubuntu has no package git\n  -> check its name"),
        (TEST, "the image's own test failed\n  -> see its output below"),
    ],
)
def test_a_build_that_fails(bench: Desk, builds: Path, refused: Callable[..., str], words: str, cause: str) -> None:
    (bench.project / "words").write_text(words)
    builds.write_text(f"echo half > $image; cat '{bench.project}/words' >&2; exit 255")
    said = refused("old.sif", "--base", "base.sif", "--force", code=1, log="project/old.sif.build.log")
    assert f"`apptainer build` failed with exit code 255: {cause}" in said
    assert "the end of its log:\n" + "".join(f"  | {line}\n" for line in words.splitlines()) in said
    assert (bench.project / "old.sif").read_bytes() == b"the old one"


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[None]:
    """A file system of that size at `place`, with the old image on it."""
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "small", place], capture_output=True, text=True
    )
    if done.returncode:
        print(done.stderr)
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        (place / "old.sif").write_bytes(b"the old one")
        yield
    finally:
        subprocess.run(["umount", "-l", place], check=True)  # lazily: a test that fails may have left a file open


#: mksquashfs fills the disk and says so as C does, then Apptainer as Go does.
FULL = f"""{SIF}; head -c 4M /dev/zero >> $image
for n in {{1..4000}}; do echo "line $n of a build that goes on while the disk is full"; done
echo 'FATAL:   While performing build: while creating SIF: while creating container: write\
 .old.sif: copy_file_range: no space left on device' >&2; exit 255"""


def test_a_full_disk(bench: Desk, builds: Path, cli: Cli) -> None:
    builds.write_text(FULL)
    place = bench.project / "small"
    with small_disk(place, "256k"):
        failed = cli("build-image", "small/old.sif", "--base", "base.sif", "--force")
        assert failed.code == 1 and "Traceback" not in failed.err
        assert "failed with exit code 255: no disk space or quota left" in failed.err
        assert "  -> set APPTAINER_TMPDIR and APPTAINER_CACHEDIR to folders with more space" in failed.err
        assert f"the whole log: {place}/old.sif.build.log (cut off: No space left on device)" in failed.err
        assert sorted(path.name for path in place.iterdir()) == ["old.sif", "old.sif.build.log"]
        assert (place / "old.sif").read_bytes() == b"the old one"

        # No room is left for the lock
        (place / "old.sif.build.log").unlink()
        builds.write_text(f"{SIF}; head -c 4M /dev/zero >> $image; true")
        failed = cli("build-image", "small/old.sif", "--base", "base.sif", "--force")
        assert failed.code == 2 and "Traceback" not in failed.err
        assert "cannot be written: No space left on device\n  -> choose another path for the image" in failed.err
        assert sorted(path.name for path in place.iterdir()) == ["old.sif", "old.sif.build.log"]
        assert (place / "old.sif").read_bytes() == b"the old one"


def test_a_disk_that_is_full_before_the_build_begins(bench: Desk, cli: Cli) -> None:
    place = bench.project / "small"
    with small_disk(place, "256k"):
        subprocess.run(["sh", "-c", "head -c 1M /dev/zero > rest 2>/dev/null"], cwd=place, check=False)
        failed = cli("build-image", "small/old.sif", "--base", "base.sif", "--force")
        assert failed.code == 2 and "Traceback" not in failed.err
        assert f"{place}/" in failed.err and "cannot be written: No space left on device" in failed.err
        assert sorted(path.name for path in place.iterdir()) == ["old.sif", "rest"]
    assert not (bench.home / "builds").exists()


def test_a_disk_that_is_too_small_is_seen_before_anything_is_downloaded(
    bench: Desk, registry: Registry, cli: Cli
) -> None:
    registry.push("lab/a", "1", {"architecture": HERE}, [b"x" * 300_000])
    with small_disk(bench.project / "small", "256k"):
        base = f"docker://{registry.reference('lab/a', '1')}"
        failed = cli("build-image", "small/new.sif", "--base", base)
        assert failed.code == 2 and f"for the image in {bench.project}/small, and " in failed.err
        assert sorted(path.name for path in (bench.project / "small").iterdir()) == ["old.sif"]
    assert not (bench.home / "builds").exists()


#: In a user namespace of its own where no further one can be made, and not as root: what a hardened machine allows.
NO_NAMESPACES = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'


def test_no_user_namespaces(bench: Desk) -> None:
    outer = ["unshare", "--user", "--map-user=4711", "--map-group=4711", "--keep-caps", "sh", "-c"]
    wrapper = [*outer, NO_NAMESPACES, "-"]
    tried = subprocess.run([*wrapper, "true"], capture_output=True, text=True)
    if tried.returncode:
        print(tried.stderr)
        pytest.skip(f"this machine has none to take away: {tried.stderr.strip()}")
    before = bench.tree(times=False)
    done = subprocess.run(
        [*wrapper, sys.executable, "-m", "slurmddp", "build-image", "new.sif", "--base", "base.sif"],
        cwd=bench.project, env=bench.environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, ""), done
    assert "this machine cannot build images: user namespaces are disabled for users (unshare: " in done.stderr
    assert "ask the administrators for user namespaces: user.max_user_namespaces above 0" in done.stderr
    assert "or build on another machine and copy the .sif and its .lock.json here" in done.stderr
    assert bench.tree(times=False) == before
