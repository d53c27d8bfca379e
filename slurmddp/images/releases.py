"""The table of NVIDIA's PyTorch images, read from containers/tables/ngc-pytorch.yaml when it is needed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from slurmddp.assets import asset_folder
from slurmddp.errors import UserError

REPOSITORY = "nvcr.io/nvidia/pytorch"
TAG = re.compile(r"(\d\d\.\d\d)(?:-py3)?")
_SHOWN_NEAREST = 3


@dataclass(frozen=True)
class Release:
    """One NGC PyTorch release. None: unknown, and not to be guessed.

    tag:    year and month, "25.04".
    driver: the NVIDIA driver that the image bundles, "575.51.02".
    triton: fields taken from the same month's Triton image, which is usually the same.
    weak:   fields with a weak source.
    """

    tag: str
    cuda: str | None
    torch: str | None
    driver: str | None
    nccl: str | None
    python: str | None
    triton: tuple[str, ...] = ()
    weak: tuple[str, ...] = ()

    @property
    def reference(self) -> str:
        """The image's name in NVIDIA's registry."""
        return reference(self.tag)


def reference(tag: str) -> str:
    """`nvcr.io/nvidia/pytorch:25.04-py3` of the tag `25.04`."""
    return f"{REPOSITORY}:{tag}-py3"


def release(tag: str) -> Release:
    """The release of `25.04` or `25.04-py3`. Raises UserError that names the nearest known ones."""
    match = TAG.fullmatch(tag)
    if not match:
        raise UserError(f"{tag!r} is not an NGC release", todo="write year and month, such as 25.04")
    found = releases().get(match.group(1))
    if found is None:
        near = ", ".join(nearest(match.group(1)))
        raise UserError(
            f"NGC PyTorch release {match.group(1)} is not in the table; the nearest are {near}",
            todo=f"use one of these; if NVIDIA has published this release: docker://{reference(match.group(1))}",
        )
    return found


def of_reference(name: str) -> Release | None:
    """The release behind a registry name such as `nvcr.io/nvidia/pytorch:25.04-py3`; None for any other."""
    tag = tag_of(name)
    return releases().get(tag) if tag else None


def tag_of(name: str) -> str | None:
    """The tag, `25.04`, of a registry name that is one of NVIDIA's PyTorch images, whether the table has it or not."""
    repository, _, tag = name.partition("@")[0].partition(":")
    match = TAG.fullmatch(tag) if repository == REPOSITORY and tag.endswith("-py3") else None
    return match.group(1) if match else None


def nearest(tag: str) -> list[str]:
    """The known tags nearest in time to `YY.MM`, oldest first."""
    return sorted(sorted(releases(), key=lambda known: abs(_months(known) - _months(tag)))[:_SHOWN_NEAREST])


@cache
def releases() -> Mapping[str, Release]:
    """All known releases by tag, oldest first."""
    from slurmddp.spec.document import read_file

    path = asset_folder("containers") / "tables" / "ngc-pytorch.yaml"
    table = read_file(path, "releases", f"containers/tables/{path.name}").tree["releases"]
    return {tag: _release(tag, row) for tag, row in sorted(table.items())}


def _release(tag: str, row: Mapping[str, Any]) -> Release:
    marks: dict[str, Any] = {key: tuple(str(name) for name in row.get(key) or ()) for key in ("triton", "weak")}
    known = {key: row[key] for key in ("cuda", "torch", "driver", "nccl", "python")}
    return Release(tag=tag, **known, **marks)


def _months(tag: str) -> int:
    year, month = tag.split(".")
    return int(year) * 12 + int(month)
