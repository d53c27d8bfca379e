"""`slurmddp debug stacks`: where the ranks are in their Python code."""

import os
import re
from dataclasses import asdict, dataclass, field
from typing import Any

import typer

from slurmddp.commands import options as opt
from slurmddp.errors import ExternalError
from slurmddp.launch.find import find_own_run
from slurmddp.launch.inside import raw_stacks
from slurmddp.records import stacks as records
from slurmddp.shared.units import listed
from slurmddp.styled import labelled
from slurmddp.visible import one_line

_THREAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+")
#: Threads that only watch: they are never what a rank waits for.
_WATCHING = re.compile(r"/slurmddp/runtime/(watch|observe)/")
_STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "waits in the kernel, for a disk or a device",
           "Z": "has exited"}  # fmt: skip
_HOW = {
    "signal": "its interpreter is locked by native code",
    "silent": "no answer",
    "absent": "does not know this command: it has not imported torch yet, or train.observe is off",
}


@dataclass
class RankStacks:
    """One rank; the fields are those of `records.stacks.Rank`. threads: frames of each, the main thread first."""

    rank: int
    node: str | None
    pid: int
    state: str
    answer: str
    threads: list[list[str]] = field(default_factory=list)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what is odd about the rank."""
        return tuple(text for text in (_STATES.get(self.state), _HOW.get(self.answer)) if text)


def read_stacks(text: str) -> tuple[list[RankStacks], list[int]]:
    """Return the ranks that supervisor/ranks.py found, in order, and the numbers of those that it should have found."""
    by_rank: dict[int, RankStacks] = {}
    lines: dict[int, list[str]] = {}
    world = 0
    for line in text.splitlines():
        record = records.read(line)
        if isinstance(record, records.Line):
            lines.setdefault(record.rank, []).append(record.line)
        elif record is not None:
            world = max(world, record.world)
            by_rank[record.rank] = RankStacks(record.rank, record.node, record.pid, record.state, record.answer)
    for rank, each in by_rank.items():
        each.threads = _threads(lines.get(rank, []))
    return [by_rank[rank] for rank in sorted(by_rank)], [rank for rank in range(world) if rank not in by_rank]


def _threads(lines: list[str]) -> list[list[str]]:
    """Return the frames of each thread, most recent call first. faulthandler writes the main thread last."""
    threads: list[list[str]] = []
    for line in lines:
        if _THREAD.match(line):
            threads.append([])
        elif threads and line.strip():
            threads[-1].append(line.strip())
    *others, main = threads or [[]]
    return [main, *(frames for frames in others if not any(map(_WATCHING.search, frames)))]


def as_dict(attempt: int, ranks: list[RankStacks], missing: list[int]) -> dict[str, Any]:
    return {"attempt": attempt, "ranks": [asdict(each) for each in ranks], "missing": missing}


def stacks_text(ranks: list[RankStacks], missing: list[int]) -> str:
    """Return the stacks, one block for all ranks with the same; the smallest group, which may be the culprit, first."""
    groups: dict[tuple[Any, ...], list[RankStacks]] = {}
    for each in ranks:
        key = (each.notes, tuple(map(tuple, each.threads)))
        groups.setdefault(key, []).append(each)
    blocks = [_block(group) for group in sorted(groups.values(), key=lambda group: (len(group), group[0].rank))]
    if missing:
        blocks.append(f"no process found: {_ranks(missing)}")
    return "\n\n".join(blocks)


def _block(group: list[RankStacks]) -> str:
    nodes = listed(list(dict.fromkeys(each.node or "?" for each in group)), 8)
    pid = f", process {group[0].pid}" if len(group) == 1 else ""
    lines = [f"{_ranks([each.rank for each in group])} on {nodes}{pid}", *(f"  {note}" for note in group[0].notes)]
    for number, frames in enumerate(group[0].threads if group[0].threads != [[]] else []):
        lines.append("  main thread, most recent call first" if number == 0 else "  another thread")
        lines += [f"    {frame}" for frame in frames]
    return "\n".join(map(one_line, lines))


def _ranks(numbers: list[int]) -> str:
    """Return `rank 3`, or `ranks 0-2, 5`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    ranges = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return f"rank{'s' * (len(numbers) > 1)} {listed(ranges, 20)}"


def stacks(
    run: opt.Run = opt.LAST,
    node: str | None = opt.value("NAME", "Only the ranks of this node"),
    as_json: opt.Json = False,
) -> None:
    """Show the Python stack of each rank of a running job. Ranks with the same stack are one group."""
    folder = find_own_run(run, os.environ, to="look into its job")
    attempt, text, failed = raw_stacks(folder, node)
    ranks, missing = read_stacks(text)
    if failed:
        opt.say(labelled("warning", failed))
    if not ranks:
        raise ExternalError(f"no rank of run {folder.id} was found on its nodes: they may just be starting or exiting")
    absent = [] if node else missing
    typer.echo(opt.json_text(as_dict(attempt.number, ranks, absent)) if as_json else stacks_text(ranks, absent))
