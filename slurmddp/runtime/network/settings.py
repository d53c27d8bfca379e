"""What node.sh tells a rank of the measurement."""

import os
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmddp.runtime import signing
from slurmddp.runtime.network.judge import Wish


@dataclass(frozen=True)
class Settings:
    """One rank's place in the measurement.

    node, nodes: this node's name, and all names; number: of this node, from 0, the head.
    local, ranks: this rank's number on its node, and how many each node has.
    head, port: where the ranks meet.      logs: the folder of the measurement's files, shared by all nodes.
    scratch: a folder on this node.        wait: seconds for all ranks to join.
    key, attempt: signatures are made with the run's key and cover the attempt.
    """

    node: str
    nodes: tuple[str, ...]
    number: int
    local: int
    ranks: int
    head: str
    port: int
    logs: Path
    scratch: Path
    wait: float
    wish: Wish
    key: signing.Key
    attempt: str

    @property
    def pair(self) -> str:
        """Return the key pair for TLS, which several nodes use where there is one."""
        return self.key.pair if len(self.nodes) > 1 else ""

    @property
    def rank(self) -> int:
        return self.number * self.ranks + self.local

    @property
    def world(self) -> int:
        return len(self.nodes) * self.ranks


def read(words: Sequence[str]) -> Settings:
    """Read the command line, which only node.sh writes, and the run's key. Raises UserError for the key."""
    parser = ArgumentParser(prog="slurmddp.runtime.network")
    for name, kind in (("run", Path), ("node", str), ("nodes", str), ("head", str), ("logs", Path), ("scratch", Path)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    for name, default in (("number", None), ("port", None), ("local", 0), ("ranks", 1)):
        parser.add_argument(f"--{name}", type=int, required=default is None, default=default)
    parser.add_argument("--wait", type=float, default=120.0)
    parser.add_argument("--fabric", default="")
    parser.add_argument("--min-bandwidth", type=float, default=0.0)
    parser.add_argument("--allow-socket", action="store_true")
    given = vars(parser.parse_args(words))
    wish = Wish(given.pop("fabric"), given.pop("min_bandwidth") or None, given.pop("allow_socket"))
    key, nodes = signing.load(given.pop("run")), tuple(given.pop("nodes").split())
    return Settings(**given, nodes=nodes, wish=wish, key=key, attempt=os.environ.get("SLURMDDP_ATTEMPT", "0"))
