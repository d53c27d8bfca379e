"""Which pairs of nodes tell who is slow. Three rounds at most, whatever the number of nodes. Pure."""

from collections.abc import Mapping, Sequence

#: Two for the pairs, and one for the node that an odd number of nodes leaves over.
ROUNDS = 3
Pair = tuple[str, str]


def next_round(nodes: Sequence[str], tested: Mapping[Pair, float], floor: float) -> list[Pair]:
    """Return the pairs to test now. No node is in two of them, so that they do not slow each other down.

    tested: pair -> GB/s. The first round has all nodes. After that, a node that was slow with its only partner gets
    one that was fast with another, so that one of the two can be named.
    """
    if not tested:
        return list(zip(nodes[::2], nodes[1::2], strict=False))
    fast = {node for pair, speed in tested.items() if speed >= floor for node in pair}
    tests = {node: [pair for pair in tested if node in pair] for node in nodes}
    unsure = [node for node in nodes if node not in fast and len(tests[node]) < 2]
    free = [node for node in nodes if node in fast] + [node for node in unsure if not tests[node]] + unsure
    taken: set[str] = set()
    chosen = []
    for node in sorted(unsure, key=lambda each: len(tests[each]), reverse=True):
        met = {other for pair in tests[node] for other in pair}
        partner = next((other for other in free if other not in taken | met | {node}), None)
        if node not in taken and partner is not None:
            taken |= {node, partner}
            chosen.append((node, partner))
    return chosen


def explain(nodes: Sequence[str], tested: Mapping[Pair, float], floor: float) -> tuple[dict[str, str], str]:
    """Return the slow nodes, each with what was seen of it, and one sentence on what the pairs tell.

    A node is slow if it was slow with two others, one of which was fast with somebody else. A link is slow if both its
    nodes are fast with others. Nothing else is named.
    """
    if len(nodes) < 3:
        return {}, "not isolated: with two nodes, either can be the slow one"
    slow = {pair: speed for pair, speed in tested.items() if speed < floor}
    if not slow:
        return (
            {},
            f"not isolated: each pair of nodes alone reaches {floor:.3g} GB/s (a switch, or a link between groups?)",
        )
    fast = {node for pair, speed in tested.items() if speed >= floor for node in pair}
    named: dict[str, str] = {}
    for node in nodes:
        speeds = {_other(pair, node): speed for pair, speed in slow.items() if node in pair}
        if node not in fast and len(speeds) > 1 and fast & set(speeds):
            partners = " and ".join(f"{speed:.3g} GB/s with {other}" for other, speed in speeds.items())
            named[node] = f"slow network: {partners}"
    if named:
        return named, f"slow: {', '.join(named)}"
    links = [f"{a}-{b} ({speed:.3g} GB/s)" for (a, b), speed in slow.items() if a in fast and b in fast]
    if links:
        return {}, f"slow link: {', '.join(links)}; these nodes are fast with others"
    if not fast:
        return {}, "not isolated: no pair of nodes is fast"
    pairs = ", ".join(f"{a}-{b} ({speed:.3g} GB/s)" for (a, b), speed in list(slow.items())[:3])
    return {}, f"not isolated: slow pairs {pairs}"


def _other(pair: Pair, node: str) -> str:
    return pair[1] if pair[0] == node else pair[0]
