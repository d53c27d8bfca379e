"""First line, characters and continuations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from slurmddp.scripts.check.finding import Finding
from slurmddp.scripts.check.fix import Draft, fixes
from slurmddp.scripts.check.shell import word_end

_TYPED = str.maketrans(
    {**dict.fromkeys("\u00a0\u202f\u3000", " "), **dict.fromkeys("\ufeff\u200b\u200c\u200d\u2060\u00ad", ""),
     **dict.fromkeys("\u201c\u201d", '"'), **dict.fromkeys("\u2018\u2019", "'")}
)  # fmt: skip
_DASHES = "[\u2013\u2014\u2212]"


@fixes("crlf", changes=None)
def crlf(draft: Draft, finding: Finding) -> Iterator[Draft]:
    yield replace(draft, lines=tuple(each.removesuffix("\r") for each in draft.lines))


@fixes("invisible-character", changes=None)
def invisible_character(draft: Draft, finding: Finding) -> Iterator[Draft]:
    for each in draft.in_text:
        if each.rule.id == "invisible-character" and each.severity == "error":
            draft = draft.put(each.line, _typed(draft.line(each.line)))
    yield draft


def _typed(text: str) -> str:
    """The line as a keyboard types it; what stands in straight quotes, or in a comment, stays."""
    directive = text.startswith("#SBATCH")
    end = re.search(r"\s#", text[8:] if directive else text)
    at = (end.start() + 8 * directive) if end else len(text)
    if text[:1] == "\ufeff":
        return text[1:]
    parts = [text[:at]] if directive else re.split(r"(\"[^\"]*\"|'[^']*')", text[:at])
    for index in range(0, len(parts), 2):
        single = re.sub(rf"{_DASHES}(?=[A-Za-z]?(?:[\s=\d]|$))", "-", parts[index])
        parts[index] = re.sub(_DASHES, "--", single).translate(_TYPED)
    return "".join(parts) + text[at:]


@fixes("no-shebang", changes=None)
def no_shebang(draft: Draft, finding: Finding) -> Iterator[Draft]:
    if any(each.rule.id == "syntax" for each in draft.in_text):
        return  # it may be no shell script
    first = next((at for at, text in enumerate(draft.lines, 1) if text.strip()), 1)
    written = draft.line(first).lstrip("\ufeff \t")
    yield draft.remove(first).insert(1, written) if written.startswith("#!") else draft.insert(1, "#!/bin/bash")


@fixes("broken-continuation", changes=None)
def broken_continuation(draft: Draft, finding: Finding) -> Iterator[Draft]:
    at, text = finding.line, draft.line(finding.line)
    if finding.severity != "error":
        return
    if tail := re.search(r"\\([ \t]+)(#.*)?$", text):
        yield _above(draft.put(at, text[: tail.start() + 1]), at, [tail[2]] if tail[2] else [])
        return
    yield _joined(draft, at)


@fixes("no-program", changes=None)
def no_program(draft: Draft, finding: Finding) -> Iterator[Draft]:
    end = finding.line
    while draft.line(end).endswith("\\") and draft.line(end + 1).strip()[:1] not in ("", "#"):
        end += 1
    if draft.line(end).endswith("\\"):
        yield _joined(draft, end + 1)
    elif re.match(r"\s*(-m\s|[\w./$-]+\.py\b)", draft.line(end + 1)):
        yield draft.put(end, draft.line(end).rstrip() + " \\")


def _joined(draft: Draft, at: int) -> Draft:
    """Remove empty lines and comments that begin at a line and end a command."""
    comments = []
    while draft.line(at).strip()[:1] in ("", "#") and at < len(draft.lines):
        comments += [draft.line(at).strip()] if draft.line(at).strip() else []
        draft = draft.remove(at)
    return _above(draft, at - 1, comments)


def _above(draft: Draft, at: int, comments: list[str]) -> Draft:
    """Put comments above the command that a line belongs to."""
    while draft.line(at - 1).endswith("\\"):
        at -= 1
    indent = re.match(r"\s*", draft.line(at))
    return draft.insert(at, *((indent[0] if indent else "") + each for each in comments))


@fixes("blank-in-assignment", changes=None)
def blank_in_assignment(draft: Draft, finding: Finding) -> Iterator[Draft]:
    text = draft.line(finding.line)
    match = re.match(r"(\s*(?:export\s+)?[A-Za-z_]\w*)\s+=\s*(\S.*)", text, re.DOTALL)
    if match and re.fullmatch(r"\s*(#.*)?", match[2][word_end(match[2], 0) :]):
        yield draft.put(finding.line, f"{match[1]}={match[2]}")
