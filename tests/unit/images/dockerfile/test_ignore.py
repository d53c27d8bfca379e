"""Patterns of .dockerignore, with Docker's own answers (moby/patternmatcher, patternmatcher_test.go)."""

import re
import time
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slurmddp.errors import UserError
from slurmddp.images.context.ignore import expression, read_ignore


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
    assert read_ignore(tmp_path / "Dockerfile", tmp_path).ignored(path) is ignored


def plainly(pattern: str) -> re.Pattern[str]:
    """The same patterns as a regular expression that tries everything."""
    stars = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    made = re.sub(r"\*\*/|\*\*|\*|\?", lambda found: stars[found.group()], pattern)
    return re.compile(made, re.DOTALL)


@settings(max_examples=500)
@given(st.lists(st.sampled_from(["a", "b", "/", "*", "**", "**/", "?"]), max_size=9).map("".join),
       st.text(alphabet="ab/", max_size=9))  # fmt: skip
def test_a_star_takes_what_it_would_take_if_everything_were_tried(pattern: str, path: str) -> None:
    assume(len(re.findall(r"[^/*]\*\*/", pattern)) < 4)  # refused
    assert bool(expression(pattern).fullmatch(path)) == bool(plainly(pattern).fullmatch(path)), (pattern, path)


@pytest.mark.parametrize(
    "pattern",
    [
        "**/" * 8 + "x",
        "**/a/" * 8 + "x",
        "*a" * 30 + "x",
        "**a" * 30 + "x",
        "**/*a/" * 8 + "x",
        "a*b**" * 9,
        "*a**/" * 3 + "x",
    ],
)
def test_no_pattern_takes_long(tmp_path: Path, pattern: str) -> None:
    (tmp_path / ".dockerignore").write_text(pattern)
    begun = time.process_time()
    found = read_ignore(tmp_path / "Dockerfile", tmp_path)
    for path in ("a/" * 100 + "b", "a" * 250, "aa/" * 60 + "y", "ab/" * 60):
        found.ignored(path)
    assert time.process_time() - begun < 5


def test_the_dockerfiles_own_list_comes_first(tmp_path: Path) -> None:
    (tmp_path / ".dockerignore").write_text("a")
    (tmp_path / "my.Dockerfile.dockerignore").write_text("b")
    found = read_ignore(tmp_path / "my.Dockerfile", tmp_path)
    assert found.ignored("b") and not found.ignored("a")
    assert read_ignore(tmp_path / "sub" / "Dockerfile", tmp_path).ignored("a"), "that of the context"
    assert not read_ignore(tmp_path / "sub" / "Dockerfile", tmp_path / "sub").ignored("a")


def test_a_broken_pattern_is_named(tmp_path: Path) -> None:
    (tmp_path / ".dockerignore").write_text("a\n[b\n")
    with pytest.raises(UserError, match=r"\.dockerignore:2: the pattern '\[b' is broken"):
        read_ignore(tmp_path / "Dockerfile", tmp_path)
    for pattern in ("a**/b**/c**/d**/e", "a**/" * 3000, "*a" * 100_000):
        (tmp_path / ".dockerignore").write_text(f"{pattern}\n")
        with pytest.raises(UserError, match=r"\.dockerignore:1: the pattern '.{1,90}' is broken"):
            read_ignore(tmp_path / "Dockerfile", tmp_path)
