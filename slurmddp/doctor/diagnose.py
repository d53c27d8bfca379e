"""Finds the root cause in logs: what each line speaks of, then which of it was first and follows from nothing else."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

from slurmddp.doctor.flight import Waiting, read_dump
from slurmddp.doctor.lines import Budget, Reader
from slurmddp.doctor.outcome import HANDLED, Outcome
from slurmddp.doctor.prefix import Clock, Line, parse_line
from slurmddp.doctor.printed import shows_settings
from slurmddp.doctor.rules import SYMPTOMS, UNKNOWN, Cause, catalogue
from slurmddp.doctor.structure import Structure
from slurmddp.doctor.tracebacks import Traceback, Tracebacks
from slurmddp.shared.units import listed

#: Exceptions that can only be mistakes in the code or its arguments.
_PLAIN_MISTAKES = {"NameError", "SyntaxError", "IndentationError", "UnboundLocalError", "ZeroDivisionError", "TabError"}
#: Exceptions that say nothing by themselves: another line has the reason.
_EMPTY = {"SystemExit", "Empty", "EOFError", "CancelledError", "TimeoutError", "ProcessLookupError"}
#: A warning may speak of something that did not stop the run.
_WARNING = re.compile(r"(?:User|Future|Deprecation|Runtime)Warning|\bWARNING\b")
_WEAK = re.compile(r"^\[?W[\] 0-9]")
#: Lines that a rank may still write after the exception that ends it, and hints that make a cause likely.
_STILL_WRITES, _MANY = 300, 3
#: Steps behind an error, after which it did not end the run.
_GOES_ON = 2
#: What Slurm ends a job by: ranks may still write steps behind it.
_FINAL = {"time-limit", "preemption", "node-failure", "cancelled"}
_BLOCK = 1_000_000
_DIGIT = re.compile(r"\d")
#: Lines of one cause that are kept, of each of its degrees: comparing them takes their number squared.
_KEPT = 2000
#: Causes up to this order may be written after Slurm ended the job: it counts oom kills at the end of a step.
_AT_THE_END = 14
#: The order of causes among which only the time decides.
_BY_TIME = 30
#: Causes from this order on say that a process failed.
_SIGNALS = 34
#: Causes that are the exit of a process.
SIGNAL_EXITS = frozenset({"killed", "segfault", "bus-error", "illegal-instruction"})
_EXITS = {*SIGNAL_EXITS, "exit-code"}
#: What the logs of healthy ranks may show after somebody ended the job: containers lose their image, ranks each other.
AFTER_THE_END = frozenset((*_EXITS, "ended-by-launcher", "connection-lost", "rendezvous-lost"))
#: The same if the user cancelled the job with slurmddp: everything that ends a job from outside.
AFTER_A_CANCEL = AFTER_THE_END | _FINAL
#: Code that follows a frame in a traceback, not output.
_CODE = re.compile(r"^\s+(?:raise|return|assert|except|self\.|with|if|else|elif|for|while|yield|await) ?")
_COUNTS = re.compile(r"world_size=(\d+), (?:worker_count|num_workers)=(\d+)")
#: Slurm writes the node of the batch script behind ON, whichever node failed.
_ON_NODE = re.compile(r" ON (\S+) CANCELLED|^srun: error: ([^ :]+): tasks? (\d+)?|host\s+: (\S+)")
_FAILED_NODE = re.compile(r"Node failure on ([^\s,:]*[^\s,:.])|[Nn]odes? (\S+) (?:is )?not responding")


class Hit(NamedTuple):
    """A line that speaks of a cause. place: the order in which the lines were read."""

    cause: Cause
    sure: str
    path: str
    line: int
    text: str
    rank: int | None
    host: str | None
    clock: Clock | None
    place: int
    traceback: Traceback | None = None
    #: srun's number of the process, which is its rank only where srun starts the ranks.
    task: int | None = None


@dataclass(frozen=True)
class Seen:
    """All hits of one cause. first: the one to show."""

    first: Hit
    count: int
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """The answer. root is None where nothing failed; sure: certain, likely, unknown, or none without a failure."""

    root: Seen | None
    sure: str
    message: str = ""  # what is known beyond the cause's title
    cascades: tuple[Seen, ...] = ()  # what followed
    others: tuple[Seen, ...] = ()
    notes: tuple[str, ...] = ()  # what else may matter
    files: tuple[str, ...] = ()
    job_id: str = ""

    @property
    def fix(self) -> str:
        """Return what to do about the root, with the job's id where it is known."""
        if self.root is None:
            return ""
        named = re.search(r"\bJOB (\d+)", self.root.first.text)
        job_id = named[1] if named else self.job_id
        fix = self.root.first.cause.fix
        return re.sub(r"\bJOB\b", job_id, fix) if job_id else fix


