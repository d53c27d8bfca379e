"""Nodes: those of the allocation that are left, and those of them that train."""

from typing import Iterable, List, Sequence, Tuple


class Nodes:
    """usable: may be used. chosen: train in this attempt, or are checked for it. excluded: lost, or found bad: not used
    again. suspects: their agent was killed, or Slurm did not reach them: used again only if there are too few others.
    """

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self.usable: List[str] = []
        self.chosen: List[str] = []
        self.excluded: List[str] = []
        self.suspects: List[str] = []

    def renew(self, allocated: Sequence[str]) -> Tuple[str, ...]:
        """Take the nodes that the job has now; return those that it has lost, which are to be excluded."""
        there = set(allocated)
        lost = tuple(node for node in self.usable if node not in there)
        self.usable = without(self.excluded, allocated)
        return lost

    def exclude(self, nodes: Iterable[str]) -> None:
        self.excluded += nodes
        self.usable = without(self.excluded, self.usable)

    def choose(self) -> bool:
        """Choose the first nodes that are not suspect; the others are spares. Return whether they are enough."""
        chosen = without(self.suspects, self.usable)
        if len(chosen) < self._least:
            chosen = list(self.usable)
        self.chosen = chosen[: self._most]
        return len(self.chosen) >= self._least

    def enough_without(self, bad: Sequence[str]) -> bool:
        return len(without(bad, self.usable)) >= self._least


def without(unwanted: Iterable[str], nodes: Iterable[str]) -> List[str]:
    """Return the nodes that are not in the first list. There may be thousands."""
    listed = set(unwanted)
    return [node for node in nodes if node not in listed]
