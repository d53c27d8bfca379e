"""Text of others, made safe to show: nothing in it commands a terminal or changes the order of what is read."""

from __future__ import annotations

import re

from slurmddp.records.text import UNSAFE

_COLOUR = re.compile("(\x1b\\[[0-9;]{0,30}m)")


def visible(text: str) -> str:
    r"""The text with each unsafe character written as \x1b or \u202e."""
    return UNSAFE.sub(_escaped, text)


def one_line(text: str) -> str:
    """The same for a value that stands in a line of ours: a line break in it must not begin another one."""
    return visible(text).replace("\n", "\\n")


def with_colours(text: str) -> str:
    """`visible`, but for colours and the like, which end with the text."""
    parts = _COLOUR.split(text)
    if len(parts) == 1:
        return visible(text)
    return "".join(part if index % 2 else visible(part) for index, part in enumerate(parts)) + "\x1b[0m"


def _escaped(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
