"""A build's log: kept beside the image, and its end shown where the build fails."""

from __future__ import annotations

import collections
import contextlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from slurmddp.images.provenance import writing


class Cause(NamedTuple):
    """why: one sentence; todo: what to do about it."""

    why: str
    todo: str


def explain(lines: Iterable[str]) -> Cause | None:
    """The cause that the output of a failed build tells of; None where it says nothing that is known here."""
    text = "\n".join(lines)
    for pattern, cause in _KNOWN:
        match = re.search(pattern, text, re.MULTILINE)
        if match:
            return cause(match)
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


def _fixed(why: str, todo: str) -> Callable[[re.Match[str]], Cause]:
    return lambda match: Cause(why.format(*(part for part in match.groups() if part is not None)), todo)


_NETWORK = "build on a machine with internet (a login node), or set the site's proxy or package mirror"
#: The first that fits counts: what ended a build is the most particular of what was said.
_KNOWN: tuple[tuple[str, Callable[[re.Match[str]], Cause]], ...] = (
    # "No" as C says it, "no" as Go does; a kernel that allows no more user namespaces says the same of them
    (r"^(?!.*(?:user namespace|unshare)).*(?:[Nn]o space left on device|[Dd]isk quota exceeded)", _fixed(
        "no disk space or quota left for the image, the cache or the temporary folder",
        "set APPTAINER_TMPDIR and APPTAINER_CACHEDIR to folders with more space; `apptainer cache clean` "
        "empties the cache")),
    (r"[Ee]xec format error", _fixed(
        "the base is for another CPU architecture than this machine",
        "use a base for this architecture, or build on a machine of the base's architecture")),
    (
        r"The conflict is caused by:\n(?P<wants>(?: +[^\n]*\n)+?)"
        r" +The user requested \(constraint\) (?P<pinned>[^\n]*)",
        _conflict,
    ),
    (r"No solution found when resolving dependencies:?\n(?P<said>(?: +.*\n?){1,6})", _uv_conflict),
    (r"NewConnectionError|[Tt]emporary failure (?:in name resolution|resolving)|Could not resolve host", _fixed(
        "the build could not reach the internet", _NETWORK)),
    (r"No matching distribution found for (\S+)", _fixed(
        "no package {0} for the image's Python and architecture", "check its name and version")),
    (r"E: Unable to locate package (\S+)|E: Version '[^']*' for '(\S+)' was not found", _fixed(
        "the base's Debian or Ubuntu has no package {0}", "check its name; apt has only the packages of the "
        "base's release")),
    (r"slurmddp: (torch was .*|the base had .*)", _fixed(
        "{0}", "your packages would replace torch: use versions that work with the base's torch")),
    (r"slurmddp: (line \d+: RUN as .*)", _fixed(
        "{0}", "move USER below this line, or remove it: Apptainer runs the image as the user who starts it anyway")),
    (r"slurmddp: (line \d+: the image has no user .*)", _fixed("{0}", "RUN useradd before, or another USER")),
    (r"slurmddp: (this image has no python3 on its PATH)", _fixed("{0}", "--apt python3, or another base")),
    (r"Running testscript(?!(?:.|\n)*(?:Adding|Creating SIF))", _fixed(
        "the image's own test failed",
        "see its output below: it runs the recipe's `test` and imports torch")),
    (r"^\++ as (\d+) (\S+) (?:.*\n)(?:(?!\++ : ).*\n)*?.*[Pp]ermission denied", _fixed(
        "line {0}: RUN as {1} may not do this: a build without root gives all files of the base to root",
        "before this line, as USER root, RUN chown what it changes; or move USER below it")),
    (r"toomanyrequests|429 Too Many Requests", _fixed(
        "the registry's download limit is reached", "log in (`apptainer registry login`), or try again later")),
    (r"unauthorized|authentication required|403 \(?[Ff]orbidden|denied: ", _fixed(
        "the registry denies access to the base",
        "use `apptainer registry login`, or set APPTAINER_DOCKER_USERNAME and APPTAINER_DOCKER_PASSWORD")),
    (r"manifest unknown|MANIFEST_UNKNOWN|name unknown|NAME_UNKNOWN", _fixed(
        "the registry does not have this image (any more)", "check its name, tag and digest")),
    (r"x509: (.*)|certificate verify failed", _fixed(
        "this machine does not trust the registry's certificate", _NETWORK)),
    (r"dial tcp: lookup \S+|no such host|connection refused|i/o timeout|network is unreachable", _fixed(
        "the registry could not be reached", _NETWORK)),
    (r"could not use fakeroot|no mapping entry|newuidmap.*not|user namespaces? (?:are|is) (?:not|disabled)"
     r"|[Ff]ailed to create user namespace|unshare: unshare failed", _fixed(
        "this machine does not allow users to build images",
        "ask the administrators for ranges in /etc/subuid and /etc/subgid")),
)  # fmt: skip


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
