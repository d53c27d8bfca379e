"""Folders of runs that other users can change, and run folders that they put in the place of ours."""

import os
import stat
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmddp.run.create import shared_folder
from slurmddp.supervisor.files import Files, Foreign
from tests.helpers import ROOT, Desk, Result, change_code, make_code


@pytest.mark.skipif(os.getuid() != 0, reason="giving a folder to another group takes root")
@pytest.mark.parametrize(
    ("mode", "warns"), [(0o2775, True), (0o777, True), (0o3775, False), (0o1777, False), (0o2755, False)]
)
def test_a_folder_that_others_can_change_is_a_warning(tmp_path: Path, mode: int, warns: bool) -> None:
    project = tmp_path / "project"
    (project / "runs").mkdir(parents=True)
    os.chown(project, -1, 4711)
    project.chmod(mode)
    for root in (project, project / "runs", project / "runs" / "absent"):
        said = shared_folder(root)
        assert (said is not None) == warns, root
        assert not said or f"chmod +t {project}, or" in said


def test_submit_warns_of_a_folder_that_others_can_change(desk: Desk, cli: Callable[..., Result]) -> None:
    desk.write("train.py")
    desk.program("sbatch", "#!/bin/bash\necho 7\n")
    (desk.project / "runs").mkdir()
    (desk.project / "runs").chmod(0o777)
    done = cli("submit", "train.py", "--site", "cores", "--time", "10m")
    assert done.code == 0 and f"other users can rename folders in {desk.project}/runs" in done.err, done.err


@pytest.mark.parametrize(("mode", "others"), [("0700", "rw-rw-rw-"), ("0755", "rw-r--r--")])
def test_nobody_else_can_write_to_what_a_job_makes_where_others_can_read(
    desk: Desk, cli: Callable[..., Result], mode: str, others: str
) -> None:
    """A folder of mode 0700 needs no umask."""
    desk.write("train.py")
    ranks = desk.program("ranks", '#!/bin/bash\n[[ $1 == -c ]] || : >"$SLURMDDP_RUN/new"\n')
    words = ("--site", "here", "--quiet", "--set", f"container.python={ranks}", "--set", f"paths.mode={mode}")
    before = os.umask(0)
    try:
        done = cli("run", "train.py", *words)
    finally:
        os.umask(before)
    (run,) = (desk.project / "runs").iterdir()
    assert done.code == 0 and stat.filemode((run / "new").stat().st_mode) == f"-{others}", done.err


def test_a_group_of_the_user_alone_is_no_other(tmp_path: Path) -> None:
    tmp_path.chmod(0o775)
    if tmp_path.stat().st_gid == 0 and os.getuid() == 0:
        assert shared_folder(tmp_path) is None


@pytest.mark.skipif(os.getuid() != 0, reason="giving a folder to another user takes root")
@pytest.mark.parametrize("owner", [0, 65534])
def test_nothing_of_another_users_folder_is_run(tmp_path: Path, owner: int) -> None:
    make_code(tmp_path)
    change_code(tmp_path, "supervisor/__main__.py", lambda _: "import sys; print('ran', flush=True); sys.exit(97)\n")
    os.chown(tmp_path, owner, -1)
    job = ROOT / "tests/golden/kinds/simple-job.sh"
    done = subprocess.run(["bash", str(job), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert ("has another user replaced the run folder?" in done.stderr, "ran" in done.stdout) == (
        owner != 0,
        owner == 0,
    )


def archive(run: Path, main: str, **modules: str) -> Path:
    """A run's archive, whose supervisor has this main() and these modules."""
    path = run / "code/slurmddp.zip"
    path.parent.mkdir(parents=True, exist_ok=True)
    files = {"__init__": "", "supervisor/__init__": "", "supervisor/__main__": main}
    with zipfile.ZipFile(path, "w") as written:
        for name, text in {**files, **{f"supervisor/{name}": text for name, text in modules.items()}}.items():
            written.writestr(f"slurmddp/{name}.py", text)
    return path


def start(path: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    shell = ROOT / "slurmddp/shell/python.sh"
    return subprocess.run(["bash", str(shell), "", str(path), *words], capture_output=True, text=True, check=False)


def test_a_program_that_has_begun_imports_from_the_folder_that_was_looked_at(tmp_path: Path) -> None:
    """python.sh holds it open: another one in its place, at any moment after the look, changes nothing."""
    run, other = tmp_path / "run", tmp_path / "other"
    archive(other, "", part="text = 'a stranger'")
    main = f"import os, sys; os.rename({str(run)!r}, {str(run)!r} + '-ours'); os.rename({str(other)!r}, {str(run)!r})\n"
    main += "def main():\n    from slurmddp.supervisor import part\n    print(part.text, *sys.argv[1:])\n"
    done = start(archive(run, main, part="text = 'ours'"), "job", "a b")
    assert (done.returncode, done.stdout) == (0, "ours job a b\n"), done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="giving a folder to another user takes root")
@pytest.mark.parametrize("owner", [0, 65534, None])
def test_no_program_starts_in_another_users_folder(tmp_path: Path, owner: int | None) -> None:
    path = archive(tmp_path, "def main():\n    print('ran')\n")
    if owner is not None:
        os.chown(tmp_path, owner, -1)
    done = start(path if owner is not None else tmp_path / "gone/code/slurmddp.zip", "job")
    assert (done.returncode, done.stdout) == ((0, "ran\n") if owner == 0 else (98, "")), done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="giving a folder to another user takes root")
def test_no_attempt_starts_in_another_users_folder(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    os.chown(tmp_path, 65534, -1)
    with pytest.raises(Foreign, match=f"{tmp_path} belongs to another user"):
        Files(str(tmp_path)).enter()
    assert not list((tmp_path / "logs").iterdir())
