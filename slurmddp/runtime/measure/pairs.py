"""Find the node or link that slows the others down: neighbours on a ring are measured in pairs. Pure."""

from collections.abc import Collection, Sequence

Pair = tuple[str, str]


def rounds(nodes: Sequence[str]) -> list[list[Pair]]:
    """Return the pairs to measure, by round: each node meets two others, one at a time.

    Two rounds however many nodes there are, three where their number is odd. No node is in two pairs of a round, so
    that they do not slow each other down.
    """
    count = len(nodes)
    if count < 3:
        return [[(nodes[0], nodes[1])]] if count == 2 else []
    ring = [(node, nodes[(at + 1) % count]) for at, node in enumerate(nodes)]
    even = count - count % 2
    return [ring[0:even:2], ring[1:even:2], *([ring[even:]] if count % 2 else [])]


def isolate(tested: Collection[Pair], slow: Collection[Pair]) -> tuple[list[str], list[Pair]]:
    """Return the slow nodes, and the slow links between nodes that are fast with others.

    A node is slow if it was slow with two others, one of which was fast with somebody else. Nothing else is named.
    """
    fast = {node for pair in tested if pair not in slow for node in pair}
    partners: dict[str, set[str]] = {}
    for first, second in tested:
        partners.setdefault(first, set()).add(second)
        partners.setdefault(second, set()).add(first)
    nodes = [node for node, met in partners.items() if node not in fast and len(met) > 1 and met & fast]
    return nodes, [pair for pair in slow if fast.issuperset(pair)]
