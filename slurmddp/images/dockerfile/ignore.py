"""What .dockerignore keeps out of the build.

Follows moby/patternmatcher: the last pattern that matches a path or a folder above it decides.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from slurmddp.errors import UserError


@dataclass(frozen=True)
class Ignore:
    """patterns: (is it an exception, expression), in the file's order; file: where they are from."""

    patterns: tuple[tuple[bool, re.Pattern[str]], ...] = ()
    file: Path | None = None

    @property
    def has_exceptions(self) -> bool:
        """Whether something inside of an ignored folder may be wanted all the same."""
        return any(exception for exception, _ in self.patterns)

    def ignored(self, relative: str) -> bool:
        """Whether the path, relative to the context and with `/`, stays out."""
        parts = relative.split("/")
        above = ["/".join(parts[: count + 1]) for count in range(len(parts))]
        out = False
        for exception, expression in self.patterns:
            if any(expression.fullmatch(path) for path in above):
                out = not exception
        return out


def read_ignore(dockerfile: Path) -> Ignore:
    """The patterns of `<Dockerfile>.dockerignore`, or else of .dockerignore beside it. Raises UserError."""
    for file in (dockerfile.with_name(dockerfile.name + ".dockerignore"), dockerfile.with_name(".dockerignore")):
        try:
            text = file.read_text(encoding="utf-8-sig")
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file} cannot be read: {error}") from None
        return Ignore(_patterns(text, file), file)
    return Ignore()


def _patterns(text: str, file: Path) -> tuple[tuple[bool, re.Pattern[str]], ...]:
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#") or not line.strip():
            continue
        pattern = line.strip()
        exception = pattern.startswith("!")
        parts = [part for part in pattern.removeprefix("!").strip().split("/") if part not in ("", ".")]
        if not parts:
            continue
        try:
            found.append((exception, expression("/".join(parts))))
        except (ValueError, re.error):
            raise UserError(f"the pattern {pattern!r} is broken", where=f"{file}:{number}") from None
    return tuple(found)


def expression(pattern: str) -> re.Pattern[str]:
    """Go's filepath.Match, and `**` for any number of folders, as a regular expression. Raises ValueError."""
    made, at = "", 0
    while at < len(pattern):
        char = pattern[at]
        at += 1
        if pattern.startswith("**", at - 1):
            at += 1
            slash = at < len(pattern) and pattern[at] == "/"
            at += slash
            made += "(?:.*/)?" if slash else ".*"
        elif char == "*":
            made += "[^/]*"
        elif char == "?":
            made += "[^/]"
        elif char == "[":
            close = pattern.find("]", at + 1)
            if close < 0:
                raise ValueError(pattern)
            inside = pattern[at:close].replace("[", r"\[").replace("&&", r"\&&").replace("||", r"\||")
            made += f"[{inside}]"
            at = close + 1
        elif char == "\\" and at < len(pattern):
            made += re.escape(pattern[at])
            at += 1
        else:
            made += re.escape(char)
    return re.compile(made, re.DOTALL)
