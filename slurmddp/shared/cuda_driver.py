"""Which NVIDIA driver runs a CUDA without the image's own libcuda: docs.nvidia.com/deploy/cuda-compatibility."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

#: The least driver by CUDA major, for minor-version compatibility (minor-version-compatibility.html, table 1).
FLOORS = {11: "450.80.02", 12: "525.60.13", 13: "580"}

_VERSION = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})*")
#: GeForce and Titan by name; rtx3090, RTX 2080 Ti: a workstation's RTX (A6000, 5000) has no such number.
_CONSUMER = re.compile(r"geforce|titan|gtx|rtx[^a-z0-9]*[1-5]0[5-9]0")


class Version(NamedTuple):
    """A driver's or CUDA's version; fields count as numbers, so 535.54.03 is older than 535.183.01."""

    fields: tuple[int, ...]

    @classmethod
    def parse(cls, text: str | None) -> Version | None:
        """Parse "575.51.02" or "12.9.0.036"; None if the text is no version."""
        text = (text or "").strip()
        if not _VERSION.fullmatch(text):
            return None
        fields = [int(field) for field in text.split(".")]
        while len(fields) > 1 and fields[-1] == 0:  # 580 and 580.0 are one
            fields.pop()
        return cls(tuple(fields))

    @classmethod
    def known(cls, text: str) -> Version:
        """Parse a version of our own tables. Raises ValueError where it is none."""
        version = cls.parse(text)
        if version is None:
            raise ValueError(f"{text!r} is not a version")
        return version

    @property
    def major(self) -> int:
        """CUDA's major release, or the driver's branch."""
        return self.fields[0]


def support(
    driver: Version, released: Version | None, cuda: Version | None
) -> Literal["native", "minor", "older", "unknown"]:
    """Return how a driver runs a CUDA. released: the driver that this CUDA was released with; None: unknown.

    older: than all that run this major release, so only the image's own libcuda can help.
    """
    if released is not None and driver >= released:
        return "native"
    floor, above = (FLOORS.get(cuda.major + more) if cuda is not None else None for more in (0, 1))
    if floor is None:
        return "unknown"
    if driver < Version.known(floor):
        return "older"
    newer_cuda = released is None and above is not None and driver >= Version.known(above)
    return "native" if newer_cuda else "minor"


def is_consumer(gpu: str) -> bool:
    """Return whether a GPU is a consumer card, for which there is no forward compatibility."""
    return _CONSUMER.search(gpu.lower()) is not None
