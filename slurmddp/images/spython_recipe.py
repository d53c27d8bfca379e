"""The one place that drives spython's Dockerfile parser; each of its failures becomes one of our errors.

What was tried with spython 0.3.14: a continued line that begins with `add` becomes an ADD; `run` in lower case stays
in the command; a base whose name ends in `as` loses its end, and `as one` becomes the stage's name; a second FROM
without AS overwrites the first one; `COPY --from=0` is dropped with a warning; options of COPY become sources; ENV
with an escaped space or quote ends in IndexError; RUN's exec form, options and heredocs come out as shell lines; a
healthcheck becomes %test. Plain words, one instruction a line and a name for each stage come through whole, and that
is what it is to be given (see dockerfile/through.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from slurmddp.errors import ExternalError

_SILENT = -10  # below spython's own levels


@dataclass(frozen=True)
class Layer:
    """One stage, as spython's Recipe has it.

    install:    lines of %post, with ENV as NAME=VALUE and WORKDIR as mkdir and cd, in order.
    environ:    NAME=VALUE.
    files:      (source, destination).
    files_from: the stage, and the same.
    """

    name: str
    base: str
    install: tuple[str, ...]
    environ: tuple[str, ...]
    files: tuple[tuple[str, str], ...]
    files_from: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    labels: tuple[str, ...]
    workdir: str | None
    cmd: str | None
    entrypoint: str | None


def parse_layers(lines: Sequence[str]) -> tuple[Layer, ...]:
    """The stages of a Dockerfile given as lines, in order. Raises ExternalError."""
    try:
        bot = import_module("spython.logger").bot
        parser = import_module("spython.main.parse.parsers").DockerParser(None, load=False)
    except ImportError:
        raise ExternalError("spython is missing from this installation: install slurmddp again") from None
    level, bot.level = bot.level, _SILENT
    try:
        parser.lines = [f"{line}\n" for line in lines]
        parser.parse()
        return tuple(_layer(name, recipe) for name, recipe in parser.recipe.items())
    except (Exception, SystemExit) as error:
        raise ExternalError(f"spython failed to read a Dockerfile: {type(error).__name__}: {error}") from error
    finally:
        bot.level = level


def _layer(name: str, recipe: Any) -> Layer:
    return Layer(
        name=str(name),
        base=str(recipe.fromHeader).strip(),
        install=tuple(map(str, recipe.install)),
        environ=tuple(map(str, recipe.environ)),
        files=_pairs(recipe.files),
        files_from=tuple((str(stage), _pairs(files)) for stage, files in recipe.layer_files.items()),
        labels=tuple(str(label) for line in recipe.labels for label in line),
        workdir=None if recipe.workdir is None else str(recipe.workdir),
        cmd=None if recipe.cmd is None else str(recipe.cmd),
        entrypoint=None if recipe.entrypoint is None else str(recipe.entrypoint),
    )


def _pairs(files: Any) -> tuple[tuple[str, str], ...]:
    return tuple((str(source), str(destination)) for source, destination in files)
