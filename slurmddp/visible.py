"""Text of others, made safe to show: nothing in it commands a terminal or changes the order of what is read."""

from __future__ import annotations

import re

# Control characters (C0, DEL, C1) but line break and tab; characters that change the direction of text, or end a line
# or paragraph (Unicode Standard Annex 9; U+2028, U+2029).
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_COLOUR = re.compile("(\x1b\\[[0-9;]{0,30}m)")


def visible(text: str) -> str:
    r"""The text with each unsafe character written as \x1b or \u202e."""
    return _UNSAFE.sub(_escaped, text)


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
