"""The table of NVIDIA's PyTorch images, read from containers/tables/ngc-pytorch.yaml when it is needed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from slurmddp.assets import asset_folder

if TYPE_CHECKING:
    from slurmddp.images.registry.image import RegistryImage

REPOSITORY = "nvcr.io/nvidia/pytorch"
TAG = re.compile(r"(\d\d\.\d\d)(?:-py3)?")


@dataclass(frozen=True)
class Release:
    """One NGC PyTorch release. None: unknown, and not to be guessed."""

    tag: str  # year and month, "25.04"
    cuda: str | None
    torch: str | None
    driver: str | None  # the NVIDIA driver that the image bundles, "575.51.02"
    nccl: str | None
    python: str | None
    triton: tuple[str, ...] = ()  # fields taken from the same month's Triton image, which is usually the same
    weak: tuple[str, ...] = ()  # fields with a weak source
    source: str = "slurmddp's table of releases"  # who says all this

    @property
    def reference(self) -> str:
        """The image's name in NVIDIA's registry."""
        return reference(self.tag)


def reference(tag: str) -> str:
    """`nvcr.io/nvidia/pytorch:25.04-py3` of the tag `25.04`."""
    return f"{REPOSITORY}:{tag}-py3"


def reported(tag: str, image: RegistryImage) -> Release:
    """The release as its registry describes it now."""
    known = image.versions
    return Release(tag, known["cuda"], known["torch"], known["driver"], known["nccl"], None, source="its registry")


def of_reference(name: str) -> Release | None:
    """The release behind a registry name such as `nvcr.io/nvidia/pytorch:25.04-py3`; None for any other."""
    tag = tag_of(name)
    return releases().get(tag) if tag else None


def tag_of(name: str) -> str | None:
    """The tag, `25.04`, of a registry name that is one of NVIDIA's PyTorch images, whether the table has it or not."""
    repository, _, tag = name.partition("@")[0].partition(":")
    match = TAG.fullmatch(tag) if repository == REPOSITORY and tag.endswith("-py3") else None
    return match.group(1) if match else None


@cache
def releases() -> Mapping[str, Release]:
    """All known releases by tag, oldest first."""
    from slurmddp.job.document import read_file

    path = asset_folder("containers") / "tables" / "ngc-pytorch.yaml"
    table = read_file(path, "releases", f"containers/tables/{path.name}").tree["releases"]
    by_tag = {}
    for tag, row in sorted(table.items()):
        marks: dict[str, Any] = {key: tuple(map(str, row.get(key) or ())) for key in ("triton", "weak")}
        by_tag[tag] = Release(tag, *(row[key] for key in ("cuda", "torch", "driver", "nccl", "python")), **marks)
    return by_tag
