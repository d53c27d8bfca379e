"""What the ranks run in: one class per container runtime. A new runtime is a module here, and a word in this list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from slurmddp.container.apptainer import Apptainer
from slurmddp.container.base import Bind, Container
from slurmddp.container.none import NoContainer
from slurmddp.container.pyxis import Pyxis

__all__ = ["DEFAULT", "RUNTIMES", "SIF_PROGRAMS", "Bind", "Container", "NoContainer", "Runtime", "runtime_named"]

#: The words of container.runtime.
Runtime = Literal["apptainer", "singularity", "pyxis", "none"]
RUNTIMES: Mapping[str, type[Container]] = {
    "apptainer": Apptainer,
    "singularity": Apptainer,
    "pyxis": Pyxis,
    "none": NoContainer,
}
DEFAULT: Runtime = "apptainer"
#: Programs that build and run .sif images.
SIF_PROGRAMS = tuple(name for name, runtime in RUNTIMES.items() if runtime.takes_sif)


def runtime_named(name: str | None) -> type[Container]:
    """Return the class for a value of container.runtime. None, or a word that its field refuses: the default."""
    return RUNTIMES.get(name or DEFAULT, RUNTIMES[DEFAULT])
