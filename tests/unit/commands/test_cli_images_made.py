"""`slurmddp build-image`: what an image and its lock tell of where they come from, also once they were moved."""

import json
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmddp.images.provenance import lock_path
from slurmddp.images.registry.documents import ARCHITECTURES
from tests.helpers import LM_JOB, Desk, Result
from tests.registry import Registry

Cli = Callable[..., Result]

#: What stands for Apptainer. `exec` runs what it is given with the PATH in the file IMAGE_RUNS, if there is one.
APPTAINER = r"""#!/bin/bash
case $1 in
  --version) echo "apptainer version 1.4.5-1" ;;
  inspect) echo '{"data": {"attributes": {"labels": {}}}, "type": "container"}' ;;
  exec)
    [ -e "$HOME/IMAGE_RUNS" ] || exit 255
    echo "$*" >> "$HOME/execs"
    until [ -f "$1" ]; do shift; done
    shift; PATH=$(<"$HOME/IMAGE_RUNS") "$@" ;;
  build) image=${@: -2:1}; printf '#!/usr/bin/env run-singularity\n\0SIF_MAGIC\00001\00000\0' > $image ;;
esac
"""
PYTHON = """#!/bin/sh
[ "$*" = "-m pip freeze --all" ] || exit 1
printf 'einops==0.8.1\\npip==26.0\\n'
"""


