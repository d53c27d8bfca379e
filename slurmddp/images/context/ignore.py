"""What .dockerignore keeps out of the build.

Follows moby/patternmatcher: the last pattern that matches a path or a folder above it decides.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from slurmddp.errors import UserError
from slurmddp.images.globs import expression


@dataclass(frozen=True)
class Ignore:
    """patterns: (is it an exception, expression), in the file's order; file: where they are from."""

    patterns: tuple[tuple[bool, re.Pattern[str]], ...] = ()
    file: Path | None = None

    @property
    def has_exceptions(self) -> bool:
        """Return whether something inside of an ignored folder may be wanted all the same."""
        return any(exception for exception, _ in self.patterns)

    def ignored(self, relative: str) -> bool:
        """Return whether the path, relative to the context and with `/`, stays out."""
        parts = relative.split("/")
        above = ["/".join(parts[: count + 1]) for count in range(len(parts))]
        out = False
        for exception, wanted in self.patterns:
            if any(wanted.fullmatch(path) for path in above):
                out = not exception
        return out


def read_ignore(dockerfile: Path, context: Path) -> Ignore:
    """The patterns of `<Dockerfile>.dockerignore`, or else of .dockerignore in the context. Raises UserError."""
    for file in (dockerfile.with_name(dockerfile.name + ".dockerignore"), context / ".dockerignore"):
        try:
            text = file.read_text(encoding="utf-8-sig")
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file} cannot be read: {error}") from None
        return Ignore(patterns(text, str(file)), file)
    return Ignore()


def patterns(text: str, file: str) -> tuple[tuple[bool, re.Pattern[str]], ...]:
    """One pattern a line; `file` stands in messages. Raises UserError."""
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
            raise UserError(f"the pattern {pattern[:80]!r} is broken", where=f"{file}:{number}") from None
    return tuple(found)
