"""What .slurmddpignore keeps out of the copy of a project: the syntax of .gitignore, without git."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from slurmddp.errors import UserError
from slurmddp.images.context.ignore import expression

NAME = ".slurmddpignore"


@dataclass(frozen=True)
class ProjectIgnore:
    """patterns: (is it an exception, expression of a path relative to the project), in the file's order."""

    patterns: tuple[tuple[bool, re.Pattern[str]], ...] = ()

    def ignored(self, relative: str) -> bool:
        """Return whether the last pattern that matches this path, or a folder above it, leaves it out."""
        parts = relative.split("/")
        above = ["/".join(parts[: count + 1]) for count in range(len(parts))]
        # As in git: below a folder that is left out, no exception counts
        return bool(self.patterns) and any(map(self._left_out, above))

    def _left_out(self, path: str) -> bool:
        decided = [exception for exception, pattern in self.patterns if pattern.fullmatch(path)]
        return bool(decided) and not decided[-1]


def read_ignore(project: Path) -> ProjectIgnore:
    """Read the project's .slurmddpignore. Raises UserError for a pattern that is broken, or an unreadable file."""
    file = project / NAME
    try:
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return ProjectIgnore()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}", todo="correct it, or remove it") from None
    patterns = []
    for number, line in enumerate(text.splitlines(), 1):
        pattern = re.sub(r"(?<!\\)[ \t]+$", "", line)
        if not pattern or pattern.startswith("#"):
            continue
        try:
            patterns.append((pattern.startswith("!"), _expression(pattern.removeprefix("!"))))
        except (ValueError, re.error):
            raise UserError(
                f"the pattern {line[:80]!r} is broken", where=f"{file}:{number}", todo="see gitignore(5)"
            ) from None
    return ProjectIgnore(tuple(patterns))


def _expression(pattern: str) -> re.Pattern[str]:
    """Without a slash before its end, a pattern of .gitignore holds in every folder. Raises ValueError."""
    anywhere = "/" not in pattern.rstrip("/")
    parts = [part for part in pattern.split("/") if part]
    if not parts:
        raise ValueError(pattern)
    # `**` beside other characters is `*`; a negated class begins with !, which Go writes as ^
    parts = [part if part == "**" else re.sub(r"\*\*+", "*", part).replace("[!", "[^") for part in parts]
    return expression("/".join(["**", *parts] if anywhere else parts))
