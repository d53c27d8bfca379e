"""What the ranks run in: one class per container runtime. A new one is a module here, and a word in this list."""

from typing import Literal

from slurmddp.container.apptainer import Apptainer, Singularity
from slurmddp.container.base import Bind, Container, NoContainer
from slurmddp.container.pyxis import Pyxis

__all__ = ["SIF_PROGRAMS", "Bind", "Container", "NoContainer", "Runtime", "runtime_named"]

#: The words of container.runtime. The first class is the default.
Runtime = Literal["apptainer", "singularity", "pyxis", "none"]
_RUNTIMES = (Apptainer, Singularity, Pyxis, NoContainer)
#: Programs that build and run .sif images.
SIF_PROGRAMS = tuple(each.runtime for each in _RUNTIMES if each.takes_sif)


def runtime_named(name: str | None) -> type[Container]:
    """Return the class for a value of container.runtime. None, or a word that its field refuses: the default."""
    return next((each for each in _RUNTIMES if each.runtime == name), _RUNTIMES[0])
