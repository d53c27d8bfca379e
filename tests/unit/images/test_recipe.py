"""Recipes: the shipped ones, a user's own, the command line over them, and what each mistake is answered with."""

import os
from pathlib import Path

import pytest

from slurmddp.errors import UserError
from slurmddp.images.definition import render_definition
from slurmddp.images.recipe import read_recipe, recipe_names
from tests.helpers import refusal


def refused(recipe: str | None, folder: Path, **options: object) -> str:
    with pytest.raises(UserError) as caught:
        read_recipe(recipe, options, folder, {})
    return refusal(caught.value).replace(f"{folder}/", "")


def test_the_shipped_ones() -> None:
    assert recipe_names() == ["cpu-debian", "ngc-pytorch", "ngc-pytorch-ofed"]
    for name in recipe_names():
        image = read_recipe(name, {}, Path("/"), {})
        assert image.name == name and image.title
        assert f"slurmddp.recipe {name}" in render_definition(image, "1")
    assert read_recipe("ngc-pytorch", {}, Path("/"), {}).base.release is not None


def test_the_command_line_over_a_recipe(tmp_path: Path) -> None:
    image = read_recipe("cpu-debian", {"base": "25.06", "apt": ["git"], "pip": ("einops",)}, tmp_path, {})
    assert image.base.source == "nvcr.io/nvidia/pytorch:25.06-py3"
    assert image.apt[-1] == "git" and "python3" in image.apt
    assert image.pip == ("torch==2.13.0", "numpy", "einops")


def test_a_recipe_of_ones_own(tmp_path: Path) -> None:
    own = tmp_path / "images"
    (own / "src").mkdir(parents=True)
    (own / "wanted.txt").write_text("einops # a comment\n--index-url https://example.org/simple\n")
    (own / "mine.yaml").write_text(
        "base: 25.04\nrequirements: wanted.txt\nfiles: ['src:/opt/src', {source: $WHERE/x, destination: /opt/x}]\n"
        "environment: {LEVEL: 03, EMPTY: ''}\nsetup:\n- |\n  make\n  make install\nlabels: {team: us}\n"
    )
    (tmp_path / "x").write_text("x")
    image = read_recipe("images/mine.yaml", {}, tmp_path, {"WHERE": str(tmp_path)}, allow_files=True)
    assert image.name == "mine"
    assert image.requirements == own / "wanted.txt"
    assert image.files == ((own / "src", "/opt/src"), (tmp_path / "x", "/opt/x"))
    assert image.environment == (("LEVEL", "03"), ("EMPTY", ""))
    assert image.setup == ("make\nmake install",)
    assert image.sources == (own / "src", tmp_path / "x", own / "wanted.txt")


