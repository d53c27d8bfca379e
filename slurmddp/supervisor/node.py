"""Prepares a node for its ranks: unpacks the run's code, and finds what only the node knows: node NAME=VALUE...

It prints one line for node.sh, with the separator \\x1f between these:

    code scratch                           folders on the node's own disk: slurmddp's code, and what lives longer
    node_rank head address is_host         which node of its step this is, and where the ranks meet
    interface network gloo_interface       of its address; empty if it is the job's only node
    ranks threads counted                  of this node; counted: the job does not say how many, and each node counts
"""

import os
import subprocess
import sys
import time
from typing import Callable, List, Mapping, NamedTuple, Sequence, Tuple

from slurmddp.records.refusal import Refusal, Refused
from slurmddp.supervisor import unpack


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


def find_place(host: str, wanted: str, exact: bool, environment: Mapping[str, str]) -> Place:
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


def facts(values: Mapping[str, str], environment: Mapping[str, str]) -> List[str]:
    """Prepare the node, and return what it found. Raises Refused."""
    scratch = unpack.scratch_folder(values["node_folder"])
    archive = environment["SLURMDDP_RUN"] + "/code/slurmddp.zip"
    code = unpack.unpack(archive, "{}/{}".format(scratch, environment["SLURMDDP_RENDEZVOUS_ID"]))
    place = ALONE
    if not values["alone"]:
        place = find_place(
            environment["SLURMDDP_NODE"], values["wanted_interface"], bool(values["exact_interface"]), environment
        )
    counted = not values["ranks"]
    ranks, threads = _count(values, environment) if counted else (values["ranks"], "")
    return [
        code, scratch,
        str(place.node_rank), place.head, place.address, str(int(place.node_rank == 0)),
        place.interface, place.network, place.interface if int(environment["SLURMDDP_NODES"]) > 1 else "lo",
        ranks, threads, "yes" if counted else "",
    ]  # fmt: skip


def _count(values: Mapping[str, str], environment: Mapping[str, str]) -> Tuple[str, str]:
    """Return ranks, and threads per rank, of a node: nodes may differ, so each one counts what Slurm gave it."""
    if int(values["gpus_per_node"]):
        there = environment.get("SLURM_GPUS_ON_NODE") or ("1" if environment.get("SLURMDDP_STEP") == "attach" else "0")
        ranks = int(there)
        if ranks == 0:
            raise Refused(
                "Slurm gave this node no GPU (SLURM_GPUS_ON_NODE is not set): remove ranks_per_node: auto, or ask for "
                "GPUs"
            )
        cores = int(environment.get("SLURM_CPUS_ON_NODE") or ranks)
    else:
        cores = int(environment.get("SLURM_CPUS_ON_NODE") or 1)
        ranks = max(cores // int(values["threads_per_rank"]), 1)
    return str(ranks), str(max(cores // ranks, 1))


#: Seconds in which the other nodes say whether they can start their ranks.
_PATIENCE = 60


def report(together: str, why: Refusal, environment: Mapping[str, str]) -> None:
    """Tell job.sh why this node cannot start its ranks. Write it, whole or not at all. Wait for the others.

    together: not empty if nothing runs on other nodes that the end of this one would end.
    """
    host, folder = environment["SLURMDDP_NODE"], environment["SLURMDDP_LOGS"] + "/preflight"
    part, path = "{}/.{}.part".format(folder, host), "{}/{}.failed".format(folder, host)
    try:
        os.makedirs(folder, exist_ok=True)
        with open(part, "wb") as file:
            file.write(os.fsencode(why._replace(text=why.text.replace("\n", " ")).write()))
        os.rename(part, path)
    except OSError as error:  # then job.sh has the log alone
        print("slurmddp: node {}: cannot write {}: {}".format(host, path, error.strerror), file=sys.stderr)
    if not together:
        _await_others(folder, int(environment["SLURMDDP_NODES"]))


def _await_others(folder: str, nodes: int) -> None:
    """srun ends the other nodes with this one: each first says whether its ranks can start, for job.sh to decide."""
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        try:
            names = os.listdir(folder)
        except OSError:
            return  # nobody can say anything
        if sum(not name.startswith(".") and name.endswith((".failed", ".ready")) for name in names) >= nodes:
            return
        time.sleep(1)


def fail(arguments: Sequence[str]) -> int:
    """Tell job.sh of a failure that node.sh has printed: TOGETHER FAULT TEXT. FAULT: as in records/refusal.py."""
    together, fault, text = arguments
    report(together, Refusal(text, fault), os.environ)
    return 0


def answer(together: str, find: Callable[[], str]) -> int:
    """Print for node.sh what is found; if it is refused, tell the log and job.sh why."""
    try:
        found = find()
    except Refused as why:
        sys.stderr.buffer.write(os.fsencode("slurmddp: node {}: {}\n".format(os.environ["SLURMDDP_NODE"], why)))
        if os.environ.get("SLURMDDP_STEP") != "attach":  # which says nothing of the attempt
            report(together, Refusal(str(why), why.fault), os.environ)
        return 1
    sys.stdout.buffer.write(os.fsencode(found + "\n"))
    return 0


def main(arguments: Sequence[str]) -> int:
    """Prepare the node, or tell why that is not possible."""
    values = dict(word.split("=", 1) for word in arguments)
    return answer(values["preflight"] + values["alone"], lambda: "\x1f".join(facts(values, os.environ)))