@dataclass
class Examination:
    """Collects hits from any number of logs, then judges them."""

    hits: list[Hit] = field(default_factory=list)
    structure: Structure = field(default_factory=Structure)
    files: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _kept: Counter[tuple[str, str]] = field(default_factory=Counter)
    budget: Budget = field(default_factory=Budget)
    #: Causes that this run's end from outside explains: they are none.
    explained: frozenset[str] = frozenset()
    #: Whether srun's tasks are the ranks; None: not known, and then they are where no line is of torchrun.
    tasks_are_ranks: bool | None = None
    #: The newest job of the run that is examined.
    job_id: str = ""
    #: Whether a limit left out a part of what was given.
    incomplete: bool = False
    _ends: dict[str, int] = field(default_factory=dict)
    _outcomes: dict[str, Outcome] = field(default_factory=dict)
    _dumps: list[tuple[str, Waiting]] = field(default_factory=list)

    def read(self, name: str, handle: BinaryIO, *, node: str | None = None, begin: int = 0) -> None:
        """Read one log. node: whose log it is, if that is known. begin: bytes before it, which are not examined."""
        self.files.append(name)
        before = sum(handle.read(min(begin - at, _BLOCK)).count(b"\n") for at in range(0, begin, _BLOCK))
        lines, tracebacks = Reader(handle, before + 1), Tracebacks(name)
        outcome = self._outcomes.setdefault(name, Outcome())
        clock: Clock | None = None
        size, left_out, at_end = 0, 0, False
        if not self.budget.begin():
            self._not_examined(f"{name} was not examined")
            return
        for number, raw in lines:
            if self.budget.spent:
                if not at_end and lines.jumped:
                    at_end = self.budget.begin()
                else:
                    lines.jump_to_end(self.budget.affordable(size))
            if self.budget.spent:
                left_out += 1
                continue
            size += len(raw)
            line = parse_line(raw)
            clock = line.clock or clock
            line = line._replace(host=line.host or node, clock=clock)
            self._ends[name] = number
            self.structure.feed(line.text)
            ended = tracebacks.feed(number, line.text, line.rank, line.host)
            lines.everything = tracebacks.active
            if not (tracebacks.active and _CODE.match(line.text)):
                is_setting = ended is None and shows_settings(line.text)
                matched = not is_setting and self._match(name, number, line, ended)
                if ended and not matched:
                    self._exception(name, number, line, ended)
                elif not matched:
                    outcome.feed(number, line.text, clock)
        for number, raw in lines.newest:
            line = parse_line(raw)
            outcome.feed(number, line.text, line.clock)
            self._ends[name] = max(number, self._ends.get(name, 0))
        if lines.jumped and lines.jumped[0] <= lines.jumped[1]:
            self._not_examined("{}: lines {} to {} were not examined".format(name, *lines.jumped))
        elif left_out:
            self._not_examined(f"{name}: {left_out} lines were not examined")
        if lines.skipped:
            self.incomplete = True
            self.notes.append(f"{name}: too many different lines; not all were examined")

    def _not_examined(self, subject: str) -> None:
        self.incomplete = True
        self.notes.append(
            f"{subject}: doctor searches for {self.budget.seconds:g} s at most -> give it the part that matters"
        )

    def dump(self, path: Path, handle: BinaryIO) -> None:
        self.files.append(str(path))
        try:
            self._dumps += [(str(path), waiting) for waiting in read_dump(path, handle)]
        except ValueError as error:
            self.notes.append(f"{path}: {error}")

    def _from_dumps(self) -> None:
        group = self.structure.dumped(waiting for _, waiting in self._dumps)
        for path, waiting in self._dumps if group is not None else []:
            if waiting.group == group and waiting.first:
                number, name = waiting.first
                text = f"Watchdog caught: rank {waiting.rank} waits in {name} {number} of process group {group}"
                self.fact(path, 1, text, rank=waiting.rank)

    def fact(
        self,
        name: str,
        number: int,
        text: str,
        *,
        rank: int | None = None,
        node: str | None = None,
        otherwise: str = "",
    ) -> None:
        """Take one line that a program wrote about a run. otherwise: its cause, if no rule knows it."""
        if name not in self.files:
            self.files.append(name)
        line = Line(text, rank, node, None)
        if not self._match(name, number, line, None) and otherwise:
            cause = catalogue().by_id[otherwise]
            self._keep(Hit(cause, "likely", name, number, text, rank, node, None, len(self.hits)))

    def _match(self, name: str, number: int, line: Line, ended: Traceback | None) -> bool:
        matched = False
        for cause, sure in catalogue().matches(line.text + (ended.origin if ended else "")):
            matched = matched or sure != "note"
            counts = _COUNTS.search(line.text) if cause.id == "ranks-missing" else None
            if counts and int(counts[2]) > int(counts[1]):
                cause = catalogue().by_id["rank-mismatch"]
            host, rank, task = line.host, line.rank, None
            if cause.id == "node-failure":
                match = _FAILED_NODE.search(line.text)
                written_by = None if name in self._outcomes else host  # whose log it is did not fail
                host = next(filter(None, match.groups())) if match else written_by
            elif match := _ON_NODE.search(line.text):
                host = match[1] or match[2] or match[4] or host
                task = int(match[3]) if match[3] and rank is None else None
            sure = _weaker(sure, cause, line.text)
            place = len(self.hits)
            self._keep(Hit(cause, sure, name, number, line.text.strip(), rank, host, line.clock, place, ended, task))
        return matched

    def _keep(self, hit: Hit) -> None:
        self._kept[hit.cause.id, hit.sure] += 1
        if self._kept[hit.cause.id, hit.sure] <= _KEPT:
            self.hits.append(hit)
        elif self._kept[hit.cause.id, hit.sure] == _KEPT + 1:
            self.notes.append(f"{hit.path}:{hit.line}: {hit.cause.title}: only the first {_KEPT} lines were examined")

    def _exception(self, name: str, number: int, line: Line, ended: Traceback) -> None:
        """An exception that no rule knows: an error in the code."""
        if ended.name in _EMPTY or ended.name.endswith("Warning"):
            return
        sure = "certain" if ended.name in _PLAIN_MISTAKES else "likely"
        self._keep(
            Hit(
                catalogue().by_id["code"], sure, name, number, ended.exception, line.rank, line.host, line.clock,
                len(self.hits), ended,
            )
        )  # fmt: skip

    def diagnose(self) -> Diagnosis:
        self._from_dumps()
        if not self.structure.torchrun if self.tasks_are_ranks is None else self.tasks_are_ranks:
            self.hits = [hit._replace(rank=hit.task) if hit.task is not None else hit for hit in self.hits]
        self.hits = [hit for hit in self.hits if hit.cause.id not in self.explained]
        hits = self._without_consequences(self._without_survived())
        claims = [hit for hit in hits if hit.sure in ("certain", "likely")]
        hints = [hit for hit in hits if hit.sure == "hint"]
        weak = {
            hit.cause.title: f"{hit.cause.title}: {hit.path}:{hit.line}"
            for hit in reversed(hits)
            if hit.sure not in ("certain", "likely")
        }
        notes = [*reversed(weak.values()), *self.notes]
        if not claims:
            claims = [hit._replace(sure="likely") for hit in hints if _evidence(hit.cause, hints) >= _MANY]
        if not claims:
            sure = "unknown" if self.incomplete else "none"
            return Diagnosis(None, sure, notes=tuple(notes), files=tuple(self.files))
        best = self._first(claims)
        if best.cause.id == UNKNOWN:
            hints = [hit for hit in hints if (hit.path, hit.line) == (best.path, best.line)]
        if best.cause.order >= SYMPTOMS and hints:
            best = self._first(hints)._replace(sure="likely")
        best = self._named(best)
        seen = _grouped(claims if best.cause.id in {hit.cause.id for hit in claims} else [*claims, best])
        root = replace(seen.pop(best.cause.id), first=best)
        sure, message = self._verdict(best, claims)
        firsts = ((each, each.first) for each in seen.values())
        followed = [each for each, first in firsts if first.cause.order >= SYMPTOMS or first.place >= best.place]
        others = [each for each in seen.values() if each not in followed]
        return Diagnosis(
            root, sure, message, tuple(followed), tuple(others), tuple(notes), tuple(self.files), self.job_id
        )

    def _without_survived(self) -> list[Hit]:
        """Make notes of the errors that the run survived."""
        hits = [hit._replace(sure="note") if self._was_survived(hit) else hit for hit in self.hits]
        failed = {
            hit.path
            for hit in hits
            if hit.sure in ("certain", "likely") and (hit.traceback or hit.cause.order >= _SIGNALS)
            if hit.cause.id != UNKNOWN
        }
        return [hit._replace(sure="note") if hit.path not in failed and self._goes_on(hit) else hit for hit in hits]

    def _was_survived(self, hit: Hit) -> bool:
        """Return whether something in its log proves that this error did not end the run."""
        outcome = self._outcomes.get(hit.path)
        if outcome is None:
            return False
        if hit.cause.id in _FINAL:
            return outcome.finished_after(hit.line) and outcome.steps_after(hit.line) > 0
        granted = hit.cause.id in ("slurm-refused", UNKNOWN) and outcome.granted_after(hit.line)
        later = outcome.steps_later(hit.line, hit.clock) >= _GOES_ON
        handled = hit.traceback is not None and (
            hit.traceback.ignored
            or self._signal_instead(hit)
            or (HANDLED.search(hit.text) is not None and outcome.steps_after(hit.line) > 0)
        )
        weak = hit.sure != "certain" and not hit.traceback and hit.cause.order < _SIGNALS
        finished = outcome.finished_after(hit.line) or (weak and outcome.says_finished_after(hit.line))
        return granted or later or handled or finished or self._was_handled(hit)

    def _goes_on(self, hit: Hit) -> bool:
        """Return whether steps stand behind a line that is no failure by itself, in a log without any failure."""
        outcome = self._outcomes.get(hit.path)
        least = 1 if hit.sure == "hint" or hit.cause.id == UNKNOWN else _GOES_ON
        return outcome is not None and hit.cause.id not in _FINAL and outcome.steps_after(hit.line) >= least

    def _signal_instead(self, hit: Hit) -> bool:
        """Return whether torchrun says that a signal ended this rank first: an exception makes exit code 1."""
        code, rank = self.structure.root_exitcode or "", self.structure.root_rank
        return code.startswith("-") and code not in ("-2", "-6", "-15") and hit.rank in (None, rank)

    def _without_consequences(self, hits: list[Hit]) -> list[Hit]:
        """Leave out what stands behind the line with which Slurm ended the job."""
        stops = [hit for hit in hits if hit.cause.id in ("time-limit", "preemption", "node-failure")]
        if not stops:
            return hits
        first = min(stops, key=lambda hit: hit.place)
        return [
            hit
            for hit in hits
            if hit.place <= first.place
            or hit.path != first.path
            or hit.cause.order >= SYMPTOMS
            or hit.cause is first.cause
            or (hit.cause.order <= _AT_THE_END and hit.sure == "certain")
        ]

    def _was_handled(self, hit: Hit) -> bool:
        """Return whether the log went on for long after an exception, before anything else went wrong in it."""
        if hit.traceback is None or hit.cause.order != _BY_TIME:
            return False
        later = [
            each.line for each in self.hits if each.path == hit.path and each.line > hit.line and each.sure != "note"
        ]
        return min([*later, self._ends.get(hit.path, 0)]) - hit.line > _STILL_WRITES

    def _first(self, hits: Sequence[Hit]) -> Hit:
        """The root among hits: by order, the surest first, then the rank that failed first, then by time."""
        best = min(map(self._priority, hits))
        equals = [hit for hit in hits if self._priority(hit) == best]
        if all(hit.clock for hit in equals):
            return min(equals, key=lambda hit: (hit.clock, hit.place))
        return min(equals, key=lambda hit: hit.place)

    def _priority(self, hit: Hit) -> tuple[int, bool, bool]:
        known = self.structure.root_rank
        elsewhere = known is not None and hit.rank is not None and hit.rank != known
        unsure = hit.sure != "certain" and hit.cause.order != _BY_TIME
        nameless = hit.cause.id == "node-failure" and hit.host is None
        return hit.cause.order, nameless or unsure, elsewhere

    def _named(self, hit: Hit) -> Hit:
        """Torchrun's report names the rank that exited, a few lines away from its exit code."""
        if hit.rank is None and hit.cause.id in _EXITS and self.structure.root_rank is not None:
            return hit._replace(rank=self.structure.root_rank, host=self.structure.root_host or hit.host)
        return hit

    def _verdict(self, best: Hit, claims: Iterable[Hit]) -> tuple[str, str]:
        """Return how sure the answer is, and what is known beyond the title."""
        cause = best.cause
        if cause.id == "nccl-timeout":
            known = self._waited_for()
            return ("likely", known) if known else ("unknown", "no line names the rank that the others waited for")
        if cause.id == "hang" and self._dumps:
            return best.sure, self._waited_for()
        if (counts := _COUNTS.search(best.text)) and cause.id in ("ranks-missing", "rank-mismatch"):
            return best.sure, f"world size {counts[1]}, but {counts[2]} processes joined"
        if cause.order >= SYMPTOMS and cause.id not in ("cancelled", "hangup"):
            text = next((hit.text for hit in claims if hit.cause.id == UNKNOWN and hit is not best), "")
            return "unknown", f"the log says: {text}" if text and cause.id != UNKNOWN else ""
        if cause.id == "node-failure" and best.host:
            return best.sure, f"exclude it: sbatch --exclude={best.host}"
        outcome = self._outcomes.get(best.path)
        if outcome and outcome.says_finished_after(best.line):
            return "likely", "the log says later that training finished"
        if cause.id == "master-unreachable":
            return best.sure, _how_unreachable(best.text)
        rivals = {hit.cause.id for hit in claims if hit.cause.order < 20 and hit.sure == "certain"} - {cause.id}
        sure = "likely" if best.sure == "hint" or (rivals and cause.order >= 20) else best.sure
        return sure, _where_raised(best)

    def _waited_for(self) -> str:
        """Return what the collectives of the ranks say; empty if they do not differ."""
        if calls := self.structure.different_calls():
            return f"the ranks made different calls at the same point: {calls}"
        ranks, reason = self.structure.culprit()
        return f"the others waited for rank {listed([*map(str, ranks)], 8)}: {reason}" if ranks else ""


