"""Text with styles for a terminal. The program names each style; for everything but a terminal it is plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

Style = Literal["good", "bad", "warn", "active"]
#: Start, end and style of a part of a text.
Span = tuple[int, int, Style]

_LEVELS: dict[str, Style] = {"error": "bad", "warning": "warn"}


class Styled(str):
    """A text, and the styles of its parts, which are in order and do not overlap. All operations of str but + and
    rstrip lose the styles."""

    spans: tuple[Span, ...]

    def __new__(cls, text: str, spans: Iterable[Span]) -> Styled:
        made = super().__new__(cls, text)
        made.spans = tuple(spans)
        return made

    def __add__(self, other: str) -> Styled:
        return join("", (self, other))

    def __radd__(self, other: str) -> Styled:
        return join("", (other, self))

    def rstrip(self, chars: str | None = None, /) -> Styled:
        """Return the text without its last characters. A styled part of it is nothing else."""
        return Styled(super().rstrip(chars), self.spans)


def styled(text: str, style: Style | None) -> str:
    """Return the text in a style; None: as it is."""
    return Styled(text, [(0, len(text), style)]) if style else text


def join(separator: str, parts: Iterable[str]) -> Styled:
    """Return `separator.join(parts)` with the styles of the parts."""
    kept, spans, at = list(parts), [], 0
    for part in kept:
        if isinstance(part, Styled):
            spans += [(at + start, at + end, style) for start, end, style in part.spans]
        at += len(part) + len(separator)
    return Styled(separator.join(kept), spans)


def labelled(level: str, text: str) -> str:
    """Return a message that begins with its level: `warning: ...`."""
    return styled(f"{level}:", _LEVELS.get(level)) + f" {text}"


def columns(rows: Sequence[Sequence[str]], left: int | None = None) -> list[str]:
    """Return a line per row with its cells in columns. left: how many columns begin at their left end; None: all."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for row in rows:
        pads = [" " * (width - len(cell)) for cell, width in zip(row, widths, strict=True)]
        cells = [
            cell + pad if left is None or index < left else pad + cell
            for index, (cell, pad) in enumerate(zip(row, pads, strict=True))
        ]
        lines.append(join("  ", cells).rstrip())
    return lines
