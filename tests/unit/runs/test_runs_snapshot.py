"""Code snapshots of real folders and real git repositories."""

import os
import subprocess
from pathlib import Path

import pytest

import slurmddp
from slurmddp.errors import UserError
from slurmddp.runs import git
from slurmddp.runs import survey as module
from slurmddp.runs.snapshot import code_hash, copy_project, copy_runtime
from slurmddp.runs.survey import Survey, human, largest, survey


def run_git(folder: Path, *arguments: str) -> None:
    names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", *names, *arguments], cwd=folder, check=True, capture_output=True)


def make(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
    return root


def names(found: Survey) -> list[str]:
    return sorted(item.relative for item in found.items)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    return make(root, "train.py", "lib/a.py", "lib/__pycache__/a.pyc", "b.pyc", "venv/x.py", "env/bin/y.py")


@pytest.fixture
def repository(project: Path) -> Path:
    run_git(project, "init", "-q")
    (project / ".gitignore").write_text("*.log\n/data/\n")
    make(project, "run.log", "data/x.bin", "tracked.log")
    run_git(project, "add", "train.py", ".gitignore")
    run_git(project, "add", "--force", "tracked.log")
    run_git(project, "commit", "-q", "-m", "x")
    return project


def test_without_git(project: Path) -> None:
    make(project, "env/pyvenv.cfg", ".cache/x", "node_modules/x.js", ".hidden")
    assert names(survey(project)) == [".hidden", "lib/a.py", "train.py"]


def test_run_folders_are_left_out(project: Path) -> None:
    make(project, "runs/a/checkpoints/x", "mine/job.json")
    (project / "runs/a/manifest.json").write_text('{"run": "a", "slurmddp": "0.1.0"}')
    (project / "runs/a/job.json").write_text("{}")
    (project / "mine/manifest.json").write_text('{"name": "a web app"}')
    expected = ["env/bin/y.py", "lib/a.py", "mine/job.json", "mine/manifest.json", "train.py"]
    assert names(survey(project)) == expected
    run_git(project, "init", "-q")
    make(project, "env/pyvenv.cfg")
    assert names(survey(project)) == expected[1:]
    run_git(project, "add", "runs/a/checkpoints/x")
    assert "runs/a/checkpoints/x" in names(survey(project)), "what git tracks, the user wants"


def test_with_git(repository: Path) -> None:
    expected = [".gitignore", "env/bin/y.py", "lib/a.py", "tracked.log", "train.py"]
    assert names(survey(repository)) == expected
    (repository / "train.py").unlink()
    assert names(survey(repository)) == expected[:-1], "tracked and deleted"
    assert names(survey(repository / "lib")) == ["a.py"], "only what lies below the project"


def test_git_is_not_led_elsewhere(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    other.mkdir()
    run_git(other, "init", "-q")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / "index"))
    assert "tracked.log" in names(survey(repository))


def test_a_project_that_git_ignores(repository: Path) -> None:
    assert names(survey(repository / "data")) == ["x.bin"], "an empty snapshot would be of no use"


def test_submodules_and_nested_repositories(repository: Path, tmp_path: Path) -> None:
    library = make(tmp_path / "library", "lib.py", "lib.log")
    run_git(library, "init", "-q")
    run_git(library, "add", "lib.py")
    run_git(library, "commit", "-q", "-m", "x")
    run_git(repository, "submodule", "--quiet", "add", str(library), "sub")
    run_git(repository, "submodule", "--quiet", "add", str(library), "empty")
    run_git(repository, "submodule", "--quiet", "deinit", "--force", "empty")
    run_git(repository, "clone", "-q", str(library), "nested")
    make(repository, "nested/new.py")
    found = survey(repository)
    assert {"sub/lib.py", "nested/lib.py", "nested/new.py"} < set(names(found))
    assert not any(name.startswith("empty") for name in names(found))
    assert found.warnings == ["empty: empty, this git submodule is not checked out"]


def test_git_that_fails_is_a_warning(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / ".git" / "config").write_text("[core\n")
    found = survey(repository)
    assert "run.log" in names(found)
    assert "without git" in found.warnings[0] and "config" in found.warnings[0]
    monkeypatch.setenv("PATH", "/absent")
    assert "git could not be started" in survey(repository).warnings[0]
    with pytest.raises(git.GitError):
        git.state(repository)


def test_a_single_script(project: Path, tmp_path: Path) -> None:
    found = survey(project / "train.py")
    copy_project(found, tmp_path / "copy")
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["train.py"]


