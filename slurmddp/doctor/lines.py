"""Reads logs of any size and content: bounded lines, and each shape of line only so often."""

import time
from collections import deque
from collections.abc import Iterator
from typing import BinaryIO

#: Seconds of processor time for all patterns of all logs together.
SECONDS = 4.5
#: What a part of a log may use of the time that is left.
_SHARE = 2 / 3
#: Seconds below which no further log is begun.
_LEAST = 0.02


class Budget:
    """Shares the time out: each log's beginning gets most of what is left, and then its end most of the rest."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._until: float | None = None
        self._begun = self._share = 0.0

    def begin(self) -> bool:
        """Begin a part of a log; return whether there is time for one."""
        now = time.thread_time()
        if self._until is None:
            self._until = now + self.seconds
        left = self._until - now
        self._begun, self._share = now, now + left * _SHARE
        return left > _LEAST

    def affordable(self, size: int) -> int:
        """Return for how many bytes the next part has time, where this part has spent its share on so many. With a
        margin: the last line counts most."""
        now = time.thread_time()
        left = max((self._until or now) - now, 0)
        return int(size * left * _SHARE / max(now - self._begun, 1e-3) / 2)

    @property
    def spent(self) -> bool:
        """Return whether the part has used up its share."""
        return time.thread_time() > self._share


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
    """The lines of one log that may matter, with their numbers. first: that of the first one.

    skipped: whether a limit left some out.
    """

    def __init__(self, handle: BinaryIO, first: int = 1) -> None:
        self._handle, self._first = handle, first
        self._shapes: dict[bytes, int] = {}
        self._suspicious = self._others = 0
        self._last: deque[tuple[int, bytes]] = deque(maxlen=_LAST)
        self._newest: dict[bytes, tuple[tuple[int, bytes], ...]] = {}
        self._jump = 0
        #: Lines that `jump_to_end` left out: the first and the last.
        self.jumped: tuple[int, int] | None = None
        self.skipped = False
        #: While this is set, every line matters: a traceback is open.
        self.everything = False

    def jump_to_end(self, tail: int) -> None:
        """Leave out what follows, but for so many bytes at the end of the log."""
        self._jump = max(tail, _LINE)

    @property
    def newest(self) -> Iterator[tuple[int, bytes]]:
        """Return the newest two lines of each shape that was repeated too often to be looked at."""
        return (line for lines in self._newest.values() for line in lines)

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
            self._newest[shape] = (*self._newest.get(shape, ())[-1:], (number, line))
            return False
        if len(self._shapes) >= _SHAPES:
            self._shapes.clear()
            self._newest.clear()
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
        number, rest, cut = self._first, b"", False
        while block := self._handle.read(_BLOCK):
            whole = (rest + block).split(b"\n")
            rest = whole.pop()
            for index, line in enumerate(whole):
                if not cut:
                    yield from _parts(number, line)
                cut = False
                number += 1
                if self._jump:
                    rest = b"\n".join([*whole[index + 1 :], rest])
                    break
            if self._jump:
                break
            if len(rest) > _LINE:
                before, _, last = rest.rpartition(b"\r")
                if not cut:
                    yield from _parts(number, before or rest)
                cut = cut or not before or len(last) > _LINE
                rest = b"" if cut else last
        if self._jump and not self.jumped:
            yield from self._end(number, rest)
        elif rest and not cut:
            yield from _parts(number, rest)

    def _end(self, number: int, rest: bytes) -> Iterator[tuple[int, bytes]]:
        """Lines of the last bytes. What lies before them is only counted."""
        first, whole = number, True
        while True:
            number += rest[: -self._jump].count(b"\n")
            whole &= len(rest) <= self._jump
            rest = rest[-self._jump :]
            if not (block := self._handle.read(_BLOCK)):
                break
            rest += block
        if not whole:
            _, _, rest = rest.partition(b"\n")
            number += 1
        self.jumped = first, number - 1
        for line in rest.split(b"\n"):
            yield from _parts(number, line)
            number += 1


def _parts(number: int, line: bytes) -> Iterator[tuple[int, bytes]]:
    if b"\r" in line[:-1]:
        for part in line[-_BLOCK:].split(b"\r"):
            if part:
                yield number, part[:_LINE]
    else:
        yield number, line[:_LINE]
