"""Code snapshots of real folders and real git repositories."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path, PurePath

import pytest

import slurmddp
from slurmddp.errors import UserError
from slurmddp.run import git
from slurmddp.run import survey as module
from slurmddp.run.snapshot import code_hash, copy_project, copy_runtime
from slurmddp.run.survey import Survey, largest, survey
from slurmddp.shared.units import human


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
    found = survey(project)
    assert names(found) == expected[1:], "committed by accident: each snapshot would hold those before it"
    assert found.warnings == ["not copied although git tracks files there, because they are runs or caches: runs/a/"]


def test_run_folders_of_own_scripts_and_half_made_ones(project: Path) -> None:
    half = "old/.gpt-20251120-140509-ab12.part/code/x"
    make(project, "old/a/job.sh", "old/a/logs/job.log", "old/b/submission.json", half, "old/.x.part/mine.py")
    for run in ("a", "b"):
        (project / "old" / run / "manifest.json").write_text('{"run": "a", "slurmddp": "0.1.0"}')
    expected = ["env/bin/y.py", "lib/a.py", "old/.x.part/mine.py", "train.py"]
    assert names(survey(project)) == expected
    run_git(project, "init", "-q")
    assert names(survey(project)) == expected
    (project / ".gitignore").write_text("*.json\n")
    assert names(survey(project)) == [".gitignore", *expected], "git lists no manifest, and yet it is a run"


def test_the_runs_root_and_the_cache_are_left_out(project: Path, tmp_path: Path) -> None:
    make(project, "runs/notes.txt", "work/cache/x", "work/keep.py")
    make(tmp_path / "scratch", "big")
    (project / "elsewhere").symlink_to(tmp_path / "scratch")
    (project / "notes").symlink_to("runs/notes.txt")
    exclude = [project / "runs", project / "work" / "cache", tmp_path / "scratch", project, tmp_path]
    expected = ["env/bin/y.py", "lib/a.py", "train.py", "work/keep.py"]
    found = survey(project, exclude=exclude)
    assert names(found) == expected
    assert found.warnings == ["notes: not copied: the link points into the runs folder runs/"]
    (project / "notes").unlink()
    (tmp_path / "alias").symlink_to(project)
    assert names(survey(tmp_path / "alias", exclude=exclude)) == expected, "the same folder by another name"
    (project / "runs").rename(tmp_path / "moved")
    (project / "runs").symlink_to(tmp_path / "moved")
    found = survey(project, exclude=exclude)
    assert (names(found), found.warnings) == (expected, [])
    (project / "runs").unlink()
    (tmp_path / "moved").rename(project / "runs")
    run_git(project, "init", "-q")
    assert names(survey(project, exclude=exclude)) == expected
    run_git(project, "add", "runs/notes.txt")
    found = survey(project, exclude=exclude)
    assert names(found) == expected and "runs/" in found.warnings[0]


SECRETS = (
    ".ssh/id_x", ".ssh/config", "deep/.gnupg/ring", ".aws/credentials", ".netrc", ".env", ".env.local", "a.PEM",
    "deep/b.key", "id_rsa", "id_ed25519_work", "id_ecdsa.old", ".git-credentials", ".pypirc", ".docker/config.json",
    "deep/.huggingface/token", ".npmrc", "deep/.kube/config", "_netrc", "netrc.bak", "my.netrc", "credentials.json",
    "gcloud/application_default_credentials.json", "token", "token.json", "hf_token", "wandb-api-key.txt", "a.token",
)  # fmt: skip
NO_SECRETS = (
    ".env.example", "id_rsa.pub", "id_ed25519.pub", ".docker/Dockerfile", "config.json", "key.py", "token.py",
    "tokenizer.json", "special_tokens.json", "tokens.bin", "tokens/a.py", "tokens.txt", "netrc.py",
    "kube/config",
)  # fmt: skip
NETRC = "# mine\n\nmachine api.wandb.ai\n  login user\n  password 0123\n"


def test_credentials_are_left_out(project: Path) -> None:
    make(project, *SECRETS, *NO_SECRETS, ".env.d/x", "deep/.env/pyvenv.cfg")
    (project / "settings").symlink_to(".env")
    expected = sorted([*NO_SECRETS, "env/bin/y.py", "lib/a.py", "train.py"])
    for step in range(2):
        if step:
            run_git(project, "init", "-q")
        found = survey(project)
        assert names(found) == expected
        assert len(found.warnings) == 1 and "credentials" in found.warnings[0]
        told = set(found.warnings[0].split(": ")[1].split(", "))
        folders = {".ssh/", ".aws/", "deep/.gnupg/", ".env.d/"}
        assert told == {name for name in SECRETS if not name.startswith(tuple(folders))} | folders | {"settings"}
    run_git(project, "add", "--force", ".env", "deep/b.key", "settings")
    found = survey(project)
    assert names(found) == sorted([*expected, ".env", "deep/b.key", "settings"])
    assert [warning.split(":")[-1] for warning in found.warnings if "git tracks" in warning] == [" .env, deep/b.key"]
    assert len(found.warnings) == 2


def test_a_netrc_file_is_left_out_whatever_it_is_called(project: Path) -> None:
    make(project, "logins", "notes.txt", "machine.txt", "README.md", "parse.py")
    (project / "logins").write_text(NETRC)
    (project / "notes.txt").write_text("default login a password b\n")
    (project / "machine.txt").write_text("machine learning is not a password\n" * 100)
    for name in ("README.md", "parse.py"):
        (project / name).write_text(NETRC)
    (project / "link").symlink_to("logins")
    found = survey(project)
    assert names(found) == ["README.md", "env/bin/y.py", "lib/a.py", "machine.txt", "parse.py", "train.py"]
    assert [warning.split(": ")[1] for warning in found.warnings] == ["link, logins (netrc), notes.txt (netrc)"]


def test_credentials_by_content(project: Path) -> None:
    """What git tracks is the user's decision, and code has to be there; both are named."""
    token = "ghp_" + "aB3dE5gH7jK9mN1pQ2rS4tU6vW8xY0zC5fJ7"
    make(project, "notes", "hub.py", "pushed")
    for name in ("notes", "hub.py", "pushed"):
        (project / name).write_text(f"x = '{token}'\n")
    run_git(project, "init", "-q")
    run_git(project, "add", "pushed")
    found = survey(project)
    assert {"hub.py", "pushed"} < set(names(found)) and "notes" not in names(found)
    assert [(text.split(" ")[0], text.rpartition(": ")[2]) for text in found.warnings] == [
        ("not", "notes (GitHub token)"),
        ("copied", "pushed (GitHub token)"),
        ("copied", "hub.py (GitHub token)"),
    ]


