"""Run folders are made whole or not at all, and closed to others unless a mode says otherwise."""

import errno
import multiprocessing
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from slurmddp.errors import UserError
from slurmddp.run import create as module
from slurmddp.run.create import Draft, create, new_id
from slurmddp.run.layout import RunFolder, attempt_of

FILES = {"job.yaml": "name: gpt\n", "job.sh": "#!/bin/bash\n", "sub/deep/a.txt": "ä\n"}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask() -> Iterator[None]:
    old = os.umask(0o022)
    yield
    os.umask(old)


def test_id() -> None:
    assert re.fullmatch(r"gpt-20251120-140509-[a-z0-9]{4}", new_id("gpt", datetime(2025, 11, 20, 14, 5, 9)))
    assert re.fullmatch(r"a\.b_c-d\+e-\d{8}-\d{6}-[a-z0-9]{4}", new_id("a.b_c-d+e"))


@pytest.mark.parametrize("name", ["", "-x", ".x", "a/b", "a b", "a\n", "$(id)", "a;b", "'", "ä", "x" * 101])
def test_a_name_that_makes_no_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be the name"):
        create(tmp_path / "runs", name, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("umask")
def test_all_that_is_in_it(tmp_path: Path) -> None:
    def fill(draft: Draft) -> None:
        assert draft.folder.path.parent == draft.final.path.parent
        assert not draft.final.path.exists()
        draft.write({"manifest.json": draft.final.id})

    run = create(tmp_path / "a" / "runs", "gpt", FILES, fill=fill)
    assert run.path.parent == tmp_path / "a" / "runs"
    assert run.id.startswith("gpt-")
    assert [path.name for path in run.path.parent.iterdir()] == [run.id], "nothing temporary is left"
    assert {name: (run.path / name).read_text() for name in FILES} == FILES
    assert run.manifest.read_text() == run.id
    assert run.logs.is_dir() and run.markers.is_dir()
    assert (mode(run.job_sh), mode(run.job_yaml), mode(run.path)) == (0o755, 0o644, 0o700)
    assert mode(run.path.parent) == 0o755, "the folder of all runs is the user's own matter"
    assert mode(create(tmp_path / "runs", "gpt", FILES, mode=0o750).path) == 0o750


def test_same_second_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = iter(["gpt-1", "gpt-1", "gpt-1", "gpt-1", "gpt-2"])
    monkeypatch.setattr(module, "new_id", lambda name, now=None: next(ids))
    first = create(tmp_path, "gpt", {})  # takes two ids: the first only checks the name
    second = create(tmp_path, "gpt", {})
    assert (first.id, second.id) == ("gpt-1", "gpt-2")


def test_two_at_once_never_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = iter(["gpt-1", "gpt-1", "gpt-1", "gpt-1", "gpt-2"])
    monkeypatch.setattr(module, "new_id", lambda name, now=None: next(ids))
    with Draft(tmp_path, "gpt") as first, Draft(tmp_path, "gpt") as second:
        assert (first.commit().id, second.commit().id) == ("gpt-1", "gpt-2")


@pytest.mark.parametrize("kind", [RuntimeError, UserError, KeyboardInterrupt])
def test_a_failure_leaves_nothing(tmp_path: Path, kind: "type[BaseException]") -> None:
    def fill(draft: Draft) -> None:
        raise kind("no")

    with pytest.raises(kind):
        create(tmp_path / "a" / "runs", "gpt", FILES, fill=fill)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs").mkdir()
    with pytest.raises(kind):
        create(tmp_path / "runs", "gpt", FILES, fill=fill)
    assert list((tmp_path / "runs").iterdir()) == [], "a root that was there stays"


def test_nothing_outside_the_folder(tmp_path: Path) -> None:
    for name in ("../x", "/tmp/x", "a/../../x"):
        with pytest.raises(ValueError, match="not inside"):
            create(tmp_path, "gpt", {name: ""})


@pytest.mark.skipif(os.getuid() != 0, reason="giving a folder to another group takes root")
@pytest.mark.parametrize(
    ("mask", "folder", "file", "script"),
    [(0o022, 0o2755, 0o644, 0o755), (0o027, 0o2750, 0o640, 0o750), (0o002, 0o2755, 0o644, 0o755)],
)
def test_group_and_setgid_of_the_parent(tmp_path: Path, mask: int, folder: int, file: int, script: int) -> None:
    parent = tmp_path / "project"
    parent.mkdir()
    os.chown(parent, -1, 4711)
    parent.chmod(0o2775)
    old = os.umask(mask)
    try:
        run = create(parent / "runs", "gpt", FILES)
    finally:
        os.umask(old)
    assert (mode(run.path), run.path.stat().st_gid) == (0o2700, 4711)
    folders = [run.path.parent, run.logs, run.path / "sub", run.path / "sub" / "deep"]
    assert {(mode(path), path.stat().st_gid) for path in folders} == {(folder, 4711)}
    assert (mode(run.job_yaml), run.job_yaml.stat().st_gid) == (file, 4711)
    assert mode(run.job_sh) == script


def test_the_root_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "runs"):
        with pytest.raises(UserError) as error:
            create(root, "gpt", {})
        assert str(tmp_path / "file") in str(error.value)
        assert "--set paths.runs=" in str(error.value)
    (tmp_path / "link").symlink_to("absent")
    with pytest.raises(UserError, match=r"--set paths\.runs="):
        create(tmp_path / "link", "gpt", {})


