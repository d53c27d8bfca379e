"""Text of others, made plain."""

import re

#: Control characters (C0, DEL, C1) but line break and tab; characters that change the direction of text, or end a line
#: or paragraph (Unicode Standard Annex 9; U+2028, U+2029).
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_CONTROL = bytes([*range(10), *range(11, 32), 127])
_STYLE = re.compile(b"\x1b\\[[0-9;]*m")


def plain_line(text: bytes, size: int = 400) -> str:
    """Return the first line of a text: valid, without colours or control characters, of so many bytes at most."""
    line = _STYLE.sub(b"", text.split(b"\n", 1)[0]).translate(None, _CONTROL)
    return UNSAFE.sub("", line[:size].decode("utf-8", errors="ignore"))


def first_line(text: str) -> str:
    """Return the first line of a text that is not empty, as `plain_line` leaves it, without spaces around it."""
    return plain_line(text.strip().replace("\t", " ").encode("utf-8", "ignore")).rstrip()
