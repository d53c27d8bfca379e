"""Python tracebacks in logs, of several ranks at once."""

import re
from dataclasses import dataclass, field

from slurmddp.doctor.prefix import unframed

_BEGIN = "Traceback (most recent call last)"
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?')
#: A rich traceback writes its frames as `/path/file.py:12 in function`.
_RICH = re.compile(r"^(?P<file>/\S+\.py):(?P<line>\d+)(?: in (?P<function>\S+))?")
_EXCEPTION = re.compile(
    r"^(?P<name>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Interrupt|Exit|Failure|Failed|NotFound|Refused|Expired"
    r"|StopIteration|Warning)[A-Za-z]*|(?:[a-z_]\w*\.)+[A-Z]\w*)(?P<rest>: .*|:?\s*)$"
)
#: Python writes it before the traceback of an exception that ends nothing; of several ranks, their lines are mixed.
_IGNORED, _BEFORE = "Exception ignored in", 4
_CAUGHT = re.compile(r"^: Caught \w+ in ")
_LIBRARY = re.compile(
    r"(?:site|dist)-packages/|/lib(?:64)?/python\d|<frozen|<string>|<__array|/bin/(?:torchrun|accelerate|deepspeed)$"
)
_USER_SITE = "/.local/lib/python"
#: Lines of the log, per open traceback, after which one without an exception is dropped; its lines that are kept.
_LONGEST, _KEPT = 400, 60
#: Tracebacks that are open at once, and characters of a line in which an exception's name is searched.
_OPEN, _NAME = 1000, 300


@dataclass
class Traceback:
    """One traceback. line: its number in the file; exception: its last line; own: the innermost frame outside of
    libraries, as FILE:LINE; innermost: whether that is where the exception was raised."""

    path: str
    line: int
    rank: int | None
    host: str | None
    lines: list[str] = field(default_factory=list)
    frames: list[tuple[str, str]] = field(default_factory=list)
    exception: str = ""
    name: str = ""
    opened: int = 0
    #: Python has ignored the exception, or the line before says that the program goes on.
    ignored: bool = False

    @property
    def own(self) -> str | None:
        """Return the innermost frame of the user's own code."""
        return next((f"{file}:{line}" for file, line in reversed(self.frames) if not _LIBRARY.search(file)), None)

    @property
    def origin(self) -> str:
        """Return the innermost files, as text that patterns of causes see behind the exception."""
        if not self.frames:
            return ""
        files = [file for file, _ in self.frames]
        mixed = any(_USER_SITE in file for file in files) and any(
            "-packages/" in file and _USER_SITE not in file for file in files
        )
        return f" (in {' '.join(files[-8:])}{', packages of ~/.local and of another folder' if mixed else ''})"

    @property
    def innermost(self) -> bool:
        """Return whether the user's own code raised it."""
        return bool(self.frames) and not _LIBRARY.search(self.frames[-1][0])


class Tracebacks:
    """Collects the tracebacks of one file. A rank's lines are told apart by their prefix."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fed = 0
        self._ignored = 0
        self._open: dict[int | None, Traceback] = {}

    @property
    def active(self) -> bool:
        return bool(self._open)

    def feed(self, number: int, text: str, rank: int | None, host: str | None) -> Traceback | None:
        """Take one line; return the traceback that it ends."""
        self._fed += 1
        self._expire()
        if _IGNORED in text:
            self._ignored = self._fed
        if _BEGIN in text:
            self._open.pop(rank, None)  # the oldest one stays the first
            ignored = 0 < self._fed - self._ignored <= _BEFORE and self._ignored > 0
            self._open[rank] = Traceback(self.path, number, rank, host, [text], opened=self._fed, ignored=ignored)
            return None
        current = self._open.get(rank)
        if current is None:
            return self._alone(number, text, rank, host)
        if len(current.lines) < _KEPT:
            current.lines.append(text)
        plain = unframed(text)
        if frame := _FRAME.search(plain) or _RICH.match(plain):
            current.frames.append((frame["file"], frame["line"]))
            return None
        if exception := _EXCEPTION.match(plain.strip()[:_NAME]):
            if text.startswith("    ") and current.frames and "Error" in text and text.lstrip().startswith("raise"):
                return None  # the line of code that belongs to the last frame, such as `raise ValueError`
            del self._open[rank]
            return self._finished(current, plain.strip(), exception)
        return None

    def _expire(self) -> None:
        """Drop the tracebacks whose rank wrote no exception for too long: while one is open, every line is read."""
        while self._open:
            rank, oldest = next(iter(self._open.items()))
            if self._fed - oldest.opened <= _LONGEST * len(self._open) and len(self._open) <= _OPEN:
                return
            del self._open[rank]

    def _alone(self, number: int, text: str, rank: int | None, host: str | None) -> Traceback | None:
        """An exception without its traceback, as in an excerpt."""
        exception = _EXCEPTION.match(text.strip()[:_NAME])
        name = exception["name"] if exception else ""
        if exception is None or "Warning" in name or not name.rpartition(".")[2][:1].isupper():  # or no class
            return None
        return self._finished(Traceback(self.path, number, rank, host), text.strip(), exception)

    def _finished(self, traceback: Traceback, text: str, exception: re.Match[str]) -> Traceback | None:
        traceback.exception, traceback.name = text, exception["name"].rpartition(".")[2]
        if _CAUGHT.match(exception["rest"]):
            return None  # the same exception follows, with the traceback of the worker
        return traceback
