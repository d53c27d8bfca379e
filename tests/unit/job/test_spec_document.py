"""The YAML reader: what a value is, what is refused, and how the refusal reads."""

import os
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slurmddp.errors import UserError
from slurmddp.job.document import Plain, read_file, read_text, read_value, typed
from tests.helpers import refusal, yaml_of


def tree(text: str) -> dict:
    return read_text(text, "test", "job.yaml").tree


def refused(text: str) -> str:
    with pytest.raises(UserError) as caught:
        read_text(text, "test", "job.yaml")
    return refusal(caught.value)


@pytest.mark.parametrize(
    "written",
    ["24:00:00", "3e-4", "no", "yes", "on", "0123", "0x1F", "0o17", "1_000", "2024-01-01", ".inf", "=", "1e5", "True"],
)
def test_a_plain_scalar_stays_the_text_that_was_written(written: str) -> None:
    value = tree(f"key: {written}")["key"]
    assert (value, type(value)) == (written, Plain)


@pytest.mark.parametrize("written", ["", "~", "null", "Null", "NULL"])
def test_nothing_is_none(written: str) -> None:
    assert tree(f"key: {written}") == {"key": None}


@pytest.mark.parametrize("written", ['"null"', "'no'", '"3"', "''", "'24:00:00'", "|\n  3", ">-\n  3"])
def test_a_quoted_scalar_is_text_and_no_other_type(written: str) -> None:
    value = tree(f"key: {written}")["key"]
    assert type(value) is str
    assert typed(value) == value


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("3e-4", 3e-4),
        ("1.", 1.0),
        (".5", 0.5),
        ("1e3", 1000.0),
        ("+7", 7),
        ("-0", 0),
        ("0123", 123),
        ("true", True),
        ("FALSE", False),
        ("no", "no"),
        ("on", "on"),
        ("1_000", "1_000"),
        ("24:00:00", "24:00:00"),
        ("0x10", "0x10"),
        ("1.2.3", "1.2.3"),
        ("e5", "e5"),
        ("-", "-"),
    ],
)
def test_free_fields_follow_the_core_rules_of_yaml_1_2(written: str, value: object) -> None:
    result = typed(Plain(written))
    assert (result, type(result)) == (value, type(value))


@pytest.mark.parametrize("written", ["1e999", "-1e999", "9" * 5000])
def test_a_number_that_python_cannot_hold_stays_text(written: str) -> None:
    assert typed(Plain(written)) == written


def test_free_fields_keep_their_form_below() -> None:
    assert typed(tree("a: {b: [1, '1', null], 2: x}")["a"]) == {"b": [1, "1", None], "2": "x"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", r'job.yaml:3: key "a" is given twice (first in line 1)'),
        ("a:\n  b: 1\n  b: 1", r'job.yaml:3: key "b" is given twice (first in line 2)'),
        ("a: 1\n'a': 2", r'job.yaml:2: key "a" is given twice'),
        ("a: &x [1]\nb: *x", "contains a YAML alias"),
        ("a: &x [*x]", "contains a YAML alias"),
        ("a: &x {b: 1}\nc:\n  <<: *x", "job.yaml:3: contains a YAML merge key"),
        ("a: !!int '3'", "contains a YAML tag"),
        ("a: !!binary aGVsbG8=", "contains a YAML tag"),
        ("a: !!float 3", "contains a YAML tag"),
        ("a: !secret x", "job.yaml:1: contains a YAML tag (!secret)"),
        ("a: !secret {b: 1}", "contains a YAML tag (!secret)"),
        ("a: !!set {b}", "contains a YAML tag"),
        ("a: !!omap [b: 1]", "contains a YAML tag"),
        ("a: !!python/object/apply:os.system [id]", "contains a YAML tag"),
        ("--- !!python/dict\na: 1", "contains a YAML tag"),
        ("? [a]\n: 1", "has a key that is not text"),
        ("!!int 1: x", "contains a YAML tag"),
        ("a: 1\n---\nb: 2", "job.yaml:2: contains a second YAML document"),
        ("a: [1", "is not valid YAML"),
        ("a: 1\n b: 2", "job.yaml:2: is not valid YAML"),
        ("a:\n\tb: 1", "job.yaml:2: a tab is not allowed in YAML"),
        ("a: \x07", "is not valid YAML"),
        ("", "job.yaml: is empty"),
        ("# only a comment\n", "job.yaml: is empty"),
        ("---\n", "job.yaml: is empty"),
        ("- a", "is not a mapping"),
        ("24:00:00", "is not a mapping"),
    ],
)
def test_what_is_no_plain_mapping_is_refused_with_its_line(text: str, message: str) -> None:
    assert message in refused(text)


