"""Reads logs of any size and content: bounded lines, and each shape of line only so often."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import BinaryIO

#: Bytes read at once, and of a line that are looked at.
_BLOCK = 1 << 20
_LINE = 4000
#: A line that differs from earlier ones in its digits only is looked at this often.
_REPEATED = 300
#: Shapes that are remembered, lines that are looked at because of a word below, and other lines that are looked at.
_SHAPES = 100_000
_SUSPICIOUS = 50_000
_OTHERS = 15_000
#: Of the suspicious lines beyond the limit, the last ones are looked at, too.
_LAST = 5_000

_WORDS = (
    b"rror", b"ail", b"WARN", b"xcept", b"Traceback", b"FATAL", b"ill", b"imeout", b"imed out", b"CANCELLED", b"ignal",
    b"annot", b"exitcode", b"ound", b"Xid",
)  # fmt: skip


class Reader:
    """The lines of one log that may matter, with their numbers. skipped: whether a limit left some out."""

    def __init__(self, handle: BinaryIO) -> None:
        self._handle = handle
        self._shapes: dict[bytes, int] = {}
        self._suspicious = self._others = 0
        self._last: deque[tuple[int, bytes]] = deque(maxlen=_LAST)
        self.skipped = False
        #: While this is set, every line matters: a traceback is open.
        self.everything = False

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        for number, line in self._numbered():
            if self.everything or self._matters(number, line):
                yield number, line
        yield from self._last

    def _matters(self, number: int, line: bytes) -> bool:
        shape = line.translate(None, b"0123456789 \t")[:200]
        if not shape:
            return False
        seen = self._shapes.get(shape, 0)
        if seen >= _REPEATED:
            return False
        if len(self._shapes) >= _SHAPES:
            self._shapes.clear()
        self._shapes[shape] = seen + 1
        if any(word in line for word in _WORDS):
            self._suspicious += 1
            if self._suspicious <= _SUSPICIOUS:
                return True
            self.skipped |= len(self._last) == _LAST
            self._last.append((number, line))
            return False
        self._others += 1
        return self._others <= _OTHERS

    def _numbered(self) -> Iterator[tuple[int, bytes]]:
        """Lines as `grep -n` counts them. The parts of a line that progress bars overwrite have one number."""
        number, rest, cut = 1, b"", False
        while block := self._handle.read(_BLOCK):
            whole = (rest + block).split(b"\n")
            rest = whole.pop()
            for line in whole:
                if not cut:
                    yield from _parts(number, line)
                cut = False
                number += 1
            if len(rest) > _LINE:
                before, _, last = rest.rpartition(b"\r")
                if not cut:
                    yield from _parts(number, before or rest)
                cut = cut or not before or len(last) > _LINE
                rest = b"" if cut else last
        if rest and not cut:
            yield from _parts(number, rest)


def _parts(number: int, line: bytes) -> Iterator[tuple[int, bytes]]:
    if b"\r" in line[:-1]:
        for part in line[-_BLOCK:].split(b"\r"):
            if part:
                yield number, part[:_LINE]
    else:
        yield number, line[:_LINE]
