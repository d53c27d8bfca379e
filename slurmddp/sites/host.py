"""What this host says about its cluster: its name, variables, files, and Slurm's ClusterName."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

#: Where slurm.conf is: the default, and a configless cluster's copy (slurm.conf(5), "Configless Slurm").
_SLURM_CONF = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf")
_CLUSTER_NAME = re.compile(r"^[ \t]*ClusterName[ \t]*=[ \t]*([^\s#]+)", re.IGNORECASE | re.MULTILINE)
#: slurm.conf names every node; the files of detection are one line.
_LARGEST = 1_000_000
#: Detection must stay fast on a cluster whose controller does not answer.
_SCONTROL_SECONDS = 0.5


class ClusterName(NamedTuple):
    """Slurm's ClusterName, and where it was read."""

    value: str
    source: str


@dataclass(frozen=True)
class Host:
    """A host as detection sees it. root: the folder that stands for / in tests."""

    name: str
    environment: Mapping[str, str]
    root: Path = Path("/")

    def exists(self, path: str) -> bool:
        return os.path.exists(self._below(path))

    def text(self, path: str) -> str | None:
        """Return the first megabyte of a file; None if it cannot be read."""
        below = self._below(path)
        try:
            if not below.is_file():  # opening a pipe would wait for its writer
                return None
            with below.open("rb") as handle:
                return handle.read(_LARGEST).decode("utf-8", errors="replace")
        except OSError:
            return None

    def cluster_name(self) -> ClusterName | None:
        """Return Slurm's ClusterName from the environment or slurm.conf, without a command."""
        if name := self.environment.get("SLURM_CLUSTER_NAME"):
            return ClusterName(name, "$SLURM_CLUSTER_NAME")
        named = self.environment.get("SLURM_CONF")
        for path in (named,) if named else _SLURM_CONF:
            if match := _CLUSTER_NAME.search(self.text(path) or ""):
                return ClusterName(match[1], path)
        return None

    def ask_slurm(self) -> ClusterName | None:
        """Return the ClusterName that scontrol reports; None if it is absent, fails, or takes too long."""
        import subprocess

        # SLURM_CLUSTERS would send the question to another cluster.
        environment = {name: value for name, value in self.environment.items() if name != "SLURM_CLUSTERS"}
        try:
            answer = subprocess.run(
                ["scontrol", "show", "config"],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_SCONTROL_SECONDS,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        match = _CLUSTER_NAME.search(answer.stdout.decode("utf-8", errors="replace"))
        return ClusterName(match[1], "scontrol") if match else None

    def _below(self, path: str) -> Path:
        return self.root / path.lstrip("/")


def this_host(environment: Mapping[str, str]) -> Host:
    """Return the host that this process runs on."""
    import platform

    return Host(platform.node(), environment)
