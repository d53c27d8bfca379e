"""Parsers of what Slurm says about the cluster itself: settings, partitions, nodes. Pure functions.

Text of 22.05 to 25.x: later versions add fields, and rename none of those that are read here.
"""

import re
from typing import NamedTuple

_SETTING = re.compile(r"^(\w[\w\[\]]*)\s*=[ \t]*(.*?)\s*$", re.MULTILINE)
#: The administrator's free text, which ends a node's record: it may contain anything.
_FREE_TEXT = re.compile(r" (?:Comment|Extra|Reason)=")
#: States in which a node runs no jobs (scontrol(1)); a suffix such as * or ~ is cut off.
_AWAY = frozenset(("DOWN", "DRAIN", "DRAINING", "DRAINED", "FAIL", "FAILING", "FUTURE", "UNKNOWN", "NOT_RESPONDING"))


class Node(NamedTuple):
    """One node. cpus, memory (MiB): what jobs can get of it; gpus: how many of each type, "" where Slurm has no type;
    features: sorted; states: all words of its state."""

    name: str
    architecture: str
    cpus: int
    threads_per_core: int
    memory: int
    gres: str
    features: tuple[str, ...]
    partitions: tuple[str, ...]
    states: frozenset[str]

    @property
    def gpus(self) -> dict[str, int]:
        """Return how many GPUs of each type it has."""
        return gpus_of(self.gres)

    @property
    def usable(self) -> bool:
        """Return whether it runs jobs now, or will when others end."""
        return not self.states & _AWAY


def settings(text: str) -> dict[str, str]:
    """Return the settings in the output of `scontrol show config`; an unset one is an empty text."""
    return {name: "" if value == "(null)" else value for name, value in _SETTING.findall(text)}


def records(text: str, first: str) -> list[dict[str, str]]:
    """Return the records of `scontrol --oneliner show ...` whose first field is `first`. Of values with blanks, the
    first word."""
    rows = []
    for line in text.splitlines():
        if line.startswith(f"{first}="):
            row: dict[str, str] = {}
            for name, value in re.findall(r"(?<!\S)(\w+)=(\S+)", _FREE_TEXT.split(line)[0]):
                row.setdefault(name, value)
            rows.append(row)
    return rows


def nodes(text: str) -> list[Node]:
    """Return the nodes in the output of `scontrol --oneliner show node`."""
    return [_node(row) for row in records(text, "NodeName")]


def _node(row: dict[str, str]) -> Node:
    # CPUEfctv is what specialised cores leave to jobs; before 22.05 there was none.
    cpus = row.get("CPUEfctv") or row.get("CPUTot") or "0"
    return Node(
        name=row["NodeName"],
        architecture=row.get("Arch", ""),
        cpus=_whole(cpus),
        threads_per_core=_whole(row.get("ThreadsPerCore", "1")),
        memory=_whole(row.get("RealMemory", "0")) - _whole(row.get("MemSpecLimit", "0")),
        gres=_plain_gres(row.get("Gres", "")),
        features=tuple(sorted(_words(row.get("AvailableFeatures", "")))),
        partitions=tuple(_words(row.get("Partitions", ""))),
        states=_states(row.get("State", "")),
    )


def _states(text: str) -> frozenset[str]:
    words = set(re.findall(r"[A-Z_]+", text))
    return frozenset(words | {"NOT_RESPONDING"} if "*" in text else words)


def gpus_of(gres: str) -> dict[str, int]:
    """Return how many GPUs of each type are in a Gres text such as `gpu:a100:4(S:0-1)`; "": Slurm has no type."""
    counts: dict[str, int] = {}
    for item in _plain_gres(gres).split(","):
        name, *kind, count = [*item.split(":"), "1"] if item.count(":") == 0 else item.split(":")
        if name == "gpu" and count.isdigit():
            counts["".join(kind)] = counts.get("".join(kind), 0) + int(count)
    return counts


def _plain_gres(gres: str) -> str:
    """Without the sockets, which differ between equal nodes."""
    return re.sub(r"\([^)]*\)", "", gres)


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word not in ("", "(null)")]


def _whole(text: str) -> int:
    return int(text) if text.isdigit() else 0
