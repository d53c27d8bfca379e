"""What an instance leaves on the machine to be found again: its folder, and the processes it is made of."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .build import Parts
from .process import ProcessId

STATE_VARIABLE = "SLURMDDP_CLUSTER_STATE"


def state_base() -> Path:
    """Where instances keep their state and the hosts' disks: $SLURMDDP_CLUSTER_STATE, else below /var/lib."""
    return Path(os.environ.get(STATE_VARIABLE) or "/var/lib/slurmddp-cluster").absolute()


@dataclass(frozen=True)
class Layout:
    """Where an instance keeps what on the machine."""

    folder: Path

    @property
    def state(self) -> Path:
        return self.folder / "state.json"

    @property
    def shared(self) -> Path:
        """What all hosts see: home/, slurm/ (its configuration), hosts, munge.key."""
        return self.folder / "shared"

    @property
    def home(self) -> Path:
        return self.shared / "home"

    @property
    def scratch(self) -> Path:
        """Where the hosts' /scratch is mounted, in the fabric's mount namespace alone."""
        return self.shared / "scratch"

    def disk(self, host: str) -> Path:
        """A host's own disk: upper/ (what it changed of the common root), work/, root/ (the mount point)."""
        return self.folder / "hosts" / host

    def log(self, host: str) -> Path:
        """What a host's set-up said, before its own init took over."""
        return self.disk(host) / "setup.log"


@dataclass
class State:
    """The processes and parts. fabric holds the outer PID namespace: with it, all the rest dies."""

    fabric: ProcessId
    owner: ProcessId | None
    parts: Parts
    hosts: dict[str, ProcessId] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> "State":
        """Read what save() wrote; FileNotFoundError where there is no instance."""
        data = json.loads(path.read_text())
        return cls(
            fabric=ProcessId(**data["fabric"]),
            owner=ProcessId(**data["owner"]) if data["owner"] else None,
            parts=Parts(**{name: Path(part) for name, part in data["parts"].items()}),
            hosts={name: ProcessId(**init) for name, init in data["hosts"].items()},
        )

    def save(self, path: Path) -> None:
        """Write it whole or not at all."""
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(asdict(self), indent=1, default=str))
        temporary.rename(path)
