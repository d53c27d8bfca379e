"""No container: the ranks run in a Python environment of the nodes."""

from __future__ import annotations

from slurmddp.container.base import Container


class NoContainer(Container):
    """container.runtime: none."""

    __slots__ = ()
    needs_image = False