def test_how_credentials_are_named(project: Path) -> None:
    make(project, ".env", "certs/a.pem")
    text = "not copied, because they look like credentials (git add them if they are not): .env, certs/a.pem"
    assert survey(project).warnings == [text]
    make(project, *(f"certs/{number}.pem" for number in range(60)))
    assert survey(project).warnings[0].endswith(".pem and 32 more")


def test_images_are_no_code(project: Path) -> None:
    images = [f"images/torch.{end}" for end in ("sif", "sif.def", "sif.build.log", "sif.lock.json", "sqsh", "simg")]
    make(project, *images, "images/torch.def")
    (project / "image").symlink_to("images/torch.sif")
    expected = ["env/bin/y.py", "images/torch.def", "lib/a.py", "train.py"]
    found = survey(project)
    assert (names(found), found.warnings) == (expected, [])
    run_git(project, "init", "-q")
    assert names(survey(project)) == expected
    run_git(project, "add", "images/torch.sif.def")
    assert names(survey(project)) == sorted([*expected, "images/torch.sif.def"])


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
    assert found.warnings == ["empty: empty: this git submodule is not checked out"]


def test_git_that_fails_is_a_warning(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / ".git" / "config").write_text("[core\n")
    found = survey(repository)
    assert "run.log" in names(found)
    assert "without asking git" in found.warnings[0] and "config" in found.warnings[0]
    monkeypatch.setenv("PATH", "/absent")
    assert "git could not be started" in survey(repository).warnings[0]
    with pytest.raises(git.GitError):
        git.state(repository)


