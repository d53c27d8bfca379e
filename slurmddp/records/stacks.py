"""What the program `ranks` prints for `debug stacks`: a line for each rank of its node, and one for each line of its
stacks. srun may put lines of other nodes between them, and cuts long ones.
"""

from typing import NamedTuple, Union

from slurmddp.records import json_lines
from slurmddp.records.values import whole

VERSION = 1


class Rank(NamedTuple):
    """A rank. world: how many there are. state: its process's, a letter of /proc/PID/status. answer: how it answered:
    asked, signal, silent, absent.
    """

    rank: int
    world: int
    pid: int
    state: str
    answer: str
    node: str


class Line(NamedTuple):
    """A line of a rank's stacks."""

    rank: int
    line: str


def write(found: Union[Rank, Line]) -> str:
    """Return the line, with its end."""
    return json_lines.dump(dict(found._asdict(), schema=VERSION)).decode("utf-8", "replace")


def read(text: str) -> Union[Rank, Line, None]:
    """Return what a line says; None for one of somebody else."""
    fields = json_lines.load(text.encode("utf-8", "replace")) or {}
    rank, line = whole(fields.get("rank")), fields.get("line")
    if rank is None or fields.get("schema") != VERSION:
        return None
    if isinstance(line, str):
        return Line(rank, line)
    world, pid = whole(fields.get("world")), whole(fields.get("pid"))
    words = [str(fields.get(name) or "") for name in ("state", "answer", "node")]
    return None if world is None or pid is None else Rank(rank, world, pid, *words)
