"""Turns a Dockerfile into an Apptainer definition file.

lines -> stages -> interpret (words, scope, copying, running) -> templates/container/dockerfile.def.j2.
"""

from __future__ import annotations

from slurmddp.images.dockerfile.convert import Converted, convert

__all__ = ["Converted", "convert"]
