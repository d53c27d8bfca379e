"""Building, with a stand-in for Apptainer: all or nothing, whatever happens in between."""

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from slurmddp import __version__
from slurmddp.commands.image import removal_text
from slurmddp.errors import ExternalError, UserError
from slurmddp.images.builder import Builder, build_command, find_builder, parse_version
from slurmddp.images.image_spec import of_recipe
from slurmddp.images.inventory import removable, remove
from slurmddp.images.make import BuildResult, Request, Rules, build_image, preview
from slurmddp.images.privilege import choose, look
from slurmddp.images.provenance import read_lock
from slurmddp.images.recipe import read_recipe

from .conftest import GOOD_BUILD, Apptainer

NEW = b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\0new"


def make(folder: Path, name: str = "out/image.sif", **changes: Any) -> tuple[BuildResult, list[str]]:
    said: list[str] = []
    wanted = {"base": changes.pop("base", "base.sif"), "pip": changes.pop("pip", ())}
    image = of_recipe(read_recipe(None, wanted, folder, {}))
    rules, dry_run = changes.pop("rules", Rules()), changes.pop("dry_run", False)
    request = Request(image, Path(name), folder, **changes)
    result = preview(request, said.append) if dry_run else build_image(request, said.append, lambda: rules)
    return result, said


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_image_its_definition_its_log_and_its_lock(apptainer: Apptainer, base: Path, tmp_path: Path) -> None:
    result, said = make(tmp_path, pip=("einops",))
    out = tmp_path / "out"
    assert names(out) == ["image.sif", "image.sif.build.log", "image.sif.def", "image.sif.lock.json"]
    assert (out / "image.sif").read_bytes() == NEW
    assert (out / "image.sif.def").read_text() == result.definition
    assert said == [
        f"building {out}/image.sif from {base} with apptainer 1.4.5-1",
        "INFO: starting",
        "+ pip install",
    ]
    log = (out / "image.sif.build.log").read_text()
    assert "# Bootstrap: localimage\n" in log and "INFO: starting\n+ pip install\n# exit code 0 after" in log

    lock = json.loads((out / "image.sif.lock.json").read_text())
    assert lock.pop("created").endswith("+00:00")
    assert lock == {
        "image": "image.sif",
        "bytes": len(NEW),
        "mtime": (out / "image.sif").stat().st_mtime,
        "sha256": sha256(NEW).hexdigest(),
        "torch": "2.7.0",
        "builder": {"name": "apptainer", "version": "1.4.5-1", "flavour": "apptainer"},
        "definition_sha256": sha256(result.definition.encode()).hexdigest(),
        "base": str(base),
        "pip": ["einops"],
        "packages": ["einops==0.8.1", "torch==2.7.0"],
        "recipe": "image",
        "commit": None,
        "downloads": {},
        "digests": {},
        "registry": None,
        "slurmddp": __version__,
        "host": platform.node(),
        "inputs": lock["inputs"],
        "mode": choose("apptainer", look()).mode,
    }
    assert set(lock["inputs"]["parts"]) == {"base", "base file", "definition"}
    assert result.built is not None and result.built.sha256 == lock["sha256"]
    assert result.built.lock == out / "image.sif.lock.json"


def test_the_sites_rules_reach_the_builder(apptainer: Apptainer, base: Path, tmp_path: Path) -> None:
    apptainer.builds('echo "in $APPTAINER_TMPDIR, $SINGULARITY_CACHEDIR"; ' + GOOD_BUILD)
    _, said = make(tmp_path, rules=Rules(cache=tmp_path / "scratch", processors=2, memory=512))
    (where,) = [line for line in said if line.startswith("in ")]
    own = rf"in {tmp_path}/scratch/images/tmp/slurmddp-\w+/builder, {tmp_path}/scratch/images/cache"
    assert re.fullmatch(own, where), where
    assert (tmp_path / "scratch/images/tmp").is_dir()
    (call,) = [call for call in apptainer.calls if " build " in call]
    assert "--mksquashfs-args -processors 2 -mem 512M" in call