def test_a_single_script(project: Path, tmp_path: Path) -> None:
    found = survey(project / "train.py")
    copy_project(found, tmp_path / "copy")
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["train.py"]


def test_a_copy_says_how_far_it_is(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "project").mkdir(exist_ok=True)
        (tmp_path / "project" / name).write_text(name)
    said: list[str] = []
    copy_project(survey(tmp_path / "project"), tmp_path / "copy", said.append)
    assert said == ["copying the code: 0 of 2 files", "copying the code: 1 of 2 files"]


def test_bytes_names_and_modes(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    odd = [b"a b", b"line\nbreak", b"\xff\xfe.py", b"-dash", "ä".encode(), b"quo'te\"", b"sub dir/\xff"]
    (project / "sub dir").mkdir()
    for number, name in enumerate(odd):
        (project / os.fsdecode(name)).write_bytes(bytes(range(256)) * number)
    for step in range(2):
        if step:
            run_git(project, "init", "-q")
        copy = tmp_path / f"copy{step}"
        found = survey(project)
        assert sorted(os.fsencode(item.relative) for item in found.items) == sorted(odd)
        copy_project(found, copy)
        for name in odd:
            path = os.fsdecode(name)
            assert (copy / path).read_bytes() == (project / path).read_bytes()
    assert code_hash(tmp_path / "copy0") == code_hash(tmp_path / "copy1")


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077, 0o002])
def test_a_copy_is_readable_by_no_more_than_its_source(tmp_path: Path, mask: int) -> None:
    project = make(tmp_path / "project", "closed/inner/secret.txt", "group/x", "script", "read_only")
    modes = {
        "": 0o750, "closed": 0o700, "closed/inner": 0o755, "closed/inner/secret.txt": 0o600, "group": 0o2770,
        "group/x": 0o660, "script": 0o4755, "read_only": 0o444,
    }  # fmt: skip
    for name, mode in modes.items():
        (project / name).chmod(mode)
    copy = tmp_path / "copy"
    old = os.umask(mask)
    try:
        copy_project(survey(project), copy)
    finally:
        os.umask(old)
    for name, mode in modes.items():
        owner = 0o700 if (copy / name).is_dir() else 0o600
        assert (copy / name).stat().st_mode & 0o7777 == (mode & 0o755 & ~mask) | owner, name
    (copy / "read_only").write_text("the owner may write")


