"""What a registry says of an image."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from slurmddp.images.registry.reference import Reference

# nvidia/cuda sets NCCL_VERSION to the version of Debian's or Red Hat's package (NV_LIBNCCL_PACKAGE_VERSION, such as
# 2.17.1-1 or 2.15.5-1+cuda11.8): what follows the dash is the package's revision, not NCCL's.
_PACKAGE_REVISION = re.compile(r"(\d+(?:\.\d+)*)-\d[\w.+~]*")


@dataclass(frozen=True)
class RegistryImage:
    """An image by its manifest and configuration. None, or "": the image does not say. All texts are single lines."""

    reference: Reference  # what was asked for, spelled out
    digest: str  # of what the reference names, an image or an index of images; with it, a name is pinned
    platform_digest: str  # of this architecture's manifest; the same where there is no index
    architecture: str  # in Go's words: amd64, arm64
    os: str
    env: Mapping[str, str] = field(default_factory=dict)  # the environment that the image sets
    entrypoint: tuple[str, ...] | None = None
    workdir: str | None = None  # workdir, user: what its configuration sets; None: it sets none (/ and root then)
    user: str | None = None
    shell: tuple[str, ...] | None = None  # what RUN and CMD in shell form are handed to
    triggers: tuple[str, ...] = ()  # its ONBUILD instructions; one of several lines is only counted, as "..."
    created: str | None = None  # RFC 3339, as the image has it
    size: int = 0  # bytes of the layers as they are pulled (compressed)

    @property
    def cuda_driver_version(self) -> str | None:
        """The NVIDIA driver whose libraries the image bundles, such as 575.51.02."""
        return self._variable("CUDA_DRIVER_VERSION")

    @property
    def cuda_version(self) -> str | None:
        """Return the version as the image writes it: with two to four numbers."""
        return self._variable("CUDA_VERSION")

    @property
    def torch_version(self) -> str | None:
        """Return the version as the image writes it, with its local part (2.7.0a0+79aa17489c)."""
        return self._variable("PYTORCH_BUILD_VERSION") or self._variable("PYTORCH_VERSION")

    @property
    def nccl_version(self) -> str | None:
        """NCCL's own version, without the revision of its Debian package."""
        version = self._variable("NCCL_VERSION")
        match = _PACKAGE_REVISION.fullmatch(version) if version else None
        return match.group(1) if match else version

    def facts(self) -> dict[str, object]:
        """Return what a lock tells of a base."""
        names = ("digest", "platform_digest", "architecture", "created")
        fields = {
            "reference": str(self.reference),
            **{name: getattr(self, name) for name in names},
            "layer_bytes": self.size,
        }
        versions = (self.cuda_version, self.cuda_driver_version, self.torch_version, self.nccl_version)
        return {**fields, **dict(zip(("cuda", "driver", "torch", "nccl"), versions, strict=True))}

    def _variable(self, name: str) -> str | None:
        return self.env.get(name, "").strip() or None
