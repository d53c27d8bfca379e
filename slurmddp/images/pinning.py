"""The bases in registries: what is known of them, and the digests that an image is built from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from slurmddp.errors import UserError
from slurmddp.images.base import Pin

if TYPE_CHECKING:
    from slurmddp.images.registry.image import RegistryImage
    from slurmddp.images.registry.settings import RegistrySettings


def resolve_all(names: Iterable[str], settings: RegistrySettings) -> dict[str, RegistryImage]:
    """Return the registries' answers about these images. Raises UserError, ExternalError, as `client.resolve` does.

    Some over plain HTTP and some over HTTPS are refused: the builder can be told for all of a build's registries only.
    """
    from slurmddp.images.registry.client import resolve
    from slurmddp.images.registry.reference import parse_reference

    names = tuple(names)
    by_scheme = {settings.location(parse_reference(name)).scheme: name for name in names}
    if len(by_scheme) > 1:
        raise UserError(
            f"{by_scheme['http']} comes over plain HTTP and {by_scheme['https']} over HTTPS, but one build can "
            f"use HTTP or HTTPS, not both",
            todo="use one registry for both, or build a .sif from one of them first and use it as the base",
        )
    return {name: resolve(name, settings=settings) for name in names}


def pins(images: Mapping[str, RegistryImage], settings: RegistrySettings) -> dict[str, Pin]:
    """Each of these bases by its digest, and at the mirror where the settings name one."""
    return {name: Pin(settings.location(image.reference).repository, image.digest) for name, image in images.items()}


def speaks_plainly(images: Mapping[str, RegistryImage], settings: RegistrySettings) -> bool:
    """Return whether any of them is had over plain HTTP, which Apptainer and Singularity have to be told."""
    return any(settings.location(image.reference).scheme == "http" for image in images.values())


def facts_of(image: RegistryImage) -> dict[str, object]:
    """Return what the lock tells of a base in a registry."""
    return {
        "reference": str(image.reference),
        "digest": image.digest,
        "platform_digest": image.platform_digest,
        "architecture": image.architecture,
        "created": image.created,
        "layer_bytes": image.size,
        "cuda": image.cuda_version,
        "driver": image.cuda_driver_version,
        "torch": image.torch_version,
        "nccl": image.nccl_version,
    }
