"""A recipe: what an image is made from, in a file of its own that build-image reads."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from slurmddp.job.types import Adds, EnvMap, Line, Model, PathStr, Text


def in_definition(text: str) -> str:
    """Raise ValueError for a text that a section of a definition file would not carry unchanged.

    A line whose first word begins with % opens a section, and {{ name }} is a build argument, wherever they stand
    (apptainer, pkg/build/types/parser/deffile.go).
    """
    if "{{" in text or "}}" in text:
        raise ValueError("contains '{{' or '}}', which Apptainer would read as a build argument")
    if any(line.lstrip().startswith("%") for line in text.splitlines()):
        raise ValueError("has a line that begins with '%', which would open a section of the definition file")
    if any((ord(char) < 32 and char not in "\n\t") or ord(char) == 127 for char in text):
        raise ValueError("contains a control character")
    return text


def _commands(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty")
    return in_definition(text).rstrip()


def _apt_package(text: str) -> str:
    # apt-get install takes NAME, NAME:ARCH, NAME=VERSION, NAME/RELEASE; NAME- would remove it (apt-get(8)).
    if (
        not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*(:[a-z0-9-]+)?(=[A-Za-z0-9.+~:-]+|/[a-z0-9.-]+)?", text)
        or text[-1] == "-"
    ):
        raise ValueError("is not a Debian package: write NAME or NAME=VERSION")
    return text


def _label(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/-]*", text):
        raise ValueError("must be letters, digits, '.', '_', '/' or '-', and begin with a letter or digit")
    return text


Commands = Annotated[Text, AfterValidator(_commands)]
AptPackage = Annotated[str, AfterValidator(_apt_package)]
LabelName = Annotated[str, AfterValidator(_label)]


class Copied(Model):
    """A file or folder that goes into the image: `source:destination`, the source relative to the recipe."""

    source: PathStr
    destination: Line

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        source, separator, destination = value.rpartition(":")
        if not (source and separator and destination):
            raise ValueError("must be source:destination")
        return {"source": source, "destination": destination}

    @field_validator("destination")
    @classmethod
    def _in_the_image(cls, value: str) -> str:
        if not value.startswith("/") or ".." in value.split("/"):
            raise ValueError("must be an absolute path in the image, without '..'")
        if re.match(r"/(var/)?tmp(/|$)", value):
            raise ValueError("is in /tmp or /var/tmp, which the build replaces with the host's")
        return value

    @field_validator("source", "destination")
    @classmethod
    def _quotable(cls, value: str) -> str:
        if '"' in value:
            raise ValueError("contains '\"', which %files does not accept")
        return in_definition(value)


class Recipe(Model):
    """A recipe for an image: containers/NAME.yaml, or your own file. Relative paths start at the folder of the file.

    title:        what the image is for.
    base:         an NGC release (25.04), docker://REF, docker-archive:FILE, a .sif, or a root folder.
    apt, pip:     packages; requirements: a requirements file. The base's own torch stays, and so do its pins.
    index:        a package index, instead of pip's own.
    installer:    what installs the Python packages. If the base has no uv, pip installs it.
    files:        copied before anything is installed.
    environment:  in the build and in the image.
    setup:        shell commands at the end of the build; test: commands that must exit with 0 in the finished image.
    labels:       labels of the image, besides those that name its inputs.
    """

    title: Line | None = None
    base: Line
    apt: Annotated[tuple[AptPackage, ...], Adds()] = ()
    pip: Annotated[tuple[Line, ...], Adds()] = ()
    requirements: PathStr | None = None
    index: Line | None = None
    installer: Literal["pip", "uv"] = "pip"
    files: Annotated[tuple[Copied, ...], Adds()] = ()
    environment: EnvMap = {}
    setup: Annotated[tuple[Commands, ...], Adds()] = ()
    test: Annotated[tuple[Commands, ...], Adds()] = ()
    labels: Annotated[dict[LabelName, Line], Field()] = {}

    @field_validator("environment", "labels")
    @classmethod
    def _carried(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            try:
                in_definition(text)
            except ValueError as error:
                raise ValueError(f"sets {name}, which {error}") from None
        return value