@pytest.mark.skipif(os.getuid() != 0, reason="giving a folder to another group takes root")
def test_another_group_may_do_what_all_others_may(tmp_path: Path) -> None:
    project = make(tmp_path / "project", "for_group", "for_all")
    for name, mode in (("", 0o755), ("for_group", 0o640), ("for_all", 0o644)):
        (project / name).chmod(mode)
    runs = tmp_path / "runs"
    runs.mkdir()
    os.chown(runs, -1, 4711)
    runs.chmod(0o2775)
    old = os.umask(0o022)
    try:
        copy_project(survey(project), runs / "copy")
    finally:
        os.umask(old)
    modes = [(runs / "copy" / name).stat().st_mode & 0o777 for name in ("", "for_group", "for_all")]
    assert modes == [0o755, 0o600, 0o644]
    assert (runs / "copy" / "for_group").stat().st_gid == 4711


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
    for way_out in ("train.project", ".gitignore", "snapshot: false", "--set snapshot_limit=100M", "1.0 MiB"):
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
    make(package, "shell/node.sh", "causes/cause.rules", "causes/find.py", "shell/python.sh", "shell/README.md")
    make(package, "runtime/train.py", "runtime/tasks/lm.py", "runtime/__pycache__/train.pyc", "runtime/x.txt")
    make(package, "shared/__init__.py", "shared/checkpoint/layout.py", "records/metrics.py")
    copy_runtime(tmp_path / "code", package)
    assert sorted(path.name for path in (tmp_path / "code").iterdir()) == ["python.sh", "slurmddp.zip"]
    with zipfile.ZipFile(tmp_path / "code" / "slurmddp.zip") as archive:
        copied = archive.namelist()
    assert copied == [
        "slurmddp/__init__.py",
        "slurmddp/causes/cause.rules",
        "slurmddp/causes/find.py",
        "slurmddp/records/metrics.py",
        "slurmddp/runtime/__init__.py",
        "slurmddp/runtime/tasks/lm.py",
        "slurmddp/runtime/train.py",
        "slurmddp/shared/__init__.py",
        "slurmddp/shared/checkpoint/layout.py",
        "slurmddp/shell/node.sh",
    ]
    before = (tmp_path / "code" / "slurmddp.zip").read_bytes()
    (package / "runtime/train.py").touch(mode=0o600)
    os.utime(package / "runtime/train.py", (1, 1))
    copy_runtime(tmp_path / "again", package)
    assert (tmp_path / "again" / "slurmddp.zip").read_bytes() == before, "neither times nor modes are in it"


def test_the_installed_runtime(tmp_path: Path) -> None:
    copy_runtime(tmp_path)
    found = zipfile.Path(tmp_path / "slurmddp.zip", "slurmddp/")
    assert (found / "__init__.py").read_text() == Path(slurmddp.__file__).read_text()
    assert (found / "runtime" / "__init__.py").exists()
    assert not (found / "errors.py").exists()


#: What is no module is read out of the archive, too.
READS = "import slurmddp.causes.rules; assert slurmddp.causes.rules.rules().rules\n"


def modules_in(archive: Path, *folders: str) -> list[str]:
    """The modules of these packages in an archive."""
    with zipfile.ZipFile(archive) as files:
        names = [PurePath(name) for name in files.namelist()]
    modules = [path for path in names if path.parts[1] in folders and path.suffix == ".py" and path.name[0] != "_"]
    return [".".join(path.with_suffix("").parts) for path in modules]


def test_what_the_batch_host_runs_imports_under_the_oldest_python(tmp_path: Path) -> None:
    """The batch host of RHEL 8 and SLES 15 has no newer one."""
    found = sorted(Path.home().glob(".pyenv/versions/3.6.*/bin/python3.6"))
    if not found:
        pytest.skip("no Python 3.6 below ~/.pyenv/versions")
    copy_runtime(tmp_path)
    names = modules_in(tmp_path / "slurmddp.zip", "records", "causes", "supervisor")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'slurmddp.zip')!r})\nfor name in {names!r}: __import__(name)\n"
    )
    subprocess.run([found[0], "-I", "-S", "-B", "-c", code + READS], check=True)
    assert {"slurmddp.records.metrics", "slurmddp.causes.find"} <= set(names)


def test_the_copied_shared_modules_import_with_the_standard_library_alone(tmp_path: Path) -> None:
    copy_runtime(tmp_path)
    names = modules_in(tmp_path / "slurmddp.zip", "shared")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'slurmddp.zip')!r})\nfor name in {names!r}: __import__(name)\n"
    )
    # -I and -S: neither this checkout nor any installed package is found.
    subprocess.run([sys.executable, "-I", "-S", "-B", "-c", code], check=True)
    assert "slurmddp.shared.schemas" in names


def test_sizes_for_people(project: Path) -> None:
    assert [human(size) for size in (0, 1023, 1536, 50 * 2**20, 2**31, 2**41)] == [
        "0 B", "1023 B", "1.5 KiB", "50.0 MiB", "2.0 GiB", "2.0 TiB",
    ]  # fmt: skip
    assert largest(Survey(project)) == []