def _evidence(cause: Cause, hints: Iterable[Hit]) -> int:
    """Return how many pieces of evidence hints are: the same message of many ranks is one, values of steps are many."""
    hits = [hit for hit in hints if hit.cause is cause]
    if cause.id == "nan":
        return max(Counter((hit.path, hit.rank) for hit in hits).values())
    # Words with digits differ between the ranks, nodes and times of one message.
    return len({tuple(word for word in hit.text.split() if not _DIGIT.search(word)) for hit in hits})


def _weaker(sure: str, cause: Cause, text: str) -> str:
    """Return how sure a warning makes us: of setup and launch it is a hint only."""
    if _WARNING.search(text) and _AT_THE_END + 1 < cause.order < _BY_TIME and sure != "note":
        return "hint"
    return "likely" if sure == "certain" and (_WARNING.search(text) or _WEAK.search(text)) else sure


def _how_unreachable(text: str) -> str:
    """Return what the error of the connection says about the reason."""
    if re.search(r"[\[( ](?:localhost|127\.)", text):
        return "the address is that of the node itself: on another node than the master it is wrong"
    if "refused" in text or "errno: 111" in text:
        return "nothing listens there: wrong address or port, or rank 0 did not start or has exited"
    if "No route" in text or "errno: 113" in text:
        return "no route: a firewall, or an address of another network"
    return "no answer: a wrong address, a firewall, or the master did not start"


def _where_raised(hit: Hit) -> str:
    """The place in the user's own code, if the hit ends a traceback."""
    if hit.traceback is None or hit.traceback.own is None:
        return ""
    return f"raised {'in' if hit.traceback.innermost else 'below'} {hit.traceback.own}"


def _grouped(hits: Iterable[Hit]) -> dict[str, Seen]:
    groups: dict[str, list[Hit]] = {}
    for hit in hits:
        groups.setdefault(hit.cause.id, []).append(hit)
    return {
        name: Seen(
            same_cause[0],
            len(same_cause),
            tuple(sorted({hit.rank for hit in same_cause if hit.rank is not None})),
            tuple(dict.fromkeys(hit.host for hit in same_cause if hit.host)),
        )
        for name, same_cause in groups.items()
    }
