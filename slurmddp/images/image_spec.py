"""What is to be built, whether a recipe or a Dockerfile says it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from slurmddp import __version__
from slurmddp.errors import UserError
from slurmddp.images import releases
from slurmddp.images.base import Base, Pin
from slurmddp.images.context.staging import Item
from slurmddp.images.definition import render_definition

if TYPE_CHECKING:
    from slurmddp.images.recipe import Ingredients
    from slurmddp.images.registry.image import RegistryImage


@dataclass(frozen=True)
class Wanted:
    """An image to be."""

    name: str  # of the recipe, or of the Dockerfile's folder
    bases: tuple[Base, ...]  # what its stages start from, the last stage's at the end
    sources: tuple[Path, ...]  # files and folders whose content goes in, the base not among them
    pip: tuple[str, ...]
    plain: str  # the definition with nothing in it that changes nothing in the image: what its inputs' hash is made of
    #: (pins of bases in registries, commit or None) -> the definition file's text
    labelled: Callable[[Mapping[str, Pin], str | None], str]
    notes: tuple[str, ...] = ()  # for the user, before the build
    #: of the user's recipe, whose commit the image records; None without a recipe of the user
    folder: Path | None = None
    items: tuple[Item, ...] = ()  # those of them that are gathered in a folder beside the definition
    #: what registries say of the bases, by their names -> the same image, with what follows from it
    informed: Callable[[Mapping[str, RegistryImage]], Wanted] | None = None
    #: what is known only once registries were asked; `labelled` raises it
    undecided: UserError | None = None

    @property
    def definition(self) -> str:
        """The definition file without digests and commit. Raises UserError."""
        return self.labelled({}, None)

    @property
    def base(self) -> Base:
        """Return what its last stage starts from."""
        return self.bases[-1]

    @property
    def in_registries(self) -> tuple[str, ...]:
        """The names of the bases that are pulled from registries, each once, in their order."""
        return tuple(dict.fromkeys(base.source for base in self.bases if base.bootstrap == "docker"))

    def with_bases(self, bases: Mapping[str, RegistryImage]) -> Wanted:
        """The image once registries were asked; `plain` stays what it is."""
        return self.informed(bases) if self.informed else self


def of_recipe(image: Ingredients) -> Wanted:
    """An image as its recipe and the command line say."""

    def informed(bases: Mapping[str, RegistryImage]) -> Wanted:
        tag, reported = releases.tag_of(image.base.source), bases.get(image.base.source)
        if tag is None or reported is None:
            return spec
        known = replace(image, base=replace(image.base, release=releases.reported(tag, reported)))
        return replace(spec, labelled=partial(render_definition, known, __version__), notes=())

    tag = releases.tag_of(image.base.source)
    unlisted = tag is not None and image.base.release is None
    note = f"NGC {tag} is not in slurmddp's table of releases, and a dry run asks no registry: its content is unknown"
    spec = Wanted(
        image.name,
        (image.base,),
        image.sources,
        image.pip,
        # The image records slurmddp's version and the commit, which change nothing in it.
        plain=render_definition(image, version=""),
        labelled=partial(render_definition, image, __version__),
        folder=image.folder,
        notes=(note,) if unlisted else (),
        informed=informed,
    )
    return spec


def of_dockerfile(
    path: Path,
    arguments: Mapping[str, str],
    target: str | None,
    context: Path | None = None,
    secrets: Mapping[str, Item] = MappingProxyType({}),
) -> Wanted:
    """An image as a Dockerfile says. Raises UserError, with file and line, for what cannot be converted.

    context: the folder that COPY takes from; secrets: by their ids.
    """
    from slurmddp.images.dockerfile import convert

    if not path.is_file():
        todo = "give the path of the file itself"
        raise UserError(f"the Dockerfile {path} does not exist", where="--dockerfile", todo=todo)
    if context is not None and not context.is_dir():
        todo = "give the folder that COPY copies from"
        raise UserError(f"the folder {context} does not exist", where="--context", todo=todo)
    return convert(path, context=context, arguments=arguments, secrets=secrets, target=target)
