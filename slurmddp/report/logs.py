"""The logs of a run, as they are or while they grow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from slurmddp.errors import UserError
from slurmddp.report.status import RunStatus
from slurmddp.runs import state
from slurmddp.runs.events import read_lines
from slurmddp.runs.evidence import Evidence
from slurmddp.runs.layout import RunFolder
from slurmddp.runs.logs import Follower
from slurmddp.visible import one_line

#: Seconds between two questions to the scheduler while a log is followed (the second where the script has written
#: down its end, which a requeue may follow), and between two looks at the files.
ASK_EVERY = 15.0
ASK_WHEN_ENDED = 2.0
LOOK_EVERY = 0.5


def follow_logs(
    folder: RunFolder,
    *,
    ask: Callable[[RunFolder], RunStatus],
    follow: bool,
    node: str | None,
    attempt: int | None,
    say: Callable[[str], None],
) -> Iterator[bytes]:
    """Yield the lines of the logs; with `follow`, until the run is over, while `say` reports its states.

    ask: `run_status`, with whatever else the command does each time.
    Raises UserError for a node without a log.
    """
    follower = Follower(folder, node=node, attempt=attempt)
    if not follow:
        if node is not None and not follower.node_logs():
            known = sorted({path.stem for path in Follower(folder).node_logs()})
            raise UserError(f"no log of node {node}", todo=f"nodes with a log: {', '.join(known) or 'none yet'}")
        nothing = True
        for line in follower.new_lines(to_the_end=True):
            nothing = False
            yield line
        if nothing:
            of = "" if attempt is None else f" of attempt {attempt}"
            say(f"no logs yet{of}: the run is {ask(folder).state.state}")
        return
    asked, told = -ASK_EVERY, ""
    noted: set[str] = set()
    while True:
        ended = False
        if time.monotonic() - asked >= (ASK_WHEN_ENDED if _ended(folder) else ASK_EVERY):
            asked = time.monotonic()
            status = ask(folder)
            now = status.state
            for note in status.notes:
                if note not in noted:
                    say(f"note: {note}")
            noted.update(status.notes)
            ended = now.exit_code != state.EXIT_CODES["running"]
            if now.state != told and now.state != "running":
                say(one_line(now.line))
            told = now.state
        yield from follower.new_lines(to_the_end=ended)
        if ended:
            return
        time.sleep(LOOK_EVERY)


def _ended(folder: RunFolder) -> bool:
    """Return whether job.sh has recorded its exit."""
    return Evidence(events=read_lines(folder.events).records).ended is not None
