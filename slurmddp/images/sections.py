"""Renders a definition file, and refuses it where a value would open a section or a stage of its own.

Apptainer runs %setup and %pre on the host. It takes every line whose first word begins with % for the head of a
section, and every line that begins with `bootstrap:` for a new stage, wherever they stand (apptainer,
pkg/build/types/parser/deffile.go, scanDefinitionFile and All). Each value is checked where it is read; this is the last
check, on the text as a whole.
"""

from __future__ import annotations

import secrets

from slurmddp.errors import UserError
from slurmddp.render.engine import render

#: Bytes of one section and the head after it: Apptainer's scanner takes 64 KiB (Go, bufio.MaxScanTokenSize).
LARGEST_SECTION = (64 << 10) - 200


def render_sections(template: str, **values: object) -> str:
    """The definition file that a template and its values make.

    The template puts `own` in front of each of its section heads and header lines. It is a random word, so that no
    value can hold it. Raises UserError for any other head, for a build argument, and for a section that is too long.
    """
    own = secrets.token_hex(16)
    lines = render(template, own=own, **values).split("\n")
    size, head = 0, "the header"
    header = False  # between the template's own Bootstrap line and its first section
    for number, line in enumerate(lines):
        if line.startswith(own):
            line = lines[number] = line.removeprefix(own)
            header = not line.startswith("%")
            if not header:
                size, head = 0, line
        else:
            _check_line(line, header)
        size += len(line.encode("utf-8", "surrogateescape")) + 1
        if size > LARGEST_SECTION:
            raise UserError(
                f"the section that begins with {head[:80]!r} is longer than 64 KiB, the limit of Apptainer",
                todo="move long commands to a script, copy it into the image, and run it",
            )
    return "\n".join(lines)


def _check_line(line: str, header: bool) -> None:
    """Raise UserError for a line of a value that Apptainer would not take for text of its section."""
    text = line.lstrip()
    problem = ""
    if text.startswith("%"):
        problem = "opens a section of the definition file"
    elif line[:10].casefold() == "bootstrap:":  # Go's (?i) takes a long s for an s, too
        problem = "begins a stage of the definition file"
    elif header and text and not text.startswith("#"):
        problem = "is a header of the definition file"
    elif "{{" in line:
        problem = "contains '{{', which Apptainer would read as a build argument"
    if problem:
        shown = "".join(char if char.isprintable() else "?" for char in text[:80])
        raise UserError(
            f"the line {shown!r} {problem}",
            todo="it comes from the recipe, the Dockerfile or the base image: remove it there",
        )
