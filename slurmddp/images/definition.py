"""The definition file of an image: a base and pip packages in, text out. Pure."""

from __future__ import annotations

import re

from slurmddp.errors import UserError
from slurmddp.images.base import Base, check_text
from slurmddp.render.engine import render

# What begins otherwise is an option or a path, and a line that begins with '%' opens a section wherever it
# stands (apptainer, pkg/build/types/parser/deffile.go, scanDefinitionFile).
_REQUIREMENT = re.compile(r"[A-Za-z0-9].*")
_PASSWORD = re.compile(r"(https?://[^/\s]*@|://[^/\s@]*:[^/\s]*@)")


def check_requirement(text: str, where: str = "--pip") -> str:
    """One requirement as pip takes it: `name`, `name==1.2`, `name[extra]>=3`, `name @ https://...`, `git+https://...`.

    Raises UserError for options, paths, and addresses that hold a password: the definition stays in the
    image.
    """
    try:
        check_text(text, "the requirement")
    except UserError as error:
        raise UserError(error.what, where=where, todo="write one requirement, such as 'datasets>=3'") from None
    if not _REQUIREMENT.fullmatch(text):
        raise UserError(
            f"{text!r} is not a requirement but an option or a path",
            where=where,
            todo="write a name, such as 'datasets>=3'",
        )
    if _PASSWORD.search(text):
        raise UserError(
            "a requirement's address holds a user or password, which everyone could read in the image",
            where=where,
            todo="put the package into an index or a public repository",
        )
    return text


def render_definition(base: Base, pip: tuple[str, ...], version: str) -> str:
    """The text of the definition file; `version` is slurmddp's own.

    Raises UserError for a requirement that cannot stand in it, ValueError where anything would be left that
    Apptainer takes for a build argument.
    """
    packages = tuple(check_requirement(item) for item in pip)
    text = render("container/image.def.j2", base=base, pip=packages, version=version)
    if "{{" in text or "}}" in text:
        raise ValueError("the definition file holds '{{' or '}}', which Apptainer takes for a build argument")
    return text
