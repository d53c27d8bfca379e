"""An image whose inputs are what they were is not built again; one at a time; each set of inputs has its own name."""

import errno
import fcntl
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slurmddp import __version__
from slurmddp.errors import ExternalError, UserError
from slurmddp.images.build_lock import holder, is_held, only_build
from slurmddp.images.image_spec import of_dockerfile, of_recipe
from slurmddp.images.inputs import Inputs, inputs_of
from slurmddp.images.make import BuildResult, Request, build_image
from slurmddp.images.provenance import lock_path, sha256
from slurmddp.images.recipe import read_recipe
from slurmddp.records.build import Build, read

from .conftest import GOOD_BUILD, Apptainer


def build(folder: Path, target: str | None = None, *, force: bool = False, **wanted: object) -> tuple[BuildResult, str]:
    said: list[str] = []
    image = of_recipe(read_recipe(None, {"base": "base.sif", **wanted}, folder, {}))
    result = build_image(Request(image, Path(target) if target else None, folder, force), said.append)
    return result, "\n".join(said)


def builds(apptainer: Apptainer) -> int:
    return sum(" build " in call for call in apptainer.calls)


def test_the_same_inputs_are_built_once(apptainer: Apptainer, base: Path, tmp_path: Path) -> None:
    first, _ = build(tmp_path, pip=["einops"])
    assert re.fullmatch(r"image-[0-9a-f]{12}\.sif", first.target.name) and first.target.parent == tmp_path / "images"
    again, _ = build(tmp_path, pip=["einops"])
    assert again.up_to_date and again.target == first.target
    other, _ = build(tmp_path, pip=["numpy"])
    assert other.target != first.target and first.target.exists()
    assert builds(apptainer) == 2
    build(tmp_path, pip=["einops"], force=True)
    assert builds(apptainer) == 3


@pytest.mark.parametrize("change", ["its bytes", "gone"])
def test_an_image_that_is_not_what_its_lock_says_is_built_again(
    apptainer: Apptainer, base: Path, tmp_path: Path, change: str
) -> None:
    first, _ = build(tmp_path)
    if change == "gone":
        first.target.unlink()
    else:
        first.target.write_bytes(b"half")
    if change == "gone":
        build(tmp_path)
    else:
        with pytest.raises(UserError, match="already exists"):
            build(tmp_path)
        build(tmp_path, force=True)
    assert builds(apptainer) == 2


def test_a_name_that_has_other_inputs_is_not_replaced_unasked(apptainer: Apptainer, base: Path, tmp_path: Path) -> None:
    build(tmp_path, "mine.sif")
    with pytest.raises(UserError) as caught:
        build(tmp_path, "mine.sif", pip=["einops"])
    assert "built from other inputs (changed: definition)" in caught.value.what and "--force" in caught.value.todo
    base.write_bytes(base.read_bytes() + b"more")
    with pytest.raises(UserError, match="changed: base file"):
        build(tmp_path, "mine.sif")
    result, _ = build(tmp_path, "mine.sif", force=True)
    assert result.built is not None and builds(apptainer) == 2


def inputs(folder: Path) -> Inputs:
    return inputs_of(of_recipe(read_recipe("own.yaml", {}, folder, {})))


def test_what_is_copied_counts_by_content_name_and_mode(base: Path, tmp_path: Path) -> None:
    source = tmp_path / "src"
    (source / "deep").mkdir(parents=True)
    (source / "deep/a.py").write_text("a")
    (source / "link").symlink_to("deep")
    (tmp_path / "own.yaml").write_text("base: base.sif\nfiles: ['src:/opt/src']\n")
    keys = [inputs(tmp_path).key]
    os.utime(source / "deep/a.py", (1, 1))
    assert inputs(tmp_path).key == keys[0], "its time is no content"
    changes = (
        lambda: (source / "deep/a.py").write_text("b"),
        lambda: (source / "deep/a.py").chmod(0o755),
        lambda: (source / "deep/a.py").rename(source / "deep/b.py"),
        lambda: ((source / "link").unlink(), (source / "link").symlink_to("deep/b.py")),
        lambda: (source / "new").write_text(""),
    )
    for change in changes:
        change()
        keys.append(inputs(tmp_path).key)
    assert len(set(keys)) == len(keys)


def test_a_large_base_is_read_once(apptainer: Apptainer, base: Path, tmp_path: Path) -> None:
    """Its hash comes from its own lock, or from the lock of the image that was made from it."""
    first, _ = build(tmp_path)
    (kept,) = json.loads(lock_path(first.target).read_text())["inputs"]["files"].values()
    assert kept == [base.stat().st_size, base.stat().st_mtime_ns, sha256(base)]
    # Same size and time, other bytes: what nobody has read again, nobody has noticed.
    stamp = (base.stat().st_atime_ns, base.stat().st_mtime_ns)
    base.write_bytes(base.read_bytes()[:-1] + b"?")
    os.utime(base, ns=stamp)
    assert build(tmp_path)[0].up_to_date