@pytest.fixture
def bench(desk: Desk) -> Desk:
    desk.program("apptainer", APPTAINER)
    (desk.project / "base.sif").write_bytes(b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\00001\00000\0")
    desk.write("recipes/mine.yaml", "base: ../base.sif\n")
    return desk


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with Registry.started(tmp_path / "registry") as running:
        yield running


@pytest.fixture
def build(bench: Desk, cli: Cli) -> Callable[..., tuple[str, dict[str, Any], str]]:
    """The definition, the lock, and what was said."""

    def run(*arguments: str, **variables: str) -> tuple[str, dict[str, Any], str]:
        done = cli("build-image", *arguments, **variables)
        assert done.code == 0, done.err
        image = Path(done.out.strip())
        return Path(f"{image}.def").read_text(), json.loads(lock_path(image).read_text()), done.err

    return run


def git(folder: Path, *words: str) -> str:
    person = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    command = ["git", "-C", str(folder), *person, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_of_a_recipe(bench: Desk, build: Callable[..., Any], cli: Cli) -> None:
    definition, lock, _ = build("--recipe", "recipes/mine.yaml")
    assert "slurmddp.commit" not in definition and lock["commit"] is None, "it is in no repository"

    recipes = bench.project / "recipes"
    git(recipes, "init", "-q")
    git(recipes, "add", ".")
    git(recipes, "commit", "-qm", "x")
    commit = git(recipes, "rev-parse", "HEAD")
    again = cli("build-image", "--recipe", "recipes/mine.yaml")
    assert "up to date" in again.err, "a commit changes nothing in the image"
    definition, lock, _ = build("--recipe", "recipes/mine.yaml", "--force")
    assert f"    slurmddp.commit {commit}\n" in definition and lock["commit"] == commit
    bench.write("recipes/new.sh", "")
    definition, lock, _ = build("--recipe", "recipes/mine.yaml", "--force")
    assert f"    slurmddp.commit {commit}-dirty\n" in definition and lock["commit"] == f"{commit}-dirty"
    # Where the command is given is not where the recipe lies; a shipped recipe is told by slurmddp's version.
    git(bench.project, "init", "-q")
    git(bench.project, "commit", "-qm", "x", "--allow-empty")
    assert build("--base", "base.sif")[1]["commit"] is None
    assert build("--recipe", "cpu-debian", "--base", "base.sif")[1]["commit"] is None
    assert build("--recipe", "recipes/mine.yaml", "--force")[1]["commit"] == f"{commit}-dirty"


def test_git_that_is_broken_or_absent_does_not_matter(bench: Desk, build: Callable[..., Any]) -> None:
    (bench.project / ".git").mkdir()
    assert build("--recipe", "recipes/mine.yaml")[1]["commit"] is None
    bench.program("git", "#!/bin/sh\nexit 127\n")
    assert build("--recipe", "recipes/mine.yaml", "--force")[1]["commit"] is None


def dockerfile(bench: Desk, registry: Registry, text: str, tag: str = "1") -> str:
    bench.write("docker/Dockerfile", f"FROM {registry.reference('lab/a', tag)}\n{text}")
    return "docker/Dockerfile"


def push(registry: Registry, tag: str = "1", **config: Any) -> str:
    here = ARCHITECTURES.get(platform.machine(), platform.machine())
    return registry.push("lab/a", tag, {"architecture": here, "config": config}).digest


def test_what_a_dockerfiles_image_is_told_of(
    bench: Desk, registry: Registry, build: Callable[..., Any], tmp_path: Path
) -> None:
    digest = push(registry)
    path = dockerfile(bench, registry, "LABEL a=b\n")
    git(bench.project, "init", "-q")
    git(bench.project, "add", "docker")
    git(bench.project, "commit", "-qm", "x")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "python3").write_text(PYTHON)
    (inside / "python3").chmod(0o755)
    (bench.home / "IMAGE_RUNS").write_text(f"{inside}:/usr/bin:/bin")
    definition, lock, _ = build("--dockerfile", path)
    assert f"    slurmddp.digest {digest}\n" in definition
    assert lock["commit"] == git(bench.project, "rev-parse", "HEAD") and f"commit {lock['commit']}\n" in definition
    assert lock["packages"] == ["einops==0.8.1", "pip==26.0"]
    (call,) = (bench.home / "execs").read_text().splitlines()
    assert call.startswith("exec --contain --no-home --cleanenv ") and call.endswith(" python3 -m pip freeze --all")


def test_an_image_without_pip_or_one_that_cannot_run_foreground_has_no_list(
    bench: Desk, registry: Registry, build: Callable[..., Any], tmp_path: Path
) -> None:
    push(registry)
    path = dockerfile(bench, registry, "LABEL a=b\n")
    assert build("--dockerfile", path)[1]["packages"] is None
    (tmp_path / "empty").mkdir()
    (bench.home / "IMAGE_RUNS").write_text(str(tmp_path / "empty"))
    assert build("--dockerfile", path, "--force")[1]["packages"] is None


def test_the_bases_own_workdir_and_entrypoint_are_had_from_its_registry(
    bench: Desk, registry: Registry, build: Callable[..., Any], cli: Cli
) -> None:
    push(registry, WorkingDir="/srv/app", Entrypoint=["/bin/begin", "two words"], User="1000")
    path = dockerfile(bench, registry, 'WORKDIR sub\nRUN touch x\nCMD ["run"]\n')
    shown = cli("build-image", "--dockerfile", path, "--dry-run")  # asks no registry
    assert "'sub' begins at / here; a WORKDIR of the base image" in shown.err and "mkdir -p /sub" in shown.out
    assert "assumed: its SHELL is /bin/sh, there is no ENTRYPOINT before CMD" in shown.err

    definition, lock, said = build("--dockerfile", path)
    assert (
        "(owner=1000:1000 && folder /srv/app/sub)" in definition and "exec /bin/begin 'two words' \"$@\"" in definition
    )
    assert "begins at / here" not in said and "assumed: " not in said
    assert (
        "sets USER 1000, which applies to RUN as in Docker" in said
        and "as 3 1000 '' /bin/sh -c 'touch x'" in definition
    )
    assert cli("build-image", "--dockerfile", path).err.startswith("up to date"), "its inputs are what they were"
    assert lock["inputs"]["parts"]["definition"]


def test_a_base_without_workdir_and_entrypoint(bench: Desk, registry: Registry, build: Callable[..., Any]) -> None:
    push(registry)
    definition, _, said = build("--dockerfile", dockerfile(bench, registry, 'WORKDIR sub\nCMD ["run"]\n'))
    assert "mkdir -p /sub" in definition and 'exec "$@"' in definition
    assert "WORKDIR" not in said and "ENTRYPOINT" not in said, "there is nothing that is not known"


@pytest.mark.parametrize("way", ["cp -p {} there", "rsync -a {} there", "tar -cf - {} | tar -xf - -C there"])
def test_a_moved_image_keeps_its_lock(bench: Desk, build: Callable[..., Any], cli: Cli, way: str) -> None:
    program = way.split()[0]
    if not shutil.which(program):
        print(f"{program} is not installed")
        pytest.skip(f"{program} is not installed")
    build("mine.sif", "--base", "base.sif")
    (bench.project / "there").mkdir()
    names = "mine.sif mine.sif.lock.json mine.sif.def"
    subprocess.run(["sh", "-c", way.format(names)], check=True, cwd=bench.project)
    shown = cli("image", "inspect", "there/mine.sif").out
    assert "state     matches its lock file" in shown and "recipe    image" in shown
    assert json.loads(cli("image", "inspect", "there/mine.sif", "--json").out)["lock"]["base"].endswith("base.sif")


def test_a_copy_without_its_time_or_its_lock_is_told(bench: Desk, build: Callable[..., Any], cli: Cli) -> None:
    build("mine.sif", "--base", "base.sif")
    (bench.project / "there").mkdir()
    subprocess.run(["cp", "mine.sif", "mine.sif.lock.json", "there"], check=True, cwd=bench.project)
    shown = cli("image", "inspect", "there/mine.sif").out
    assert "copied without its modification time (use cp -p or rsync -a)" in shown and "recipe" not in shown
    (bench.project / "there/mine.sif.lock.json").unlink()
    assert "or .lock.json was not copied with it" in cli("image", "inspect", "there/mine.sif").out


def test_an_image_as_the_job_file_says(bench: Desk, build: Callable[..., Any], cli: Cli) -> None:
    job = LM_JOB + "container: {image: here/it.sif, recipe: recipes/mine.yaml, pip: [einops]}\n"
    bench.write("job.yaml", job)
    bench.write("books/a.txt", "text")
    missing = cli("submit", "job.yaml")
    assert missing.code == 2 and "build it: slurmddp build-image --job JOB.yaml" in missing.err
    definition, lock, _ = build("--job", "job.yaml", "--pip", "rich")
    assert (bench.project / "here/it.sif").is_file() and lock["recipe"] == "mine"
    assert "einops" in definition and "rich" in definition
    assert cli("check", "job.yaml", "--write", "out").code == 0
    assert "einops" in (bench.project / "out/image.def").read_text()
    elsewhere = cli("build-image", "other.sif", "--job", "job.yaml", "--base", "25.04", "--dry-run")
    assert "From: nvcr.io/nvidia/pytorch:25.04-py3" in elsewhere.out


def test_a_job_file_that_does_not_say_what_its_image_is_made_from(bench: Desk, cli: Cli) -> None:
    bench.write("job.yaml", LM_JOB)
    done = cli("build-image", "--job", "job.yaml")
    assert done.code == 2 and "neither container.recipe nor container.base is set" in done.err
    assert "job.yaml" in done.err and "{recipe: ngc-pytorch}" in done.err
    done = cli("build-image", "--job", "nowhere.yaml")
    assert done.code == 2 and "nowhere.yaml" in done.err
