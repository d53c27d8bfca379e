"""Connections between nodes that are not the head: who tries whom, and which nodes are excluded. Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from slurmddp.records.job_events import EITHER
from slurmddp.records.preflight import Finding, bad

#: Up to this many nodes, every pair is tried. With more, the number of connections per node must stay small.
_ALL_PAIRS = 64
_TODO = "check the network between the two nodes (switch, routes, firewall), or set network.interface"


def partners(nodes: Sequence[str]) -> dict[str, list[str]]:
    """Return for each node the nodes that it connects to. No pair is tried twice.

    With more than _ALL_PAIRS nodes, a node tries those that are 1, 2, 4, 8, ... places further on in the list.
    """
    count = len(nodes)
    steps = [step for step in range(1, count // 2 + 1) if count <= _ALL_PAIRS or step & (step - 1) == 0]
    return {
        # Half way round, both nodes of a pair would find each other.
        node: [nodes[(at + step) % count] for step in steps if 2 * step != count or at < step]
        for at, node in enumerate(nodes)
    }


def nodes_to_exclude(nodes: Sequence[str], broken: Mapping[tuple[str, str], str]) -> Iterator[tuple[str, Finding]]:
    """Choose nodes so that no broken pair is left without them. broken: pair -> what is wrong with it.

    The node with the most broken pairs is excluded first; of several such, the last of `nodes`, since spares come last.
    """
    position = {node: number for number, node in enumerate(nodes)}
    lost = Counter(node for pair in broken for node in pair)
    left = dict(broken)
    while left:
        counts = Counter(node for pair in left for node in pair)
        node = max(counts, key=lambda name: (counts[name], position[name]))
        example = next(text for pair, text in left.items() if node in pair)
        if lost[node] == 1:
            yield node, bad(f"{example}; slurmddp excludes one of the two", _TODO, EITHER)
        else:
            yield node, bad(f"cannot connect to {lost[node]} other nodes: {example}", _TODO)
        left = {pair: text for pair, text in left.items() if node not in pair}