def test_a_pipe_is_no_input(base: Path, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    os.mkfifo(tmp_path / "src/pipe")
    (tmp_path / "own.yaml").write_text("base: base.sif\nfiles: ['src:/opt/src']\n")
    with pytest.raises(UserError, match="neither a file, a folder nor a link"):
        inputs(tmp_path)


HOLDER = """
import sys
from pathlib import Path
from slurmddp.images.build_lock import only_build
with only_build(Path(sys.argv[1]), print):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_builds_of_one_image_do_not_meet(tmp_path: Path) -> None:
    target = tmp_path / "image.sif"
    command = [sys.executable, "-c", HOLDER, str(target)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    holder = subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdin and holder.stdout and holder.stdout.readline() == "held\n"
    said: list[str] = []
    with pytest.raises(UserError) as caught, only_build(target, said.append):
        pass
    assert f"by process {holder.pid} on " in caught.value.what
    holder.kill()  # who dies lets go, and what is left behind disturbs nobody
    holder.wait()
    assert [path.name for path in tmp_path.iterdir()] == [".image.sif.building"]
    with only_build(target, said.append):
        pass
    assert list(tmp_path.iterdir()) == [] and said == []


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)


def test_a_dead_build_blocks_nobody_where_there_are_no_locks(no_locks: None, tmp_path: Path) -> None:
    target, said = tmp_path / "image.sif", list[str]()
    with only_build(target, said.append):
        (place,) = tmp_path.iterdir()
        text = place.read_text()
        found = holder(target)
        assert found is not None and f"process {os.getpid()} on " in found.who
        assert "has no locks" in found.todo and str(place) in found.todo
    assert "has no locks" in said[0]
    assert holder(target) is None
    gone = subprocess.Popen(["true"])
    gone.wait()
    place.write_text(text.replace(str(os.getpid()), str(gone.pid)))
    assert holder(target) is None
    # Of a process on another host, nobody here knows.
    place.write_bytes(Build(gone.pid, "elsewhere", 1.0).write())
    found = holder(target)
    assert found is not None and f"process {gone.pid} on elsewhere" in found.who


SAMPLES = Path(__file__).parents[1] / "cluster" / "samples"


@pytest.mark.parametrize(
    ("scontrol", "held"),
    [
        (f"cat {SAMPLES}/scontrol-running.txt", True),
        (f"cat {SAMPLES}/scontrol-node-fail.txt", False),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", False),
        ("echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1", True),
        (None, True),
    ],
)
def test_a_build_in_a_job_that_is_over_blocks_nobody(
    no_locks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scontrol: str | None, held: bool
) -> None:
    if scontrol is not None:
        (tmp_path / "scontrol").write_text(f"#!/bin/bash\n{scontrol}\n")
        (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    target = tmp_path / "image.sif"
    with only_build(target, [].append):
        text = (tmp_path / ".image.sif.building").read_text()
    build = read(text.encode())
    assert build and build.line().startswith(f"process {os.getpid()} of job 4711 on {platform.node()}, since ")
    (tmp_path / ".image.sif.building").write_text(text.replace(platform.node(), "node9"))
    assert (holder(target) is not None) is held


@pytest.mark.parametrize("kind", ["link", "dangling", "hard link", "pipe", "folder"])
def test_what_somebody_laid_in_the_place_of_the_lock_is_not_touched(kind: str, tmp_path: Path) -> None:
    secret, place, target = tmp_path / "bashrc", tmp_path / ".x.sif.building", tmp_path / "x.sif"
    secret.write_text("mine")
    if kind == "link":
        place.symlink_to(secret)
    elif kind == "dangling":
        place.symlink_to(tmp_path / "new")
    elif kind == "hard link":
        place.hardlink_to(secret)
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.mkdir()
    words = r"x\.sif\.building (is a link or a pipe|cannot be written: Is a directory)"
    with pytest.raises(UserError, match=words), only_build(target, [].append):
        pass
    if kind != "folder":
        with pytest.raises(UserError, match=words):
            is_held(target)
    assert secret.read_text() == "mine" and not (tmp_path / "new").exists() and os.path.lexists(place)


def test_what_another_user_wrote_into_the_lock_does_not_reach_the_terminal(tmp_path: Path) -> None:
    place = tmp_path / ".x.sif.building"
    place.write_text("\x1b]52;c;cm0gLXJmIH4=\x07")
    with place.open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="by another process"), only_build(tmp_path / "x.sif", [].append):
            pass


def test_links_in_the_place_of_what_a_build_writes_are_replaced(
    apptainer: Apptainer, base: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "bashrc"
    secret.write_text("mine")
    for end in ("", ".def", ".build.log", ".lock.json"):
        (tmp_path / f"x.sif{end}").symlink_to(secret)
    # Whoever can write to the folder sees the builder's command line: its files are in a folder that is closed to them.
    apptainer.builds(f'stat -c "mode %a" "${{image%/*}}"; {GOOD_BUILD}')
    _, said = build(tmp_path, "x.sif", force=True)
    assert secret.read_text() == "mine" and "mode 700" in said
    assert not any((tmp_path / f"x.sif{end}").is_symlink() for end in ("", ".def", ".build.log", ".lock.json"))

    (tmp_path / "x.sif.build.log").unlink()
    (tmp_path / "x.sif.build.log").symlink_to(secret)
    apptainer.builds("echo why; exit 1")
    with pytest.raises(ExternalError, match="why"):
        build(tmp_path, "x.sif", force=True)
    assert secret.read_text() == "mine" and "why" in (tmp_path / "x.sif.build.log").read_text()
    assert not (tmp_path / "x.sif.build.log").is_symlink()


def test_a_number_of_the_users_is_an_input_also_where_it_is_our_version(tmp_path: Path) -> None:
    path, plain = tmp_path / "Dockerfile", set()
    for argument in ("", __version__):
        path.write_text(f"FROM debian:12\nRUN echo {argument}\n")
        plain.add(of_dockerfile(path, {}, None).plain)
    assert len(plain) == 2
