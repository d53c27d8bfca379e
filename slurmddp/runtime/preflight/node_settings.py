"""What node.sh tells a node of itself and of the others."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurmddp.runtime import signing
from slurmddp.runtime.errors import UserError
from slurmddp.runtime.signing import Key


@dataclass(frozen=True)
class NodeSettings:
    """One node's place in the preflight.

    run:       the run folder.
    folder:    where nodes leave files for each other.
    node, nodes: this node's name, and all of them, the head first.
    head, port: what torchrun will meet at: the head's name or address, and the rendezvous port.
    address:   this node's own, of `interface`; `network` is the same with its prefix length, empty where unknown.
    identity:  unique for the run, the job and the attempt.
    seconds:   after which a silent node counts as failed.
    gpus:      wanted on each node, 0 for none; vendor: nvidia, amd, or empty where it is not known.
    image:     what tells one image file from another, empty without a container.
    scratch:   the node's own folder, if there is one.
    key:       signs what nodes tell each other.
    """

    run: Path
    folder: Path
    node: str
    nodes: tuple[str, ...]
    head: str
    port: int
    address: str
    interface: str
    network: str
    identity: str
    seconds: float
    gpus: int
    vendor: str
    image: str
    scratch: str
    key: Key

    @property
    def is_head(self) -> bool:
        return self.node == self.nodes[0]

    @property
    def patience(self) -> float:
        """Seconds for one answer: of a port where somebody is known to listen, since a firewall may drop packets
        without a word; of a shared file system, asked for a file that it never denied before: no cache is in the way.
        """
        return min(10.0, self.seconds / 6)


def read(run: Path, environ: Mapping[str, str] = os.environ) -> NodeSettings:
    """Read the environment. Raises UserError if a variable is missing or makes no sense."""
    node = _text(environ, "SLURMDDP_NODE")
    nodes = tuple(environ.get("SLURMDDP_PREFLIGHT_NODES", "").split()) or (node,)
    if node not in nodes:
        raise UserError(f"SLURMDDP_PREFLIGHT_NODES does not contain this node, {node}: {' '.join(nodes)}")
    return NodeSettings(
        run=run,
        folder=Path(_text(environ, "SLURMDDP_LOGS")) / "preflight",
        node=node,
        nodes=tuple(dict.fromkeys(nodes)),
        head=_text(environ, "SLURMDDP_HEAD"),
        port=int(_number(environ, "SLURMDDP_PORT")),
        address=_text(environ, "SLURMDDP_ADDRESS"),
        interface=environ.get("SLURMDDP_INTERFACE", ""),
        network=environ.get("SLURMDDP_NETWORK", ""),
        identity=_text(environ, "SLURMDDP_RENDEZVOUS_ID"),
        seconds=_number(environ, "SLURMDDP_PREFLIGHT_SECONDS", "60"),
        gpus=int(_number(environ, "SLURMDDP_GPUS", "0")),
        vendor=environ.get("SLURMDDP_GPU_VENDOR", ""),
        image=environ.get("SLURMDDP_IMAGE", ""),
        scratch=environ.get("SLURMDDP_SCRATCH", ""),
        key=signing.load(run),
    )


def _text(environ: Mapping[str, str], name: str) -> str:
    text = environ.get(name, "")
    if not text:
        raise UserError(f"{name} is not set: only node.sh starts this program (SLURMDDP_STEP=preflight)")
    return text


def _number(environ: Mapping[str, str], name: str, default: str = "") -> float:
    text = environ.get(name) or default
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{name} must be a number, not {text!r}") from None