def test_relative_paths_of_the_command_line_begin_here(tmp_path: Path) -> None:
    (tmp_path / "wanted.txt").write_text("einops\n")
    image = read_recipe("ngc-pytorch", {"requirements": "wanted.txt"}, tmp_path, {})
    assert image.requirements == tmp_path / "wanted.txt"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("apt: [git]", "base: is missing"),
        ("base: 25.04\nbass: 1", "mine.yaml:2: bass: unknown key\n  -> did you mean base?"),
        ("base: 25.04\napt: [git-]", "'git-' is not a Debian package"),
        ("base: 25.04\napt: ['git; rm']", "is not a Debian package"),
        ("base: 25.04\npip: [./here]", "mine.yaml:2: './here' is an option or a path"),
        ("base: 25.04\nfiles: [a]", "must be source:destination"),
        ("base: 25.04\nfiles: ['a:b']", "must be an absolute path in the image"),
        ("base: 25.04\nfiles: ['a:/tmp/b']", "which the build replaces"),
        ("base: 25.04\nfiles: ['gone:/opt/b']", "gone does not exist"),
        ("base: 25.04\nsetup: ['make', '%post']", "mine.yaml:2: setup.1: '%post' has a line that begins with '%'"),
        ("base: 25.04\nsetup: ['echo {{ x }}']", "would read as a build argument"),
        ("base: 25.04\nenvironment: {A: '{{ x }}'}", "sets A, which contains '{{'"),
        ("base: 25.04\nlabels: {'a b': c}", "must be letters, digits"),
        ("base: 25.04\ninstaller: conda", "must be one of 'pip' or 'uv'"),
        ("base: 25.04\nrequirements: gone.txt", "mine.yaml:2: the file gone.txt does not exist"),
        ("base: 25.04\nrequirements: pipe", "mine.yaml:2: pipe is neither a file nor a folder"),
        ("base: 25.04\nfiles: ['pipe:/opt/b']", "pipe is neither a file nor a folder"),
        ("base: 25.04\nfiles: ['$(id):/opt/b']", "$(id)' contains a character that Apptainer's %files"),
        ("base: 25.04\nfiles: ['`id`:/opt/b']", "`id`' contains a character that Apptainer's %files does not accept"),
        ("base: 25.04\nfiles: [\"a\\nb:/opt/b\"]", "contains a line break or control character"),
        ("base: 25.04\nindex: 'https://me:word@example.org/simple'", "yaml:2: the index address contains a user "
        "name or"),
        ("base: 25.04\nindex: 'https://token@example.org/simple'", "yaml:2: the index address contains a user name or"),
        ("base: 25.04\nrequirements: nested.txt", "nested.txt:2: '-r other.txt' refers to a file that is not"),
        ("base: 25.04\nrequirements: token.txt", "token.txt:1: contains a user name or password"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    for name in ("a", "a\nb", "`id`", "$(id)"):
        (tmp_path / name).write_text("")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "nested.txt").write_text("einops\n-r other.txt\n")
    (tmp_path / "token.txt").write_text("--index-url https://me:word@example.org\n")
    (tmp_path / "mine.yaml").write_text(text + "\n")
    assert words in refused("mine.yaml", tmp_path)


@pytest.mark.parametrize(
    "key", ["files: ['../secret:/x']", "files: ['link:/x']", "files: ['src:/x']", "files: ['SECRET:/x']",
            "requirements: ../secret", "requirements: link"],
)  # fmt: skip
def test_a_recipe_copies_only_what_is_below_its_folder(tmp_path: Path, key: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("einops\n")
    own = tmp_path / "downloaded"
    (own / "src/deep").mkdir(parents=True)
    (own / "link").symlink_to(secret)
    (own / "src/deep/link").symlink_to("../../../secret")
    (own / "mine.yaml").write_text(f"base: 25.04\n{key.replace('SECRET', str(secret))}\n")
    found = refused("downloaded/mine.yaml", tmp_path)
    assert "is outside the recipe's folder" in found and "secret" in found and "--allow-files" in found
    image = read_recipe("downloaded/mine.yaml", {}, tmp_path, {}, allow_files=True)
    assert image.sources

    # Its own files, and links among them, are the recipe's to give; so is a file that the command line names.
    (own / "link").unlink()
    (own / "link").symlink_to("src/deep")
    (own / "src/deep/link").unlink()
    (own / "mine.yaml").write_text("base: 25.04\nfiles: ['link:/x', 'src:/y']\n")
    assert len(read_recipe("downloaded/mine.yaml", {}, tmp_path, {}).files) == 2
    image = read_recipe("downloaded/mine.yaml", {"requirements": "secret"}, tmp_path, {})
    assert image.requirements == secret


def test_an_unknown_recipe_and_a_missing_file(tmp_path: Path) -> None:
    assert "ngc-pytorch" in refused("ngc-pytorh", tmp_path)
    assert refused("./mine.yaml", tmp_path).startswith("--recipe: mine.yaml does not exist\n  -> use cpu-debian, ngc-")
    assert "--base: " in refused(None, tmp_path, base="gone.sif")
    assert refused("cpu-debian", tmp_path, pip=["-r x"]).startswith("--pip: '-r x'")
