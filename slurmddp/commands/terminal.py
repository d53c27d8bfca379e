"""Standard output and error, through which no text of others can command the terminal. On a terminal, what the program
styled has colours, and long work has a line of progress."""

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

from slurmddp.errors import UserError
from slurmddp.styled import Style, Styled, fold, join
from slurmddp.visible import visible, with_colours

#: Bytes of a log that are written together.
_AT_ONCE = 2**16
_COLOURS: dict[Style, str] = {"good": "\x1b[32m", "bad": "\x1b[31m", "warn": "\x1b[33m", "active": "\x1b[36m"}
_END = "\x1b[0m"
_NO_LINE = "\r\x1b[K"


class _Guarded:
    """A text stream that escapes control characters in all that is written. `below`: the stream itself."""

    def __init__(self, below: TextIO) -> None:
        self.below = below

    def write(self, text: str) -> int:
        Progress.give_way(text)
        if self.below.isatty() and (width := _width(self.below)):
            text = join("\n", fold(text, width))
        return self.below.write("".join(_pieces(text, coloured=_has_colours(self.below))))

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


def _commands_work(stream: TextIO) -> bool:
    """Return whether the stream is a terminal that understands more than plain text."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb")


def _has_colours(stream: TextIO) -> bool:
    return not os.environ.get("NO_COLOR") and _commands_work(stream)


def _width(stream: TextIO) -> int:
    """Return the columns of a terminal; 0 if it does not say."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except OSError:  # the terminal has gone
        return 0


def _pieces(text: str, *, coloured: bool, room: int | None = None) -> Iterator[str]:
    """Yield the text without control characters, and colours around its styled parts. room: characters at most."""
    spans = text.spans if coloured and isinstance(text, Styled) else ()
    at = 0
    for start, end, style in (*spans, (len(text), len(text), None)):
        for part, colour in ((text[at:start], None), (text[start:end], style)):
            shown = visible(part)[:room]
            if room is not None:
                room -= len(shown)
            if shown:
                yield f"{_COLOURS[colour]}{shown}{_END}" if colour else shown
        at = end


class Progress:
    """A line at the end of the terminal that says what is being done, and for how long; nothing where stderr is no
    terminal. It gives way to what is written meanwhile, and is removed at the end."""

    #: Seconds until it shows, and between two looks.
    _PATIENCE = 1.0
    _EVERY = 0.2
    _open: "Progress | None" = None

    def __init__(self) -> None:
        self._stream = getattr(sys.stderr, "below", sys.stderr)
        self._text, self._since = "", 0.0
        self._drawn = False
        self._at_line_start = True
        self._over = threading.Event()
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None  # while there is a text

    def tell(self, text: str) -> None:
        """Say what is being done now; "" for nothing. The time goes on until it is nothing."""
        if Progress._open is not self:
            return
        with self._lock:
            if not self._text:
                self._since = time.monotonic()
            self._text = text
            if not text:
                self._remove()
            elif self._thread is None:
                self._thread = threading.Thread(target=self._draw_on, daemon=True)
                self._thread.start()

    def __enter__(self) -> "Progress":
        if _commands_work(self._stream):
            Progress._open = self
        return self

    def __exit__(self, *error: object) -> None:
        if Progress._open is self:
            self._over.set()
            if thread := self._thread:
                thread.join()
            self._remove()
            Progress._open = None

    @classmethod
    def give_way(cls, text: str) -> None:
        """Remove the line before `text` is written to a standard stream."""
        if cls._open is not None:
            with cls._open._lock:
                cls._open._remove()
                cls._open._at_line_start = text.endswith("\n")

    def _draw_on(self) -> None:
        while not self._over.wait(self._EVERY):
            with self._lock:
                if not self._text:
                    self._thread = None
                    return
                seconds = int(time.monotonic() - self._since)
                if seconds >= self._PATIENCE and self._at_line_start:
                    self._draw(f"{self._text}, {seconds // 60}:{seconds % 60:02d}")

    def _draw(self, text: str) -> None:
        columns = _width(self._stream) or 80
        self._write(f"\r{visible(text).replace(chr(10), ' ')[: columns - 1]}\x1b[K")
        self._drawn = True

    def _remove(self) -> None:
        if self._drawn:
            self._drawn = False
            self._write(_NO_LINE)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:  # the terminal has gone; what the command itself writes meets the error
            self._over.set()


def write_exactly(data: bytes) -> None:
    """Write to stdout what must arrive byte for byte in a file or pipe; on a terminal, colours are all that is let
    through, and a carriage return (of a progress bar) begins a line."""
    stream = getattr(sys.stdout, "below", sys.stdout)
    Progress.give_way("\n")
    if stream.isatty():
        lines = data.decode("utf-8", errors="replace").replace("\r\n", "\n").replace("\r", "\n").split("\n")
        stream.write("\n".join(map(with_colours, lines)))
        stream.flush()
    else:
        stream.flush()
        stream.buffer.write(data)
        stream.buffer.flush()


def write_new(
    path: Path, text: str, *, force: bool = False, todo: str = "choose another name, or remove that file"
) -> None:
    """Write a text to a file that does not exist yet; with `force`, also over one that does. Raises UserError.

    A link is replaced by the file, and what it names stays as it is.
    """
    try:
        if force:
            from slurmddp.shared.files import write_whole  # here: it takes more time than the help has

            write_whole(path, text)
        else:
            with path.open("x", encoding="utf-8", errors="surrogateescape", newline="") as handle:
                handle.write(text)
    except FileExistsError:
        raise UserError(f"{path} exists", todo=todo) from None
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", todo="choose another folder") from None


class Screen:
    """A screen of its own on the terminal, which the terminal leaves as it was. Raises OSError."""

    def __enter__(self) -> "Screen":
        self._stream = getattr(sys.stdout, "below", sys.stdout)
        self._write("\x1b[?1049h\x1b[?25l")
        return self

    def show(self, lines: Sequence[str]) -> None:
        """Show as many of these lines as the terminal has room for."""
        size = shutil.get_terminal_size()
        coloured = _has_colours(self._stream)
        folded = fold(join("\n", lines), size.columns - 1)[: size.lines - 1]
        shown = ("".join(_pieces(line, coloured=coloured, room=size.columns - 1)) for line in folded)
        self._write("\x1b[H" + "".join(line.replace("\n", " ") + "\x1b[K\n" for line in shown) + "\x1b[J")

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


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit, so that `finally` clears away. Ignored ones (nohup) stay ignored."""
    ignored = signal.SIG_IGN
    numbers = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is not ignored]
    before = {number: signal.signal(number, lambda number, _: sys.exit(128 + number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