def create_without_rights(root: str, answer: Connection) -> None:
    if os.getuid() == 0:  # root may write everywhere
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    try:
        create(Path(root), "gpt", {})
        answer.send("no error")
    except UserError as error:
        answer.send(str(error))


def test_no_write_permission() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    # Below /usr: pytest's own folders are closed to other users, which would be another error.
    child = context.Process(target=create_without_rights, args=("/usr/slurmddp-runs", theirs))
    child.start()
    message = ours.recv()
    child.join()
    assert "/usr/slurmddp-runs: Permission denied" in message
    assert "--set paths.runs=" in message


@pytest.mark.skipif(os.getuid() != 0, reason="mounting a small file system takes root")
@pytest.mark.parametrize("during", ["texts", "snapshot"])
def test_disk_full(tmp_path: Path, during: str) -> None:
    if subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "x", str(tmp_path)], check=False).returncode:
        pytest.skip("mounting is not allowed here")
    program = (
        "import sys; from pathlib import Path\nfrom slurmddp.run.create import create\n"
        "from slurmddp.errors import UserError\nfrom slurmddp.run.snapshot import copy_project\n"
        "from slurmddp.run.survey import survey\nroot, project = map(Path, sys.argv[1:])\n"
        "def fill(draft):\n    copy_project(survey(project), draft.folder.project)\n"
        "texts = {} if project.name == 'snapshot' else {'big': 'x' * 2**20}\n"
        "try:\n    create(root / 'runs', 'gpt', texts, fill=fill)\n"
        "except UserError as error:\n    print(error)\nprint(list(root.iterdir()))"
    )
    root, project = tmp_path / "disk", tmp_path / during
    root.mkdir()
    project.mkdir()
    (project / "big.py").write_bytes(b"x" * 2**20)
    script = 'mount -t tmpfs -o size=64k small "$1" && exec "$3" -c "$4" "$1" "$2"'
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", script, "bash", str(root), str(project), sys.executable, program],
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )
    assert "No space left on device" in done.stdout
    assert "--set paths.runs=" in done.stdout
    assert done.stdout.endswith("[]\n"), "nothing is left"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE])
def test_every_error_of_the_file_system_is_the_users(tmp_path: Path, number: int) -> None:
    def fill(draft: Draft) -> None:
        raise OSError(number, os.strerror(number))

    with pytest.raises(UserError, match="the run folder cannot be written") as error:
        create(tmp_path / "runs", "gpt", FILES, fill=fill)
    assert f"{tmp_path}/runs/gpt-" in str(error.value) and "--set paths.runs=" in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_layout(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.attempt_logs(2) == tmp_path / "logs" / "attempt-002"
    assert run.marker(0) == tmp_path / "markers" / "attempt-000.json"
    assert [attempt_of(run.marker(n)) for n in (0, 12, 1234)] == [0, 12, 1234]
    assert attempt_of(tmp_path / "attempt-1.json.part") is None


def test_a_runs_folder_that_we_make_in_a_work_tree_is_ignored_by_git(tmp_path: Path) -> None:
    for name in ("repository", "plain"):
        (tmp_path / name).mkdir()
    (tmp_path / "repository" / ".git").mkdir()
    create(tmp_path / "repository" / "runs", "gpt", {})
    create(tmp_path / "plain" / "runs", "gpt", {})
    assert (tmp_path / "repository" / "runs" / ".gitignore").read_text() == "*\n"
    assert not (tmp_path / "plain" / "runs" / ".gitignore").exists()
    for text in ("!kept\n", None):  # the user's own answer stays
        ignore = tmp_path / "repository" / "runs" / ".gitignore"
        ignore.write_text(text) if text else ignore.unlink()
        create(tmp_path / "repository" / "runs", "gpt", {})
        assert (ignore.read_text() if ignore.exists() else None) == text
