"""The nodes that jobs of a site avoid, for people."""

from __future__ import annotations

from collections.abc import Sequence

from slurmddp.run.bad_nodes import BadNode
from slurmddp.shared.units import clock
from slurmddp.visible import one_line


def bad_nodes_table(site: str, found: Sequence[BadNode], now: float) -> str:
    """Return one line per node: name, age, time until it expires, run, reason."""
    if not found:
        return f"no bad nodes at site {site}"
    rows = [("NODE", "AGE", "EXPIRES IN", "RUN", "REASON")]
    for each in found:
        times = clock(now - each.time), clock(each.expires - now)
        rows.append((each.node, *times, each.run or "(added by you)", one_line(each.reason)))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows
    )
