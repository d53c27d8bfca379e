"""Text with styles for a terminal, folded where that is narrow. The program names each style; for everything but a
terminal it is plain text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

Style = Literal["good", "bad", "warn", "active"]
#: Start, end and style of a part of a text.
Span = tuple[int, int, Style]

_LEVELS: dict[str, Style] = {"error": "bad", "warning": "warn"}
#: What stays in one line: `quoted`, a command to paste, and a word.
_ATOM = r"`[^`]+`\S*|(?<![^ ])(?<![\w.] )slurmddp(?: (?!or |\()[^\s,;`]+)+[,;]?|\S+"
#: The name in front of a value.
_LABEL = r" *\S+(?: \S+){0,2}? {2,}(?=\S)"


class Row(NamedTuple):
    """A line of a table. first: its first row, which names the columns."""

    cells: Sequence[str]
    first: Sequence[str]
    widths: Sequence[int]


#: What is known of the lines of a part of a text: the row that they show, or None: they are copied as they are.
Lines = tuple[int, int, "Row | None"]


class Styled(str):
    """A text, the styles of its parts, which are in order and do not overlap, and what is known of its lines. All
    operations of str but + and rstrip lose both."""

    spans: tuple[Span, ...]
    lines: tuple[Lines, ...]

    def __new__(cls, text: str, spans: Iterable[Span] = (), lines: Iterable[Lines] = ()) -> Styled:
        made = super().__new__(cls, text)
        made.spans, made.lines = tuple(spans), tuple(lines)
        return made

    def __add__(self, other: str) -> Styled:
        return join("", (self, other))

    def __radd__(self, other: str) -> Styled:
        return join("", (other, self))

    def rstrip(self, chars: str | None = None, /) -> Styled:
        """Return the text without its last characters. A styled part of it is nothing else."""
        return Styled(super().rstrip(chars), self.spans, self.lines)


def styled(text: str, style: Style | None) -> str:
    """Return the text in a style; None: as it is."""
    return Styled(text, [(0, len(text), style)]) if style else text


def join(separator: str, parts: Iterable[str]) -> Styled:
    """Return `separator.join(parts)` with the styles of the parts."""
    kept, at = list(parts), 0
    spans: list[Span] = []
    lines: list[Lines] = []
    for part in kept:
        if isinstance(part, Styled):
            spans += [(at + start, at + end, style) for start, end, style in part.spans]
            lines += [(at + start, at + end, row) for start, end, row in part.lines]
        at += len(part) + len(separator)
    return Styled(separator.join(kept), spans, lines)


def exact(text: str) -> Styled:
    """Return a text that is copied from a terminal (JSON, a script, commands): its lines are never folded."""
    return Styled(text, lines=[(0, len(text), None)])


def labelled(level: str, text: str) -> str:
    """Return a message that begins with its level: `warning: ...`."""
    return styled(f"{level}:", _LEVELS.get(level)) + f" {text}"


def columns(rows: Sequence[Sequence[str]], left: int | None = None) -> list[str]:
    """Return a line per row with its cells in columns; the first row names them. left: how many columns begin at their
    left end; None: all."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for row in rows:
        pads = [" " * (width - len(cell)) for cell, width in zip(row, widths, strict=True)]
        cells = [
            cell + pad if left is None or index < left else pad + cell
            for index, (cell, pad) in enumerate(zip(row, pads, strict=True))
        ]
        line = join("  ", cells).rstrip()
        lines.append(Styled(line, line.spans, [(0, len(line), Row(cells, rows[0], widths))]))
    return lines


def fold(text: str, width: int) -> list[Styled]:
    """Return the lines of a text for a terminal of so many columns. Longer ones are folded between words; columns of a
    table that have no room stand below each row with their names."""
    known = list(text.lines) if isinstance(text, Styled) else []
    folded: list[Styled] = []
    at = indent = 0
    for line in text.split("\n"):
        end = at + len(line)
        while known and known[0][1] < at:
            known.pop(0)
        if known and known[0][0] <= end:
            row = known[0][2]
            folded += _row_lines(row, width) if row else [_part(text, at, end)]
        else:
            indent = _indent(line, indent)
            folded += _folded(_part(text, at, end), width, indent)
        at = end + 1
    return folded


def _indent(line: str, before: int) -> int:
    """Return where the value after a name begins, as in the line before if need be; else two more than the line."""
    if label := re.match(_LABEL, line):
        return label.end()
    if 0 < before < len(line) and line[before - 1] == " " != line[before]:
        return before
    return len(line) - len(line.lstrip(" ")) + 2


def _part(text: str, start: int, end: int) -> Styled:
    spans = text.spans if isinstance(text, Styled) else ()
    kept = [(max(a, start) - start, min(b, end) - start, style) for a, b, style in spans if a < end and b > start]
    return Styled(text[start:end], kept)


def _folded(line: Styled, width: int, indent: int) -> Iterator[Styled]:
    """Yield the lines of one that is too long. indent: of all but the first; what is below a long name has little."""
    if len(line) <= width:
        yield line
        return
    indent = indent if indent <= width // 2 else 4
    start = end = before = 0
    for atom in re.finditer(_ATOM, line):
        # A path that no line has room for stays beside its name.
        if end > start and before + atom.end() - start > width >= indent + len(atom[0]):
            yield (" " * before) + _part(line, start, end)
            start, before = atom.start(), indent
        end = atom.end()
    yield (" " * before) + _part(line, start, end)


def _row_lines(row: Row, width: int) -> Iterator[Styled]:
    """Yield the columns that have room, and below them the others with their names."""
    shown, used = 0, -2
    for column in row.widths:
        used += 2 + column
        if used > width:
            break
        shown += 1
    yield join("  ", row.cells[: max(shown, 1)]).rstrip()
    if [cell.strip() for cell in row.cells] == list(row.first):
        return
    rest = [(name, _trimmed(cell)) for name, cell in zip(row.first, row.cells, strict=True)][max(shown, 1) :]
    line = Styled("")
    for item in (f"{name} " + cell for name, cell in rest if cell):
        if line and len(line) + 2 + len(item) > width:
            yield from _folded(line, width, 4)
            line = Styled("")
        line = join("  ", (line, item)) if line else join("", ("  ", item))
    if line:
        yield from _folded(line, width, 4)


def _trimmed(cell: str) -> Styled:
    start = len(cell) - len(cell.lstrip())
    return _part(cell, start, len(cell.rstrip()))
