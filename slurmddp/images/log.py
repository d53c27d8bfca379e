"""A build's log: kept beside the image, and its end shown where the build fails."""

from __future__ import annotations

import collections
import contextlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from slurmddp.images.provenance import writing


class Cause(NamedTuple):
    """why: one sentence; todo: what to do about it."""

    why: str
    todo: str


def explain(lines: Iterable[str]) -> Cause | None:
    """Return the first cause of build.rules that the output of a failed build tells of; None if it tells of none."""
    text = "\n".join(lines)
    rules = Path(__file__).with_name("build.rules").read_text(encoding="utf-8")
    for block in rules.strip().split("\n\n")[1:]:
        name, pattern, *texts = block.splitlines()
        if match := re.search(pattern, text, re.MULTILINE):
            if texts:
                return Cause(*(each.format(*filter(None, match.groups())) for each in texts))
            return _conflict(match) if name == "pip-conflict" else _uv_conflict(match)
    return None


def _conflict(match: re.Match[str]) -> Cause:
    pinned = match["pinned"]
    # All of them: which one the pin does not suit, pip does not say.
    wants = "; ".join(line.strip() for line in match["wants"].splitlines())
    wants = wants.replace("The user requested", "what was asked for is")
    name = re.split(r"[=<>!~ ]", pinned)[0]
    keeps = "which matches its CUDA and NCCL" if name == "torch" else "which its packages were tested with"
    return Cause(
        f"{wants}, and the base keeps {pinned}, {keeps}",
        f"use a version that works with {pinned}, or a base with another {name}",
    )


def _uv_conflict(match: re.Match[str]) -> Cause:
    # It begins with an arrow, or, in newer versions, with a word
    reason = " ".join(match["said"].split()).removeprefix("\u2570\u2500\u25b6 ").removeprefix("cause: ")
    return Cause(f"the packages conflict: {reason}", "use other versions, or a base with another torch")


_SHOWN_LINES = 20
#: Lines of the build's end in which its cause is looked for.
_READ_LINES = 400
#: What a shell with -x says of the commands with which the lines of a Dockerfile begin and end (dockerfile.def.j2).
_PLACE = re.compile(r"\S* ?: (?:line (\d+): ([A-Z]+)|no more lines)")


def log_path(image: Path) -> Path:
    return image.with_name(image.name + ".build.log")


class BuildLog:
    """Takes what a builder says, line by line, in a draft that gets the log's name at the end.

    What has that name before, a link of somebody else's too, is replaced and never written to. A disk that has no
    room for the log any more does not end the build: what ends it says more.
    Raises UserError where the log cannot be begun.
    """

    def __init__(self, path: Path, draft: Path) -> None:
        self.path = path
        self._draft = draft
        self._refused = ""
        self._place = ""
        self._last: collections.deque[str] = collections.deque(maxlen=_READ_LINES)
        with writing(draft):
            # Without a buffer: nothing is left that could fail when it is closed
            self._file = draft.open("xb", buffering=0)

    def said(self, line: str) -> None:
        """A line of the builder's."""
        self._last.append(line)
        if match := _PLACE.fullmatch(line):
            self._place = f" at line {match[1]} of the Dockerfile ({match[2]})" if match[1] else ""
        self._write(line)

    def note(self, *lines: str) -> None:
        """Lines of our own, as comments."""
        self._write(*(f"# {line}" for line in lines))

    def failure(self, head: str) -> str:
        """Return the message for people: the cause, if it is known, the end of the log, and the log's path."""
        shown = "".join(f"  | {line}\n" for line in list(self._last)[-_SHOWN_LINES:]) or "  | (no output)\n"
        cause = explain(self._last)
        hint = f": {cause.why}\n  -> {cause.todo}\nthe" if cause else "; the"
        cut = f" (cut off: {self._refused})" if self._refused else ""
        return f"{head}{self._place}{hint} end of its log:\n{shown}the whole log: {self.path}{cut}"

    def _write(self, *lines: str) -> None:
        if self._refused:
            return
        text = "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")
        try:
            while text:
                text = text[self._file.write(text) :]
        except OSError as error:
            self._refused = error.strerror or str(error)

    def __enter__(self) -> BuildLog:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # some file systems say only now what they have refused
            self._file.close()
        try:
            self._draft.replace(self.path)
        except OSError as error:
            self._refused = error.strerror or str(error)
