"""What a registry says of an image."""

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
    def versions(self) -> dict[str, str | None]:
        """Return what the image writes about itself: CUDA, the NVIDIA driver whose libraries it bundles, torch, NCCL.

        CUDA's has two to four numbers, torch's its local part (2.7.0a0+79aa17489c).
        """
        nccl = self._variable("NCCL_VERSION")
        match = _PACKAGE_REVISION.fullmatch(nccl) if nccl else None
        return {
            "cuda": self._variable("CUDA_VERSION"),
            "driver": self._variable("CUDA_DRIVER_VERSION"),
            "torch": self._variable("PYTORCH_BUILD_VERSION") or self._variable("PYTORCH_VERSION"),
            "nccl": match.group(1) if match else nccl,
        }

    def facts(self) -> dict[str, object]:
        """Return what a lock tells of a base."""
        fields = {name: getattr(self, name) for name in ("digest", "platform_digest", "architecture", "created")}
        return {"reference": str(self.reference), **fields, "layer_bytes": self.size, **self.versions}

    def _variable(self, name: str) -> str | None:
        return self.env.get(name, "").strip() or None
