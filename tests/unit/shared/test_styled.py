"""Styled text is the plain text, and keeps which parts of it have a style."""

from __future__ import annotations

import json

from slurmddp.styled import Styled, join, labelled, styled


def parts(text: str) -> list[tuple[str, str]]:
    assert isinstance(text, Styled)
    return [(str(text)[start:end], style) for start, end, style in text.spans]


def test_it_is_the_plain_text() -> None:
    text = "a " + styled("failed", "bad") + ": x"
    assert text == "a failed: x" and len(text) == 11 and json.dumps(text) == '"a failed: x"'
    assert type(styled("x", None)) is str and type(labelled("note", "x")) is str


def test_parts_keep_their_style_where_texts_are_put_together() -> None:
    line = join("  ", ["ä", styled("done", "good"), "x" + styled("lost", "bad")]).rstrip()
    assert line == "ä  done  xlost" and parts(line) == [("done", "good"), ("lost", "bad")]
    assert parts(join("\n", [line, labelled("warning", "w"), labelled("error", "e")])) == [
        ("done", "good"), ("lost", "bad"), ("warning:", "warn"), ("error:", "bad"),
    ]  # fmt: skip
