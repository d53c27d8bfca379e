"""Patterns of .dockerignore, with Docker's own answers (moby/patternmatcher, patternmatcher_test.go)."""

from pathlib import Path

import pytest

from slurmddp.errors import UserError
from slurmddp.images.dockerfile.ignore import read_ignore


@pytest.mark.parametrize(
    ("patterns", "path", "ignored"),
    [
        ("**", "file", True),
        ("**", "dir/file", True),
        ("**/file", "file", True),
        ("**/file", "dir/dir/file", True),
        ("**/dir2/*", "dir/dir2/file", True),
        ("dir/**", "dir/file", True),
        ("dir/**", "other", False),
        ("*.log", "a.log", True),
        ("*.log", "dir/a.log", False),
        ("dir", "dir/a", True),
        ("/dir/", "dir/a", True),
        ("./dir", "dir", True),
        ("dir*", "dir1/a", True),
        ("a?c", "abc", True),
        ("a?c", "a/c", False),
        ("[a-c].txt", "b.txt", True),
        ("[^a-c].txt", "b.txt", False),
        ("a\\*b", "a*b", True),
        ("a\\*b", "aab", False),
        ("a.b", "axb", False),
        ("*\n!README.md", "README.md", False),
        ("*\n!README.md", "other.md", True),
        ("docs\n!docs/README.md", "docs/README.md", False),
        ("!docs/README.md\ndocs", "docs/README.md", True),
        ("# a\n\n  b  ", "b", True),
        ("# a", "# a", False),
    ],
)
def test_patterns(tmp_path: Path, patterns: str, path: str, ignored: bool) -> None:
    (tmp_path / ".dockerignore").write_text(patterns)
    assert read_ignore(tmp_path / "Dockerfile").ignored(path) is ignored


def test_the_dockerfiles_own_list_comes_first(tmp_path: Path) -> None:
    (tmp_path / ".dockerignore").write_text("a")
    (tmp_path / "my.Dockerfile.dockerignore").write_text("b")
    found = read_ignore(tmp_path / "my.Dockerfile")
    assert found.ignored("b") and not found.ignored("a")
    assert not read_ignore(tmp_path / "sub" / "Dockerfile").ignored("a")


def test_a_broken_pattern_is_named(tmp_path: Path) -> None:
    (tmp_path / ".dockerignore").write_text("a\n[b\n")
    with pytest.raises(UserError, match=r"\.dockerignore:2: the pattern '\[b' is broken"):
        read_ignore(tmp_path / "Dockerfile")