def test_a_lock_counts_only_for_its_own_image(apptainer: Apptainer, base: Path, tmp_path: Path) -> None:
    make(tmp_path, "image.sif")
    image = tmp_path / "image.sif"
    assert (read_lock(image) or {})["bytes"] == len(NEW)
    made = image.stat().st_mtime_ns
    for kept in (made, made // 1000 * 1000, made // 10**9 * 10**9):  # all of it, microseconds, seconds
        os.utime(image, ns=(kept, kept))
        assert read_lock(image) is not None
    for other in (made + 10**8, made // 10**9 * 10**9 + 10**9, 1):
        os.utime(image, ns=(other, other))
        assert read_lock(image) is None
    assert read_lock(tmp_path / "other.sif") is None


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "echo half > $image; echo 'FATAL: no space left' >&2; exit 255",
            "exit code 255; the end of its log:(.|\n)*FATAL: no space left",
        ),
        ("exit 1", "no output"),
        ("echo 'E: Unable to locate package gitt'; exit 255", "the base.s .* has no package gitt\n  -> check"),
        ("true", "wrote no SIF image"),
        ("echo text > $image", "wrote no SIF image"),
        ("kill -9 $$", "exit code -9"),
    ],
)
def test_a_failing_build_leaves_the_old_image(
    script: str, message: str, apptainer: Apptainer, base: Path, tmp_path: Path
) -> None:
    make(tmp_path)
    out = tmp_path / "out"
    before = {name: (out / name).read_bytes() for name in names(out) if not name.endswith(".log")}
    apptainer.builds(script)
    with pytest.raises(ExternalError, match=message) as caught:
        make(tmp_path, force=True)
    assert f"{out}/image.sif.build.log" in str(caught.value)
    assert {name: (out / name).read_bytes() for name in names(out) if not name.endswith(".log")} == before


def test_a_failure_shows_the_end_of_a_long_log(apptainer: Apptainer, base: Path, tmp_path: Path) -> None:
    apptainer.builds(r"for i in {1..5000}; do echo out $i; echo err $i >&2; done; printf 'a\rb\xff'; exit 2")
    with pytest.raises(ExternalError) as caught:
        make(tmp_path)
    shown = [line for line in str(caught.value).splitlines() if line.startswith("  | ")]
    assert len(shown) == 20
    assert shown[-4:] == ["  | out 5000", "  | err 5000", "  | a", "  | b\ufffd"]
    assert len((tmp_path / "out/image.sif.build.log").read_text().splitlines()) > 10000
    assert names(tmp_path / "out") == ["image.sif.build.log"]


def test_what_the_inspection_refuses_is_not_installed(apptainer: Apptainer, base: Path, tmp_path: Path) -> None:
    apptainer.set("INSPECT_FAILS", "1")
    with pytest.raises(ExternalError, match=r"FATAL: no image(.|\n)*\| \+ pip install\nthe whole log: .*build\.log"):
        make(tmp_path)
    assert names(tmp_path / "out") == ["image.sif.build.log"]


def test_a_process_that_the_build_left_running_does_not_hold_us(
    apptainer: Apptainer, base: Path, tmp_path: Path
) -> None:
    apptainer.builds(f"{GOOD_BUILD}; sleep 120 &")
    started = time.monotonic()
    make(tmp_path)
    assert time.monotonic() - started < 100


CALLER = """
import signal
# Whoever runs the tests in the background or under nohup hands on ignored signals; a user's terminal does not.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
import sys
from pathlib import Path
from typing import Any
from slurmddp.errors import SlurmddpError
from slurmddp.images.inventory import removable, remove
from slurmddp.images.make import Request, build_image
from slurmddp.images.recipe import read_recipe
from slurmddp.images.image_spec import of_recipe
try:
    show = lambda line: print(line, flush=True)
    image = of_recipe(read_recipe(None, {"base": "base.sif"}, Path.cwd(), {}))
    build_image(Request(image, Path("image.sif"), Path.cwd(), force=True), show)
except SlurmddpError as error:
    print(error, flush=True)
    sys.exit(error.exit_code)
"""


