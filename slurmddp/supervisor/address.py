"""Which node of its step this is, and its address: those of the hosts themselves, never localhost."""

import subprocess
from typing import List, Mapping, NamedTuple, Sequence, Tuple

from slurmddp.records.refusal import Refused


class Place(NamedTuple):
    """What a node knows of itself among the nodes of its step. head: the first of them. network: its address with the
    length of its prefix.
    """

    node_rank: int
    head: str
    interface: str
    address: str
    network: str


#: The only node of its job.
ALONE = Place(0, "127.0.0.1", "", "127.0.0.1", "")


def find(host: str, wanted: str, exact: bool, environment: Mapping[str, str]) -> Place:
    """Return the place of this node. wanted: how its interface's name begins, or the name; else the one that leads to
    the head. Raises Refused.
    """
    nodes, node_rank = _nodes(host, environment)
    head = nodes[0]
    if not _addresses(head, environment):
        raise Refused("cannot resolve the name of the head node, {}".format(head))
    own = [
        Own(*words[1:4:2]) for words in _lines(["ip", "-o", "-4", "addr", "show", "up"], environment) if len(words) > 3
    ]
    if wanted:
        named = [item for item in own if (item.interface == wanted if exact else item.interface.startswith(wanted))]
        if not named:
            there = " ".join(item.interface for item in own)
            raise Refused("has no interface {} with an IPv4 address; it has: {}".format(wanted, there))
        interface, address = named[0].interface, named[0].address
    else:
        # The address that the others see: of the interface that leads to the head (on the head: to the second node)
        peer = nodes[1] if node_rank == 0 and len(nodes) > 1 else head
        interface, address = _route(peer, environment)
    networks = [item.network for item in own if (item.interface, item.address) == (interface, address)]
    return Place(node_rank, head, interface, address, (networks or [""])[0])


class Own(NamedTuple):
    """An address of this host. network: with the length of its prefix."""

    interface: str
    network: str

    @property
    def address(self) -> str:
        return self.network.partition("/")[0]


def _nodes(host: str, environment: Mapping[str, str]) -> Tuple[List[str], int]:
    """Return the nodes of the step and this one's number among them."""
    if environment.get("SLURMDDP_STEP") == "attach":  # a step of its own on one of the attempt's nodes
        nodes = environment["SLURMDDP_ATTACH_NODES"].split()
        if host not in nodes:
            raise Refused("is not one of the attempt's nodes: {}".format(" ".join(nodes)))
        return nodes, nodes.index(host)
    lines = _lines(["scontrol", "show", "hostnames", environment.get("SLURM_STEP_NODELIST", "")], environment)
    if not lines:
        raise Refused("scontrol does not name the nodes of this step")
    return [words[0] for words in lines], int(environment["SLURM_NODEID"])


def _addresses(name: str, environment: Mapping[str, str]) -> List[str]:
    return [words[0] for words in _lines(["getent", "ahostsv4", name], environment)]


def _route(peer: str, environment: Mapping[str, str]) -> Tuple[str, str]:
    """Return the interface that leads to a host, and this host's address there. Raises Refused."""
    towards = _addresses(peer, environment)
    if not towards:
        raise Refused("cannot resolve {}".format(peer))
    words = [word for line in _lines(["ip", "-o", "-4", "route", "get", towards[0]], environment) for word in line]
    if "dev" not in words or "src" not in words:
        raise Refused("has no route to {} ({})".format(peer, towards[0]))
    return words[words.index("dev") + 1], words[words.index("src") + 1]


def _lines(command: Sequence[str], environment: Mapping[str, str]) -> List[List[str]]:
    """Return the words of each line that a command prints; none if it fails. Raises Refused if it is not here."""
    path = environment.get("PATH", "") + ":/usr/sbin:/sbin"
    try:
        done = subprocess.run(command, env=dict(environment, PATH=path), stdout=subprocess.PIPE, check=False)
    except OSError as error:
        raise Refused("cannot run {}: {}".format(command[0], error.strerror)) from error
    text = done.stdout.decode("utf-8", "surrogateescape") if done.returncode == 0 else ""
    return [line.split() for line in text.splitlines() if line.strip()]
