"""Find the cause of a failure in the logs of an attempt, by the rules of cause.rules."""

import os
import re
import stat
import time
from typing import BinaryIO, Callable, Dict, Iterator, List, Optional, Sequence

from slurmddp.causes.rules import Rule, RuleSet, rules
from slurmddp.records.cause import CONSEQUENCE, EXIT, SIGNAL, Cause
from slurmddp.records.redact import redact
from slurmddp.records.text import plain_line

#: Bytes of a log's end that are read, of one log and of all together, with a least for each; of a line that are looked
#: at.
_LAST_BYTES = 1000000
_TOGETHER = 2**28
_LEAST = 2**16
_LINE = 2000
#: Lines of a report, from the line that `after` describes.
_REPORT = 10
_WORD = re.compile(rb"[^ \t]+")


def open_log(path: str) -> BinaryIO:
    """Open a regular file for reading; a pipe, whose reading may never end, is refused. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file")
    return open(descriptor, "rb")


def find(
    logs: Sequence[str],
    srun_err: Optional[str] = None,
    nodes: Sequence[str] = (),
    noted: Optional[Cause] = None,
    *,
    tasks_are_ranks: bool = False,
    seconds: float = 60,
    opener: Callable[[str], BinaryIO] = open_log,
) -> Optional[Cause]:
    """Return the cause of a failure; None if nobody told one.

    logs: of the nodes, each NODE.log, in the order in which equally good causes count. One that cannot be read is
    skipped. srun_err: what srun wrote; None where srun's tasks were ended by slurmddp itself. nodes: the node of each
    rank, to find a rank by its local rank. noted: what the ranks reported; only where that may follow from another
    failure, the logs are read. Where a rank of the newest start exited with a code, no signal in a line that may be of
    an earlier start is a cause. tasks_are_ranks: launch.mode srun. seconds: after this time, no further log is read.
    opener: opens a log, and may refuse one with an OSError.
    """
    if noted is not None and not noted.weak:
        return noted
    search = _Search(rules(), nodes, tasks_are_ranks, noted.kind if noted else "")
    limit = max(_LEAST, min(_LAST_BYTES, _TOGETHER // max(1, len(logs))))
    end = time.monotonic() + seconds
    for path in (*logs, *([srun_err] if srun_err else [])):
        if time.monotonic() > end:
            break
        source = "srun.err" if path == srun_err else "log"
        try:
            with opener(path) as handle:
                search.read(path, source, _last_lines(handle, limit))
        except OSError:
            continue  # removed meanwhile, or no log
    return search.cause or noted


def node_logs(folder: str) -> List[str]:
    """Return the nodes' logs of an attempt, by name. Raises OSError."""
    names = sorted(name for name in os.listdir(folder) if name.endswith(".log"))
    return [os.path.join(folder, name) for name in names if not name.startswith(("nccl.", "."))]


class _Progress:
    """How far one rule is in one log: over, or in a report that began at this line and has named this rank."""

    def __init__(self) -> None:
        self.over = False
        self.began: Optional[int] = None
        self.rank: Optional[int] = None


class _Search:
    """The best cause so far. noted: the kind of what the ranks reported. The cause must be better than a consequence of
    another failure, and behind a rank's exit no signal of an earlier start counts.
    """

    def __init__(self, known: RuleSet, nodes: Sequence[str], tasks_are_ranks: bool, noted: str) -> None:
        self.known = known
        self.cause: Optional[Cause] = None
        self._order: Optional[int] = known.weak_order if noted == CONSEQUENCE else None
        self._exited = noted == EXIT
        self._stamp = b""
        self._tasks_are_ranks = tasks_are_ranks
        self._ranks: Dict[str, List[int]] = {}
        for rank, node in enumerate(nodes):
            self._ranks.setdefault(node, []).append(rank)

    def read(self, path: str, source: str, lines: Iterator[bytes]) -> None:
        """Read the lines of a log."""
        candidates = self.known.candidates[source].search
        known = self.known.of_lines(source)
        here = [(rule, _Progress()) for rule in known if not (self._exited and rule.newest and rule.kind == SIGNAL)]
        report_end = -1
        for number, whole in enumerate(lines):
            line = whole[:_LINE]
            if number > report_end and not candidates(line):
                continue
            line = line.rstrip(b"\r")
            for rule, progress in here:
                if rule.has("after", line):
                    progress.began, progress.rank = number, None
                    report_end = number + _REPORT
                elif not progress.over and _belongs(rule, progress, number, line):
                    self._judge(rule, progress, line, path)

    def _judge(self, rule: Rule, progress: _Progress, line: bytes, path: str) -> None:
        """Keep the cause that the line tells, if it is better than the best one so far."""
        text = rule.text(line)
        kind = self.known.kind_of_text(text, rule.kind)
        order = self.known.weak_order if kind == CONSEQUENCE else rule.order
        stamp = b" ".join(_WORD.findall(line)[:2])  # torchrun's time in front of a line
        newer = self.cause is not None and order == self._order == rule.order and rule.newest and stamp > self._stamp
        if not (self._order is None or order < self._order or newer):
            return
        shown = self._shown(rule, line, text)
        if not shown:
            return  # it lacks what the rule shows
        name, ending = os.path.splitext(os.path.basename(path))
        node = rule.node(line, name if ending == ".log" else "")  # srun's errors are of no node
        rank = progress.rank if "after" in rule.patterns else rule.number("rank", line)
        if self._tasks_are_ranks and "task" in rule.patterns:
            rank = rule.number("task", line)
        local = rule.number("local_rank", line)
        if local is not None:
            on_node = self._ranks.get(node, [])
            if local < len(on_node):
                rank = on_node[local]
            else:
                shown = f"local rank {local}: {shown}"
        self.cause, self._order, self._stamp = Cause(shown, rank, node, kind, log=path), order, stamp

    def _shown(self, rule: Rule, line: bytes, text: bytes) -> str:
        """Return the text of the cause; an empty one if the line lacks what the rule shows."""
        shown = redact(plain_line(text))
        for key in ("number", "signal"):
            if key in rule.patterns:
                number = rule.number(key, line)
                if number is None:
                    return ""
                shown = self.known.signal_name(number) if key == "signal" else str(number)
        says = rule.keys.get("says_of_task" if self._tasks_are_ranks else "says") or rule.keys.get("says", "{}")
        return shown and says.replace("{}", shown, 1)


def _belongs(rule: Rule, progress: _Progress, number: int, line: bytes) -> bool:
    """Return whether the rule matches this line. Keeps in mind what later lines need."""
    if "after" in rule.patterns:
        if progress.began is None or number - progress.began > _REPORT:
            return False
        rank = rule.number("rank", line)
        progress.rank = progress.rank if rank is None else rank
    if not rule.has("match", line) or rule.has("unless", line):
        return False
    progress.over = rule.has("until", line)
    progress.began = None
    return not progress.over


def _last_lines(handle: BinaryIO, limit: int) -> Iterator[bytes]:
    """Return the whole lines at the end of a log."""
    skipped = max(0, os.fstat(handle.fileno()).st_size - limit)
    handle.seek(skipped)
    lines = handle.read(limit).split(b"\n")
    return iter(lines[1:] if skipped else lines)