def start(folder: Path) -> tuple["subprocess.Popen[str]", int]:
    """A build in a process of its own that has said `ready`, and the process id after its line `child`."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert caller.stdout is not None
    child = 0
    for line in caller.stdout:
        if line.startswith("child "):
            child = int(line.split()[1])
        if line == "ready\n":
            break
    return caller, child


def wait_for_the_end(child: int) -> None:
    state, deadline = Path(f"/proc/{child}/stat"), time.monotonic() + 60
    while state.exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the builder's child is still there"
        time.sleep(0.05)


def test_a_killed_build_takes_its_builder_with_it(
    apptainer: Apptainer, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APPTAINER_TMPDIR", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    apptainer.builds("touch $APPTAINER_TMPDIR/build-temp-1; sleep 600 & echo child $!; echo ready; wait")
    caller, child = start(tmp_path)
    assert "nothing" in removal_text(removable(tmp_path, 1, ()), done=False), "it is being built"
    caller.kill()
    caller.wait()
    wait_for_the_end(child)
    deadline = time.monotonic() + 60
    while not (found := removable(tmp_path, 1, ())):  # the builder ends in its own time, before or after its child
        assert time.monotonic() < deadline, "the lock of the killed build is still held"
        time.sleep(0.05)
    (left,) = found
    assert left.why.startswith(f"leftover of a killed build, with {tmp_path}/scratch/slurmddp-")
    assert [path.name for path in left.paths[1].rglob("build-temp-*")] == ["build-temp-1"]
    for path in left.paths:
        remove(path)
    assert names(tmp_path / "scratch") == [] and removable(tmp_path, 1, ()) == []


def test_a_builder_that_outlives_slurmddp_keeps_the_lock(apptainer: Apptainer, base: Path, tmp_path: Path) -> None:
    waits = "trap '' TERM; echo child $$; echo ready; until [ -e go ]; do sleep 0.1; done"
    apptainer.builds(f"cd {tmp_path}; {waits}")
    caller, child = start(tmp_path)
    caller.kill()
    caller.wait()
    with pytest.raises(UserError, match="was killed, but the builder that it started is still running"):
        make(tmp_path, "image.sif", force=True)
    assert removable(tmp_path, 1, ()) == []
    (tmp_path / "go").touch()
    wait_for_the_end(child)
    apptainer.builds(GOOD_BUILD)
    make(tmp_path, "image.sif", force=True)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_build_leaves_no_file_and_no_process(
    signum: signal.Signals, apptainer: Apptainer, base: Path, tmp_path: Path
) -> None:
    (tmp_path / "image.sif").write_bytes(b"old")
    apptainer.builds("echo half > $image; sleep 60 & echo child $!; echo ready; wait")
    caller, child = start(tmp_path)
    caller.send_signal(signum)
    rest, _ = caller.communicate(timeout=20)
    assert caller.returncode == 128 + signum
    assert f"stopped by {signum.name}; no image was changed" in rest
    assert (tmp_path / "image.sif").read_bytes() == b"old"
    assert [name for name in names(tmp_path) if ".part" in name or name.startswith(".image")] == []
    wait_for_the_end(child)


def test_an_existing_image_needs_force(apptainer: Apptainer, base: Path, tmp_path: Path) -> None:
    (tmp_path / "image.sif").write_bytes(b"old")
    with pytest.raises(UserError, match="already exists"):
        make(tmp_path, "image.sif")
    assert apptainer.calls == []
    make(tmp_path, "image.sif", force=True)
    assert (tmp_path / "image.sif").read_bytes() == NEW


@pytest.mark.parametrize("name", ["pytorch:25.04.sif", "a,b.sif", "a\nb.sif"])
def test_names_that_break_bind_specifications(name: str, apptainer: Apptainer, base: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"break|control character"):
        make(tmp_path, name)
    assert apptainer.calls == []


def test_places_that_cannot_be_written(apptainer: Apptainer, base: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written: a file with this name exists"):
        make(tmp_path, "file/image.sif")
    with pytest.raises(UserError, match="is a folder"):
        make(tmp_path, ".")
    with pytest.raises(UserError, match="cannot be written"):
        make(tmp_path, "/proc/image.sif")  # refused to root as well


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_permission(apptainer: Apptainer, base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o555)
    with pytest.raises(UserError, match="cannot be written: Permission denied"):
        make(tmp_path, "locked/image.sif")


def test_neither_program_is_there(no_apptainer: Apptainer, base: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        make(tmp_path)
    assert "neither apptainer nor singularity is on PATH" in caught.value.what
    assert "login node" in str(caught.value.todo) and "module load" in str(caught.value.todo)
    assert not (tmp_path / "out").exists()


def test_a_dry_run_touches_and_runs_nothing(apptainer: Apptainer, base: Path, tmp_path: Path) -> None:
    before = names(tmp_path)
    result, said = make(tmp_path, dry_run=True)
    assert result.definition.startswith("# Made by slurmddp") and result.built is None
    assert said == [] and names(tmp_path) == before and apptainer.calls == []
    _, said = make(tmp_path, "base.sif", dry_run=True)
    assert len(said) == 1 and said[0].startswith("warning: ") and "already exists" in said[0]


def test_the_image_s_code_gets_few_of_the_user_s_variables(
    apptainer: Apptainer, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "PYTHONPATH", "VIRTUAL_ENV", "LD_PRELOAD", "WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY",
        "SSH_AUTH_SOCK", "APPTAINER_BINDPATH", "SINGULARITY_BIND", "APPTAINER_ENV", "APPTAINERENV_A",
        "SINGULARITYENV_A", "APPTAINER_DOCKER_PASSWORD", "DOCKER_PASSWORD", "APPTAINER_NOHTTPS",
    ):  # fmt: skip
        monkeypatch.setenv(name, "/x")
    for name in ("APPTAINER_TMPDIR", "https_proxy", "NO_PROXY", "LC_ALL", "SSL_CERT_FILE"):
        monkeypatch.setenv(name, "/kept")
    apptainer.builds(f"env; {GOOD_BUILD}")
    _, said = make(tmp_path)
    assert len([line for line in said if line.endswith("=/kept")]) == 5
    assert [line for line in said if line.endswith("=/x")] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("apptainer version 1.4.5-1", Builder("b", "1.4.5-1", "apptainer")),
        ("singularity-ce version 4.1.0-jammy", Builder("b", "4.1.0-jammy", "singularityce")),
        ("SingularityPRO version 3.11.4", Builder("b", "3.11.4", "singularityce")),
        ("singularity version 3.8.7-1.el8", Builder("b", "3.8.7-1.el8", "singularity")),
        ("something else", Builder("b", "unknown", "singularity")),
    ],
)
def test_versions(text: str, expected: Builder) -> None:
    assert parse_version("b", text) == expected


def test_fakeroot_is_said_only_where_singularity_needs_it() -> None:
    apptainer, other = (
        Builder("singularity", "1.4", "apptainer"),
        Builder("singularity", "4.1", "singularityce"),
    )
    image, definition = Path("/i.sif"), Path("/i.def")
    assert build_command(apptainer, definition, image, ()) == ["singularity", "build", "--force", "/i.sif", "/i.def"]
    assert build_command(other, definition, image, ("--fakeroot",)) == [
        "singularity", "build", "--force", "--fakeroot", "/i.sif", "/i.def",
    ]  # fmt: skip


def test_which_program_is_taken(no_apptainer: Apptainer) -> None:
    no_apptainer.install("singularity", "singularity-ce version 4.1.0")
    assert find_builder() == Builder("singularity", "4.1.0", "singularityce")
    assert find_builder("apptainer").name == "singularity"
    no_apptainer.install("apptainer")
    assert find_builder().name == "apptainer"
    assert find_builder("singularity").name == "singularity"