def test_bytes_names_and_modes(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    odd = [b"a b", b"line\nbreak", b"\xff\xfe.py", b"-dash", "ä".encode(), b"quo'te\"", b"sub dir/\xff"]
    (project / "sub dir").mkdir()
    for number, name in enumerate(odd):
        (project / os.fsdecode(name)).write_bytes(bytes(range(256)) * number)
    (project / "a b").chmod(0o700)
    (project / "-dash").chmod(0o600)
    for step in range(2):
        if step:
            run_git(project, "init", "-q")
        copy = tmp_path / f"copy{step}"
        found = survey(project)
        assert sorted(os.fsencode(item.relative) for item in found.items) == sorted(odd)
        old = os.umask(0o027)
        try:
            copy_project(found, copy)
        finally:
            os.umask(old)
        for name in odd:
            path = os.fsdecode(name)
            assert (copy / path).read_bytes() == (project / path).read_bytes()
        assert (copy / "a b").stat().st_mode & 0o777 == 0o750, "the x bit is kept, the rest is the umask's"
        assert (copy / "-dash").stat().st_mode & 0o777 == 0o640
    assert code_hash(tmp_path / "copy0") == code_hash(tmp_path / "copy1")


def test_links(project: Path, tmp_path: Path) -> None:
    outside = make(tmp_path / "outside", "data.bin")
    (project / "in.py").symlink_to("lib/a.py")
    (project / "absolute.py").symlink_to(project / "train.py")
    (project / "lib" / "up").symlink_to("..")
    (project / "folder").symlink_to(project / "lib")
    (project / "hidden").symlink_to("venv")
    (project / "self").symlink_to("self")
    (project / "dangling").symlink_to("absent")
    (project / "file").symlink_to(outside / "data.bin")
    (project / "dataset").symlink_to(outside)
    os.mkfifo(project / "pipe")
    found = survey(project)
    copy = tmp_path / "copy"
    copy_project(found, copy)
    project.rename(tmp_path / "gone")
    assert (copy / "in.py").read_text() == "# lib/a.py\n" and not (copy / "in.py").is_symlink()
    assert (copy / "absolute.py").read_text() == "# train.py\n"
    assert (copy / "folder" / "a.py").read_text() == "# lib/a.py\n"
    assert (copy / "lib" / "up" / "train.py").exists()
    assert (copy / "folder").readlink() == Path("lib")
    warned = sorted(warning.split(":")[0] for warning in found.warnings)
    assert warned == ["dangling", "dataset", "file", "hidden", "pipe", "self"]
    assert not any((copy / name).exists() or (copy / name).is_symlink() for name in warned)
    assert str(outside) in "".join(found.warnings)


def test_the_size_limit_names_what_is_large(project: Path) -> None:
    (project / "weights.bin").write_bytes(b"x" * 3_000_000)
    for number in range(4):
        make(project, f"notebooks/{number}.ipynb")
        (project / f"notebooks/{number}.ipynb").write_bytes(b"x" * 500_000)
    (project / "lib" / "big.npy").write_bytes(b"x" * 1_000_000)
    with pytest.raises(UserError) as error:
        survey(project, limit=2**20)
    text = str(error.value)
    lines = [line.split() for line in text.splitlines() if line.startswith("    ")]
    assert lines[0] == ["2.9", "MiB", "weights.bin"]
    assert lines[1] == ["1.9", "MiB", "notebooks/", "(4", "files)"]
    assert lines[2] == ["976.6", "KiB", "lib/big.npy"]
    assert len(lines) <= 5
    for way_out in ("train.project", ".gitignore", "snapshot: false", "snapshot_limit", "1.0 MiB"):
        assert way_out in text
    assert survey(project, limit=10**8).size > 6_000_000


def test_a_huge_folder_is_given_up_early(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(60):
        make(project, f"many/{number}.txt")
    with pytest.raises(UserError, match="more than 50 files") as error:
        survey(project, max_files=50)
    assert "many/" in str(error.value)
    run_git(project, "init", "-q")
    with pytest.raises(UserError, match="more than 50 files"):
        survey(project, max_files=50)
    monkeypatch.setattr(module, "_GIT_TIMEOUT", 1e-6)
    with pytest.raises(UserError, match="too many files"):
        survey(project)


def test_no_such_project(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train\.project"):
        survey(tmp_path / "absent")


def test_files_that_vanish_are_no_error(project: Path, tmp_path: Path) -> None:
    found = survey(project)
    (project / "train.py").unlink()
    copy_project(found, tmp_path / "copy")
    assert not (tmp_path / "copy" / "train.py").exists()


def test_code_hash(project: Path) -> None:
    before = code_hash(project)
    make(project, "lib/__pycache__/new.pyc")
    assert code_hash(project) == before, "Python writes its caches while the job runs"
    (project / "lib" / "a.py").rename(project / "lib" / "b.py")
    renamed = code_hash(project)
    (project / "lib" / "b.py").write_text("other")
    assert len({before, renamed, code_hash(project)}) == 3


def test_runtime(tmp_path: Path) -> None:
    package = make(tmp_path / "slurmddp", "__init__.py", "errors.py", "cli/app.py", "runtime/__init__.py")
    make(package, "runtime/train.py", "runtime/tasks/lm.py", "runtime/__pycache__/train.pyc", "runtime/x.txt")
    copy_runtime(tmp_path / "code" / "slurmddp", package)
    copied = sorted(str(path.relative_to(tmp_path / "code")) for path in (tmp_path / "code").rglob("*.*"))
    assert copied == [
        "slurmddp/__init__.py",
        "slurmddp/runtime/__init__.py",
        "slurmddp/runtime/tasks/lm.py",
        "slurmddp/runtime/train.py",
    ]


def test_the_installed_runtime(tmp_path: Path) -> None:
    copy_runtime(tmp_path / "slurmddp")
    assert (tmp_path / "slurmddp" / "__init__.py").read_text() == Path(slurmddp.__file__).read_text()
    assert (tmp_path / "slurmddp" / "runtime" / "__init__.py").exists()
    assert not (tmp_path / "slurmddp" / "errors.py").exists()


def test_sizes_for_people(project: Path) -> None:
    assert [human(size) for size in (0, 1023, 1536, 50 * 2**20, 2**31, 2**41)] == [
        "0 B", "1023 B", "1.5 KiB", "50.0 MiB", "2.0 GiB", "2.0 TiB",
    ]  # fmt: skip
    assert largest(Survey(project)) == []
