"""BuildKit's `${name#pattern}`, `${name%pattern}` and `${name/pattern/text}`: `*` and `?`, and no brackets."""

from __future__ import annotations

import re


def for_shell(pattern: str) -> str:
    """The pattern as a shell has it behind `#` or `%`. Raises ValueError for one that Docker refuses."""
    plain = re.compile(r"[\w./:,=+@-]")
    return "".join(token if token in "*?" or plain.fullmatch(token) else "\\" + token[-1] for token in _tokens(pattern))


def _tokens(pattern: str) -> list[str]:
    tokens = re.findall(r"(?s)\\.?|.", pattern)
    if any(token[0] == "\\" and token not in ("\\*", "\\?", "\\\\", "\\}", "\\/") for token in tokens):
        raise ValueError(pattern)
    return tokens


#: Places and lengths that Python's expressions may try; one more star multiplies them by the value's length.
_MOST_TRIES = 10_000_000


def substitute(value: str, operator: str, pattern: str, text: str) -> str:
    """The value without its begin (#) or end (%) that matches, or with a text in its place (/).

    A doubled operator takes the longest match, or all of them. Raises ValueError for a pattern that Docker refuses,
    and for one that would take long.
    """
    tokens = _tokens(pattern)
    if operator == "//" and set(tokens) <= {"*"}:  # Go and Python count the empty matches differently
        raise ValueError(pattern)
    if len(value) ** (tokens.count("*") + (operator[0] == "/")) > _MOST_TRIES:
        raise ValueError(pattern)
    star = ".*" if operator in ("##", "%%", "/", "//") else ".*?"
    if operator[0] == "%":  # the shortest end is the shortest begin of the value read backwards
        tokens.reverse()
    found = "".join({"*": star, "?": "."}.get(token, re.escape(token[-1])) for token in tokens)
    if operator[0] == "/":
        return re.sub(found, lambda _: text, value, count=0 if operator == "//" else 1)
    whole = value[::-1] if operator[0] == "%" else value
    match = re.match(found, whole)
    rest = whole[match.end() :] if match else whole
    return rest[::-1] if operator[0] == "%" else rest