def test_depth_has_a_limit_that_is_an_error_and_no_crash() -> None:
    assert tree("a: " + "[" * 20 + "]" * 20)
    assert "nested deeper" in refused("a: " + "[" * 60 + "]" * 60)
    for text in ("[" * 100_000, "{a: " * 100_000, "a: " + "[" * 100_000 + "]" * 100_000, "- " * 100_000):
        assert refused(text)


def test_origins_hold_the_line_of_each_node() -> None:
    document = read_text("a: 1\nb:\n  - x\n  -\n    c: 2\n", "job file", "job.yaml")
    lines = {".".join(key): origin.where for key, origin in document.origins.items() if key}
    assert lines == {
        "a": "job.yaml:1",
        "b": "job.yaml:2",
        "b.0": "job.yaml:3",
        "b.1": "job.yaml:5",
        "b.1.c": "job.yaml:5",
    }
    assert {origin.layer for origin in document.origins.values()} == {"job file"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("24:00:00", "24:00:00"),
        ("", None),
        ("null", None),
        (" x ", " x "),
        ("a: b", "a: b"),
        ("# no comment", "# no comment"),
        ("[a, 3e-4, 'x y']", ["a", "3e-4", "x y"]),
        ("{a: [1]}", {"a": ["1"]}),
        ("*", "*"),
        ('"quoted"', '"quoted"'),
    ],
)
def test_the_value_of_set_is_taken_as_it_stands_unless_it_is_a_list_or_map(text: str, value: object) -> None:
    assert read_value(text, "command line", "--set x") == value


def test_a_broken_list_of_set_names_the_option() -> None:
    with pytest.raises(UserError, match="--set x"):
        read_value("[a", "command line", "--set x")


@pytest.mark.parametrize("text", ["[abc].sif", "{a: 1} # x\nsite: b"])
def test_a_value_of_set_never_becomes_two(text: str) -> None:
    with pytest.raises(UserError, match="--set x"):
        read_value(text, "command line", "--set x")


# --- files


def file_refused(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_file(path, "job file")
    return refusal(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "no such file" in file_refused(tmp_path / "job.yaml")
    assert file_refused(tmp_path / "job.yaml" / "x.yaml")
    assert file_refused(tmp_path / ("x" * 300 + ".yaml"))


def test_a_file_that_is_a_directory(tmp_path: Path) -> None:
    assert "is a directory" in file_refused(tmp_path)


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"name: a\ntitle: caf\xe9\n")
    assert re.search(r"job\.yaml:2: is not UTF-8 \(byte 0xe9\)", file_refused(path))
    path.write_bytes("name: a\n".encode("utf-16"))
    assert "is not UTF-8" in file_refused(path)


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xef\xbb\xbfname: a\r\nsite: b\r\n")
    assert read_file(path, "job file").tree == {"name": "a", "site": "b"}


def test_a_hundred_megabytes_are_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.touch()
    os.truncate(path, 100_000_000)
    assert "is larger than" in file_refused(path)


def test_a_file_that_may_not_be_read_says_why(tmp_path: Path) -> None:
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    assert "cannot be read" in file_refused(loop)


_TREES = st.recursive(
    st.text(max_size=12) | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@example({"": {"<<": None}})
@given(st.dictionaries(st.text(max_size=6), _TREES, min_size=1, max_size=3))
def test_any_text_in_quotes_is_read_as_it_is(value: dict) -> None:
    assert tree(yaml_of(value)) == value


@given(st.text(max_size=60) | st.text("ab:-[]{}&*!|>'\"%@`#,? \n", max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        assert isinstance(tree(text), dict)
    except UserError as error:
        assert "job.yaml" in str(error)


def test_a_map_in_a_list_has_the_line_of_its_beginning() -> None:
    document = read_text("b:\n  - source: x\n    mode: ro\n    y:\n      z: 1\n", "job file", "job.yaml")
    assert [document.origins[key].where for key in (("b", "0"), ("b", "0", "y"))] == ["job.yaml:2", "job.yaml:4"]
