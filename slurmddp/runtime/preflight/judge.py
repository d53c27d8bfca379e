"""From what the nodes reported to what is wrong with each of them. Pure."""

import ipaddress
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from slurmddp.records.job_events import EITHER
from slurmddp.records.preflight import Finding, any_bad, bad, warn
from slurmddp.runtime.preflight.checks import SAME, Same
from slurmddp.runtime.preflight.gpu_speed import Speed, compare

#: Seconds between two clocks that are worth a word.
_SKEW = 5.0
_CLOCK = "ask the site's support to check its time service (NTP, chrony); only times in logs and events are affected"


@dataclass
class Report:
    """What is known of one node.

    network:  address and prefix length of its interface, as 10.0.0.2/24; empty where it is not known.
    links:    kind of link with the head -> what is wrong with it. Which end of it is to blame is judged here.
    facts:    by name, see checks.SAME; empty for a node that could not report.
    skew:     seconds that its clock is ahead of the head's.
    address, port: where other nodes reach it; port 0 where it could not listen.
    unreached: other node, not the head -> why this node cannot connect to it.
    speeds:    of its GPUs, as measured.
    """

    findings: list[Finding] = field(default_factory=list)
    links: dict[str, Finding] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    interface: str = ""
    network: str = ""
    skew: float | None = None
    address: str = ""
    port: int = 0
    unreached: Mapping[str, str] = field(default_factory=dict)
    speeds: Sequence[Speed] = ()


def judge(nodes: Sequence[str], reports: Mapping[str, Report], silent: str) -> dict[str, list[Finding]]:
    """Return findings by node; the head is the first of `nodes`. silent: what is said of a node without a report."""
    found: dict[str, list[Finding]] = {node: [] for node in nodes}
    for node in nodes:
        if node in reports:
            found[node] += reports[node].findings
        else:
            found[node].append(bad(silent, "see its log; if that is empty, ask the site's support to check the node"))
    heard = {node: reports[node] for node in nodes if node in reports}
    speeds = compare({node: report.speeds for node, report in heard.items()})
    for node, finding in (*_links(nodes, heard), *_networks(nodes[0], heard), *_clocks(heard), *speeds):
        found[node].append(finding)
    for same in SAME:
        for node, finding in _odd(nodes[0], same, heard):
            found[node].append(finding)
    for node, finding in _pairs(nodes, heard, found):
        found[node].append(finding)
    return found


def _links(nodes: Sequence[str], reports: Mapping[str, Report]) -> Iterator[tuple[str, Finding]]:
    """A link has two ends: where most of the others have trouble with the head, it is the head's."""
    head, others = nodes[0], nodes[1:]
    for kind in dict.fromkeys(kind for report in reports.values() for kind in report.links):
        troubled = {node: report.links[kind] for node, report in reports.items() if kind in report.links}
        if len(others) > 1 and 2 * len(troubled) > len(others):
            node, first = next(iter(troubled.items()))
            reason = f"{len(troubled)} of the {len(others)} other nodes cannot work with it ({node}: {first.reason})"
            yield head, bad(reason, first.todo)
            for node, finding in troubled.items():
                yield node, warn(f"{finding.reason}; {head} is the likely cause", f"see the message about {head}")
        else:
            yield from troubled.items()


def _pairs(
    nodes: Sequence[str], reports: Mapping[str, Report], found: Mapping[str, Sequence[Finding]]
) -> Iterator[tuple[str, Finding]]:
    """Only pairs of good nodes count: else a node that is excluded anyway would take a good one with it."""
    good = {node for node in nodes if not any_bad(found[node])}
    broken = {}
    for node in nodes:
        for other, failed in reports[node].unreached.items() if node in reports else ():
            if node in good and other in good:
                where = f"{reports[other].address}, port {reports[other].port}"
                broken[node, other] = f"{node} cannot connect to {other} at {where}: {failed}"
    return nodes_to_exclude(nodes, broken)


def _networks(head: str, reports: Mapping[str, Report]) -> Iterator[tuple[str, Finding]]:
    """Networks of their own are no fault where all nodes have one (point-to-point, routed); one that stands out is."""
    networks = {}
    for node, report in reports.items():
        try:
            networks[node] = str(ipaddress.ip_interface(report.network).network)
        except ValueError:
            pass  # not known
    usual, count = _majority(networks, head)
    if count < 2 and len(networks) != 2:
        return
    for node, network in networks.items():
        if network != usual:
            level = bad if 2 * count > len(networks) else warn
            reason = f"its interface {reports[node].interface} ({reports[node].network}) is not in the others' network"
            todo = "set network.interface to the interface that all nodes share"
            yield node, level(f"{reason}, {usual}", todo)


def _clocks(reports: Mapping[str, Report]) -> Iterator[tuple[str, Finding]]:
    skews = {node: report.skew for node, report in reports.items() if report.skew is not None}
    usual = statistics.median_low(skews.values()) if skews else 0.0
    for node, skew in skews.items():
        if abs(skew - usual) > _SKEW:
            side = "ahead of" if skew > usual else "behind"
            yield node, warn(f"its clock is {abs(skew - usual):.0f} s {side} the others'", _CLOCK)


def _odd(head: str, same: Same, reports: Mapping[str, Report]) -> Iterator[tuple[str, Finding]]:
    values = {node: report.facts[same.name] for node, report in reports.items() if same.name in report.facts}
    usual, _ = _majority(values, head)
    for node, value in values.items():
        if value != usual:
            yield node, bad(same.differs(value, usual), same.todo)


def _majority(values: Mapping[str, str], head: str) -> tuple[str, int]:
    """The value that most have, and how many; of several such, the head's, else the first one's."""
    counts = Counter(values.values())
    most = max(counts.values(), default=0)
    winners = [value for value, count in counts.items() if count == most]
    own = values.get(head)
    return (own if own is not None and own in winners else next(iter(winners), "")), most


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
