"""The definition file of an image: ingredients in, text out. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from slurmddp.errors import UserError
from slurmddp.images.base import Pin
from slurmddp.render.engine import render

if TYPE_CHECKING:  # it brings pydantic, which a Dockerfile does not need
    from slurmddp.images.recipe import Ingredients


#: Bytes of one section and the head after it: Apptainer's scanner takes 64 KiB (Go, bufio.MaxScanTokenSize).
LARGEST_SECTION = (64 << 10) - 200


def render_sections(template: str, **values: object) -> str:
    """The definition file that a template and its values make.

    The template puts `own` in front of each of its section heads and header lines. It is a random word, so that no
    value can hold it. Raises UserError for any other head, for a build argument, and for a section that is too long.
    """
    marker = secrets.token_hex(16)
    lines = render(template, own=marker, **values).split("\n")
    size, head = 0, "the header"
    header = False  # between the template's own Bootstrap line and its first section
    for number, line in enumerate(lines):
        if line.startswith(marker):
            line = lines[number] = line.removeprefix(marker)
            header = not line.startswith("%")
            if not header:
                size, head = 0, line
        else:
            _check_line(line, header)
        size += len(line.encode("utf-8", "surrogateescape")) + 1
        if size > LARGEST_SECTION:
            message = f"the section that begins with {head[:80]!r} is longer than 64 KiB, the limit of Apptainer"
            raise UserError(message, todo="move long commands to a script, copy it into the image, and run it")
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
        todo = "it comes from the recipe, the Dockerfile or the base image: remove it there"
        raise UserError(f"the line {shown!r} {problem}", todo=todo)


#: Where an image keeps what its build has noted: the template and the lock look for it here.
SHARE = "/usr/local/share/slurmddp"
#: Where the image has the requirements file that it was made from.
REQUIREMENTS = f"{SHARE}/requirements.txt"
#: The list of the image's Python packages.
PACKAGES = f"{SHARE}/packages.txt"


def render_definition(
    image: Ingredients, version: str, pins: Mapping[str, Pin] = MappingProxyType({}), commit: str | None = None
) -> str:
    """The text of the definition file; `version` is slurmddp's own.

    pins:   by the names of bases in registries; a base without one is pulled by its name.
    commit: of the recipe. The image records it and the base's digest.
    Raises UserError for a value that would open a section, or that Apptainer takes for a build argument.
    """
    pin = pins.get(image.base.source)
    digest = pin.digest if pin else None
    index = ["--index-url", image.index] if image.index else []
    words = [*index, *(["--requirement", REQUIREMENTS] if image.requirements else []), *image.pip]
    labels = [
        ("slurmddp.version", version),
        ("slurmddp.recipe", image.name),
        ("slurmddp.base", image.base.reference),
        ("slurmddp.digest", digest or ""),
        ("slurmddp.commit", commit or ""),
        ("slurmddp.pip", " ".join(image.pip)),
        *image.labels,
    ]
    return render_sections(
        "container/image.def.j2",
        image=image, source=pin or image.base.source, version=version, digest=digest, words=words,
        share=SHARE, requirements=REQUIREMENTS, packages=PACKAGES,
        labels=[(name, value) for name, value in labels if value],
    )  # fmt: skip
