"""logs: the logs of a run, as they are or while they grow."""

import os
import threading
import time
from collections.abc import Callable, Iterator

from slurmddp.api import look
from slurmddp.commands import options as opt
from slurmddp.commands.terminal import write_line, write_lines
from slurmddp.errors import UserError
from slurmddp.launch.find import find_run
from slurmddp.report.status import RunStatus
from slurmddp.run.events import read_events
from slurmddp.run.evidence import Evidence
from slurmddp.run.layout import RunFolder
from slurmddp.run.logs import Follower
from slurmddp.shared.files import read_plain
from slurmddp.visible import one_line

#: Seconds between two questions to the scheduler while a log is followed (the second where the script has written
#: down its end, which a requeue may follow), and between two looks at the files.
ASK_EVERY = 15.0
ASK_WHEN_ENDED = 2.0
LOOK_EVERY = 0.5


def select(
    folder: RunFolder,
    *,
    follow: bool,
    node: str | None = None,
    attempt: int | None = None,
    rank: int | None = None,
    tail: int | None = None,
    as_json: bool = False,
) -> Follower:
    """Return the logs that are wanted. Raises UserError for a node, an attempt or a rank that the run does not have."""
    if tail == 0 and not follow:
        raise UserError("--tail 0 shows no lines", todo="add -f to show new lines only, or choose another number")
    every = Follower(folder)
    if attempt is not None and attempt not in (known := _attempts(every)):
        there = ", ".join(map(str, sorted(known))) or "none yet"
        raise UserError(f"run {folder.id} has no attempt {attempt}", todo=f"attempts: {there}")
    if rank is not None:
        named, node = node, _node_of(folder, rank)
        if named not in (None, node):
            raise UserError(f"rank {rank} is on {node}, not on {named}", todo="remove --node or --rank")
    follower = Follower(folder, node=node, attempt=attempt, rank=rank, tail=tail, as_json=as_json)
    if node is not None and not follow and not follower.node_logs():
        names = sorted({path.stem for path in every.node_logs()})
        raise UserError(f"no log of node {node}", todo=f"nodes with a log: {', '.join(names) or 'none yet'}")
    return follower


def _attempts(follower: Follower) -> set[int]:
    """Attempts that have logs, or of which an event tells."""
    attempts = (event.attempt for event in read_events(follower.folder.events, follower.folder.path).records)
    return {*follower.attempts(), *(attempt for attempt in attempts if attempt is not None)}


def _node_of(folder: RunFolder, rank: int) -> str:
    """The node of a rank of the newest start."""
    try:
        nodes = read_plain(folder.ranks, below=folder.path).decode("utf-8", errors="surrogateescape").split("\n")[:-1]
    except FileNotFoundError:
        raise UserError(
            f"run {folder.id} does not record on which node rank {rank} is",
            where="--rank",
            todo="name the node: --node NAME. Jobs with train.task record it when their ranks start; your own scripts "
            "do not",
        ) from None
    if rank >= len(nodes):
        raise UserError(f"run {folder.id} has no rank {rank}", todo=f"ranks: 0 to {len(nodes) - 1}")
    return nodes[rank]


def show_logs(follower: Follower, ask: Callable[[], RunStatus], say: Callable[[str], None]) -> Iterator[bytes]:
    """Yield the lines that are there; without any, `say` what the run does."""
    nothing = True
    for line in follower.new_lines(to_the_end=True):
        nothing = False
        yield line
    if nothing:
        say(f"no logs yet: the run is {ask().state.state}")


def follow_logs(follower: Follower, ask: Callable[[], RunStatus], say: Callable[[str], None]) -> Iterator[bytes]:
    """Yield the lines as they come until the run is over, across requeues, while `say` reports its states.

    ask: `run_status`, with whatever else the command does each time; a thread calls it, so that a slow scheduler keeps
    no line back.
    """
    state = ""
    noted: set[str] = set()
    asked_at, answers = time.monotonic(), _Asking(ask)
    while True:
        status = answers.take()
        ended = False
        if status is not None:
            now = status.state
            for note in status.notes:
                if note not in noted:
                    say(f"note: {note}")
            noted.update(status.notes)
            ended = not now.going
            if now.state != state and now.state != "running":
                say(one_line(now.line))
            state = now.state
        yield from follower.new_lines(to_the_end=ended)
        if ended:
            return
        if not answers.waits:
            events = read_events(follower.folder.events, follower.folder.path).records
            pause = ASK_EVERY if Evidence(events=events).ended is None else ASK_WHEN_ENDED
            if time.monotonic() - asked_at >= pause:
                asked_at, answers = time.monotonic(), _Asking(ask)
        time.sleep(LOOK_EVERY)


class _Asking:
    """One question, asked by a thread."""

    def __init__(self, ask: Callable[[], RunStatus]) -> None:
        self._answer: RunStatus | None = None
        self._error: BaseException | None = None
        self._ask = ask
        self._thread: threading.Thread | None = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def waits(self) -> bool:
        """Return whether the answer was not taken yet."""
        return self._thread is not None

    def take(self) -> RunStatus | None:
        """Return the answer, once; None while there is none. Raises what asking raised."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread = None
        if self._error is not None:
            raise self._error
        return self._answer

    def _run(self) -> None:
        try:
            self._answer = self._ask()
        except BaseException as error:  # noqa: BLE001 (the command's own thread raises it)
            self._error = error


def logs(
    run: opt.Run = opt.LAST,
    follow: bool = opt.flag("--follow", "Follow the logs until the run is over", "-f"),
    node: str | None = opt.value("NAME", "Show only this node"),
    attempt: int | None = opt.value("N", "Show only this attempt", min=0),
    rank: int | None = opt.value(
        "N", "Show only the node of this rank, without lines of other ranks; only for jobs with train.task", min=0
    ),
    tail: int | None = opt.value("N", "Start with the last N lines of each log", "-n", "--tail", min=0),
    as_json: bool = opt.flag("--json", "Print a JSON object per line"),
) -> None:
    """Show the logs of a run: job.sh first, then each node, attempt by attempt."""
    folder = find_run(run, os.environ)
    follower = select(folder, follow=follow, node=node, attempt=attempt, rank=rank, tail=tail, as_json=as_json)
    opt.send_waiting([folder])
    if follow:
        for line in follow_logs(follower, lambda: look(folder), opt.say):
            write_line(line)
    else:
        write_lines(show_logs(follower, lambda: look(folder), opt.say))
