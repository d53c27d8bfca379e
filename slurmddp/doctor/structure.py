"""What torchrun, NCCL's watchdog and srun say about ranks: who failed first, who is behind, how large the world is."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from slurmddp.doctor.flight import Waiting

_ROOT = "Root Cause (first observed failure)"
#: torchrun in tracebacks.
_AGENT = "torch/distributed/launcher/"
_FIELD = re.compile(r"^\s*(time|host|rank|exitcode)\s*:\s*(\S+)")
_WATCHDOG = re.compile(r"\[?Rank (\d+)\]?.{0,80}SeqNum=(\d+), OpType=(\w+)")
_ENQUEUED = re.compile(
    r"Rank (\d+)\b.{0,200}last enqueued (?:NCCL )?work: (-?\d+), last completed (?:NCCL )?work: (-?\d+)"
)
_WORLD = re.compile(r"(?:nranks |world_size[=:] ?|WORLD_SIZE[=:] ?|nRanks )(\d{1,6})\b")
_GROUP = re.compile(r"\[PG (?:ID )?(\w+)")
_NOT_JOINED = re.compile(r"- \[([\d, -]{1,200})\] finished collective #\d+, but did not join collective #(\d+)")
_MONITORED = re.compile(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier")
#: Lines of torchrun's report after its heading.
_REPORT = 12


def _ranks(text: str) -> list[int]:
    """Return the ranks of `0, 2-5`, a thousand at most."""
    ranks: list[int] = []
    for first, last in re.findall(r"(\d{1,7})(?: ?- ?(\d{1,7}))?", text):
        ranks.extend(range(int(first), min(int(last or first), int(first) + 1000) + 1))
    return ranks[:1000]


@dataclass
class Structure:
    """Facts of all files."""

    root_rank: int | None = None
    root_host: str | None = None
    root_exitcode: str | None = None
    world: int | None = None
    collective: dict[int, tuple[int, str]] = field(default_factory=dict)
    enqueued: dict[int, tuple[int, int]] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    missed: str = ""
    #: Whether a line is of torchrun: then srun's tasks are agents, one a node.
    torchrun: bool = False
    _report: int = 0
    _group: str | None = None

    def feed(self, text: str) -> None:
        if _ROOT in text:
            self._report = _REPORT
        elif self._report:
            self._report -= 1
            self._field(text)
        self.torchrun = self.torchrun or "torch.distributed.elastic" in text or _AGENT in text
        if "SeqNum=" in text or "last enqueued" in text:
            self._watchdog(text)
        if match := _MONITORED.search(text):
            self.missing, self.missed = _ranks(match[1]), "they did not reach the barrier"
        if match := _NOT_JOINED.search(text):
            self.missing, self.missed = _ranks(match[1]), f"did not join collective #{match[2]}"
        if match := _WORLD.search(text):
            self.world = max(self.world or 0, int(match[1]))

    def dumped(self, dumps: Iterable[Waiting]) -> str | None:
        """Take the dumps of all ranks; return the process group in which ranks wait. Dumps count more than logs."""
        groups: dict[str, dict[int, Waiting]] = {}
        for dump in dumps:
            groups.setdefault(dump.group, {})[dump.rank] = dump
        for group, ranks in groups.items():
            waiting = {rank: dump.first for rank, dump in ranks.items() if dump.first}
            if waiting:
                self.collective = dict(waiting)
                self.enqueued = {rank: (dump.last, 0) for rank, dump in ranks.items()}
                return group
        return None

    def _watchdog(self, text: str) -> None:
        """Each process group counts its own collectives: only those of the first group are compared."""
        if group := _GROUP.search(text):
            self._group = self._group or group[1]
            if group[1] != self._group:
                return
        if match := _WATCHDOG.search(text):
            self.collective.setdefault(int(match[1]), (int(match[2]), match[3]))
        if match := _ENQUEUED.search(text):
            self.enqueued.setdefault(int(match[1]), (int(match[2]), int(match[3])))

    def _field(self, text: str) -> None:
        match = _FIELD.match(text)
        if not match:
            return
        key, value = match.groups()
        if key == "rank" and self.root_rank is None and value.isdecimal():
            self.root_rank = int(value)
        elif key == "host" and self.root_host is None:
            self.root_host = value
        elif key == "exitcode" and self.root_exitcode is None:
            self.root_exitcode = value

    def culprit(self) -> tuple[list[int], str]:
        """Return the ranks that a timed-out collective waited for, and how one knows; none, if the logs do not say."""
        if self.missing:
            return self.missing, self.missed
        enqueued = {rank: last for rank, (last, _) in self.enqueued.items()}
        ahead = max(enqueued.values(), default=0)
        behind = sorted(rank for rank, last in enqueued.items() if last < ahead)
        if behind and len(behind) < len(enqueued):
            last = enqueued[behind[0]]
            missed = min((each for each in self.collective.values() if each[0] > last), default=None)
            which = f"; they did not join {missed[1]} {missed[0]}" if missed else ""
            return behind, f"they had started collective {last}, the others {ahead}{which}"
        numbers = {rank: number for rank, (number, _) in self.collective.items()}
        if len(set(numbers.values())) > 1:
            least = min(numbers.values())
            behind = sorted(rank for rank, number in numbers.items() if number == least)
            if len(behind) <= len(numbers) / 2:
                return behind, f"they waited in collective {least}, the others in {max(numbers.values())}"
        if self.world and len(self.collective) > self.world / 2:
            silent = sorted(set(range(self.world)) - self.collective.keys())
            if silent:
                return silent, "all other ranks reported the timeout"
        return [], ""

    def different_calls(self) -> str:
        """Return the calls that ranks made at the same number, if they differ: `ALLREDUCE, BROADCAST`."""
        calls: dict[int, set[str]] = {}
        for number, name in self.collective.values():
            calls.setdefault(number, set()).add(name)
        return next((", ".join(sorted(names)) for names in calls.values() if len(names) > 1), "")
