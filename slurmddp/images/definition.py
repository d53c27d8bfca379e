"""The definition file of an image: ingredients in, text out. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from slurmddp.images.base import Pin
from slurmddp.images.sections import render_sections

if TYPE_CHECKING:  # it brings pydantic, which a Dockerfile does not need
    from slurmddp.images.recipe import Ingredients

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
        image=image,
        source=pin or image.base.source,
        version=version,
        digest=digest,
        words=words,
        share=SHARE,
        requirements=REQUIREMENTS,
        packages=PACKAGES,
        labels=[(name, value) for name, value in labels if value],
    )
