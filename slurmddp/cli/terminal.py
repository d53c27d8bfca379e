"""Standard output and error, through which no text of others can command the terminal."""

import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO, cast

from slurmddp.visible import visible, with_colours

#: Bytes of a log that are written together.
_AT_ONCE = 2**16


class _Guarded:
    """A text stream that escapes control characters in all that is written. `below`: the stream itself."""

    def __init__(self, below: TextIO) -> None:
        self.below = below

    def write(self, text: str) -> int:
        return self.below.write(visible(text))

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # click would write there, past this class, where it takes the encoding for a wrong one
            raise AttributeError(name)
        return getattr(self.below, name)


def guard() -> None:
    """Guard sys.stdout and sys.stderr from here on: results, messages, errors, and what Python says at the end."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, _Guarded):
            if hasattr(stream, "reconfigure"):
                # A name that is not UTF-8 must not end in a traceback when it is printed.
                stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, cast(TextIO, _Guarded(stream)))


def write_exactly(data: bytes) -> None:
    """Write to stdout what must arrive byte for byte in a file or pipe; on a terminal, colours are all that is let
    through, and a carriage return (of a progress bar) begins a line."""
    stream = getattr(sys.stdout, "below", sys.stdout)
    if stream.isatty():
        lines = data.decode("utf-8", errors="replace").replace("\r\n", "\n").replace("\r", "\n").split("\n")
        stream.write("\n".join(map(with_colours, lines)))
        stream.flush()
    else:
        stream.flush()
        stream.buffer.write(data)
        stream.buffer.flush()


class Screen:
    """A screen of its own on the terminal, which the terminal leaves as it was. Raises OSError."""

    def __enter__(self) -> "Screen":
        self._stream = getattr(sys.stdout, "below", sys.stdout)
        self._write("\x1b[?1049h\x1b[?25l")
        return self

    def show(self, lines: Sequence[str]) -> None:
        """Show these lines, cut to what the terminal has room for."""
        size = shutil.get_terminal_size()
        shown = [visible(line).replace("\n", " ")[: size.columns - 1] for line in lines[: size.lines - 1]]
        self._write("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in shown) + "\x1b[J")

    def __exit__(self, *error: object) -> None:
        self._write("\x1b[?25h\x1b[?1049l")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def shows_blocks() -> bool:
    """Return whether standard output can show more than ASCII."""
    return "utf" in (sys.stdout.encoding or "").lower()


def write_line(line: bytes) -> None:
    """Write one line of a log, without its end."""
    write_exactly(line + b"\n")


def write_lines(lines: Iterable[bytes]) -> None:
    """Write the lines of a log that is there, many at a time."""
    waiting, size = [], 0
    for line in lines:
        waiting.append(line + b"\n")
        size += len(line)
        if size > _AT_ONCE:
            write_exactly(b"".join(waiting))
            waiting, size = [], 0
    write_exactly(b"".join(waiting))
