"""What .dockerignore keeps out of the build.

Follows moby/patternmatcher: the last pattern that matches a path or a folder above it decides.
"""

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

from slurmddp.errors import UserError


def expression(pattern: str) -> re.Pattern[str]:
    """Go's filepath.Match, and `**` for any number of folders, as a regular expression. Raises ValueError.

    What follows a star is looked for once, at its first place, as in fnmatch.translate: where it is found again later
    makes no difference to the stars after it. Tried at all places, eight `**/` would take years for one long path.
    """
    parts = _cut(pattern)
    halves = [ahead for (_, ahead), (star, _) in itertools.pairwise(parts) if star == "**/" and _is_half(ahead)]
    if len(pattern) > _LONGEST or len(halves) > _MOST_HALVES:
        raise ValueError(pattern)
    numbers = itertools.count()

    def once(text: str) -> str:
        name = f"g{next(numbers)}"
        return f"(?=(?P<{name}>{text}))(?P={name})"

    def written(parts: list[tuple[str, str]]) -> str:
        # A chunk goes from one star that crosses folders to the next one; `*` stays in a folder, so it lies in a chunk
        chunks: list[str] = []
        for number, (star, text) in enumerate(parts):
            if star == "*":
                chunks[-1] += f"[^/]*?{text}" if number == len(parts) - 1 else once(f"[^/]*?{text}")
            else:
                chunks.append(_STARS[star] + text)
        return "".join([*map(once, chunks[:-1]), chunks[-1]])

    return re.compile("|".join(map(written, _whole_folders(parts))), re.DOTALL)


#: Characters: no path is longer (PATH_MAX). Each `**/` that does not begin a folder doubles the expression.
_LONGEST, _MOST_HALVES = 4096, 3


def _is_half(ahead: str) -> bool:
    """Return whether what precedes a `**/` leaves it in the middle of a name."""
    return ahead != "" and not ahead.endswith("/")


def _whole_folders(parts: list[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """The pattern's forms in which each `**/` begins a folder: `a**/b` is `ab` or `a**` before `/b`."""
    for number, (star, text) in enumerate(parts[1:], 1):
        before, ahead = parts[number - 1]
        if star == "**/" and _is_half(ahead):
            none = [*parts[: number - 1], (before, ahead + text), *parts[number + 1 :]]
            some = [*parts[:number], ("**", "/" + text), *parts[number + 1 :]]
            return [*_whole_folders(none), *_whole_folders(some)]
    return [parts]


#: `**` and `**/` as regular expressions, and what stands before the first star.
_STARS = {"": "", "**": ".*?", "**/": "(?:.*?/)??"}


def _cut(pattern: str) -> list[tuple[str, str]]:
    """(star, the expression of what follows it) for each star, with what precedes the first one behind ""."""
    parts = [("", "")]
    at = 0
    while at < len(pattern):
        char = pattern[at]
        at += 1
        text = ""
        star = ""
        if pattern.startswith("**", at - 1):
            at += 1
            star = "**/" if pattern.startswith("/", at) else "**"
            at += len(star) - 2
        elif char == "*":
            star = "*"
        elif char == "?":
            text = "[^/]"
        elif char == "[":
            close = pattern.find("]", at + 1)
            if close < 0:
                raise ValueError(pattern)
            inside = pattern[at:close].replace("[", r"\[").replace("&&", r"\&&").replace("||", r"\||")
            text = f"[{inside}]"
            at = close + 1
        elif char == "\\" and at < len(pattern):
            text = re.escape(pattern[at])
            at += 1
        else:
            text = re.escape(char)
        before = parts[-1]
        if not star:
            parts[-1] = (before[0], before[1] + text)
        elif before[0] and not before[1] and (before[0], star) != ("**/", "*"):
            # One star after another: the greater one matches whatever both do
            parts[-1] = ("**" if "**" in (before[0], star) else star, "")
        else:
            parts.append((star, ""))
    return parts


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
        for exception, pattern in self.patterns:
            if any(pattern.fullmatch(path) for path in above):
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
    rules = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#") or not line.strip():
            continue
        pattern = line.strip()
        exception = pattern.startswith("!")
        parts = [part for part in pattern.removeprefix("!").strip().split("/") if part not in ("", ".")]
        if not parts:
            continue
        try:
            rules.append((exception, expression("/".join(parts))))
        except (ValueError, re.error):
            raise UserError(f"the pattern {pattern[:80]!r} is broken", where=f"{file}:{number}") from None
    return tuple(rules)
