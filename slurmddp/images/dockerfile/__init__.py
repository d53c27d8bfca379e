"""Turns a Dockerfile into an Apptainer definition file.

lines -> stages -> interpret (words, scope, copying, running) -> templates/container/dockerfile.def.j2.
"""

from slurmddp.images.dockerfile.convert import convert

__all__ = ["convert"]
