"""Standard output and error, through which no text of others can command the terminal."""

import sys
from typing import Any, TextIO, cast

from slurmddp.visible import visible, with_colours


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


def write_line(line: bytes) -> None:
    """Write one line of a log, without its end."""
    write_exactly(line + b"\n")
