"""Find the cause of a failure in the logs of an attempt, by the rules of slurmddp/shell/cause.rules.

`cause_in_logs` of slurmddp/shell/cause.sh does the same in the job, with awk: whoever changes one changes the other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

from slurmddp.shared.files import open_plain

RULES = Path(__file__).resolve().parent.parent / "shell" / "cause.rules"
#: Begins the second part of the file, which only slurmddp/doctor reads.
_DOCTOR = "\n# ---- "

#: Bytes of a log's end that are read, and of a line that are looked at. cause.sh reads the whole log.
_LAST_BYTES = 1_000_000
_LINE = 2000
#: Lines of a report, from the line that `after` describes.
_REPORT = 10
#: Digits of a number. A longer one is none that torchrun or Slurm writes.
_DIGITS = 9
_NUMBER = re.compile(rb"[0-9]+")
_NODE = re.compile(rb"[^ :]+")
_WORD = re.compile(rb"[^ \t]+")


@dataclass(frozen=True)
class Rule:
    """One block of the file: see its head for the keys."""

    name: str
    keys: Mapping[str, str]
    examples: tuple[str, ...]
    finds: str

    @property
    def source(self) -> str:
        """Return where it applies: log, srun.err or text."""
        return self.keys["in"]

    @property
    def kind(self) -> str:
        """cascade, user or root."""
        return self.keys.get("kind", "root")

    @property
    def advice(self) -> str:
        """Return what the user can do about it, "" where the rule does not say."""
        return self.keys.get("advice", "")

    @cached_property
    def order(self) -> int:
        """The lowest order is the cause."""
        return int(self.keys["order"])

    @property
    def newest(self) -> bool:
        """Return whether the newest line counts instead of the first."""
        return "take" in self.keys

    @cached_property
    def patterns(self) -> Mapping[str, re.Pattern[bytes]]:
        """Its patterns, by key."""
        return {key: re.compile(self.keys[key].encode()) for key in PATTERNS if key in self.keys}

    def has(self, key: str, line: bytes) -> bool:
        """Return whether the rule has this pattern and the line contains it."""
        return key in self.patterns and self.patterns[key].search(line) is not None

    def number(self, key: str, line: bytes) -> int | None:
        """Return the number right behind the pattern of this key; None if there is none."""
        found = self._value(key, line, _NUMBER)
        return int(found) if found and len(found) <= _DIGITS else None

    def node(self, line: bytes, otherwise: str) -> str:
        """Return the node that the line names, else the log's."""
        found = self._value("node", line, _NODE)
        return found.decode("utf-8", errors="replace") if found else otherwise

    def text(self, line: bytes) -> bytes:
        """Return what stands behind the pattern `text`, else the whole line."""
        found = self.patterns["text"].search(line) if "text" in self.patterns else None
        return line[found.end() :] if found else line

    def _value(self, key: str, line: bytes, value: re.Pattern[bytes]) -> bytes | None:
        before = self.patterns[key].search(line) if key in self.patterns else None
        found = value.match(line, before.end()) if before else None
        return found[0] if found else None


#: Keys whose values are patterns.
PATTERNS = ("match", "unless", "until", "after", "rank", "local_rank", "node", "text", "number", "signal")


@dataclass(frozen=True)
class RuleSet:
    """All rules, and the names of signals."""

    rules: tuple[Rule, ...]
    signals: Mapping[int, str]

    def of_lines(self, source: str) -> tuple[Rule, ...]:
        """Return the rules for lines of node logs (log) or of srun's errors (srun.err)."""
        return tuple(rule for rule in self.rules if rule.source == source)

    @cached_property
    def cascades(self) -> tuple[Rule, ...]:
        """Rules for texts that ranks write after another rank failed."""
        return tuple(rule for rule in self.rules if rule.source == "text" and rule.kind == "cascade")

    def is_cascade(self, text: str) -> bool:
        """Return whether this is what ranks see after another rank failed."""
        return self.cascade_order(text.encode("utf-8", errors="replace")) is not None

    def cascade_order(self, text: bytes) -> int | None:
        """Return the order of the first cascade rule that matches; None if none does."""
        return next((rule.order for rule in self.cascades if rule.has("match", text)), None)

    @cached_property
    def candidates(self) -> Mapping[str, re.Pattern[bytes]]:
        """By source: one pattern for lines that any rule may want. It keeps the search of a long log fast."""
        return {
            source: re.compile(
                b"|".join(
                    rule.keys[key].encode()
                    for rule in self.of_lines(source)
                    for key in ("match", "after")
                    if key in rule.keys
                )
            )
            for source in ("log", "srun.err")
        }

    def signal_name(self, number: int) -> str:
        """Return `SIGSEGV`, or `signal 40`."""
        return self.signals.get(number, f"signal {number}")


class Cause(NamedTuple):
    """What the logs say. rank is None where nobody knows it; cascade: it may follow from another rank's failure."""

    order: int
    rank: int | None
    node: str
    text: str
    path: Path
    cascade: bool

    @property
    def line(self) -> str:
        """One line for people."""
        who = "" if self.rank is None else f"rank {self.rank} on "
        return f"{who}{self.node}: {self.text} (in {self.path})"


@lru_cache(maxsize=1)
def rules() -> RuleSet:
    """Return the rules of this slurmddp, which may be newer than the run's."""
    return parse_rules(split_rules(RULES.read_text(encoding="utf-8"))[0])


def split_rules(text: str) -> tuple[str, str]:
    """Return the rules for the batch script and `status`, and those for doctor."""
    first, _, second = text.partition(_DOCTOR)
    return first, f"#{second}"


def parse_rules(text: str) -> RuleSet:
    """Read the rules file. It is ours: a mistake in it is a KeyError or a ValueError."""
    found: list[Rule] = []
    signals: dict[int, str] = {}
    for block in text.split("\n\n"):
        keys: dict[str, str] = {}
        examples: list[str] = []
        for line in block.splitlines():
            key, _, value = line.partition(" ")
            if not key or key.startswith("#"):
                continue
            if key == "signal_name":
                number, _, name = value.partition(" ")
                signals[int(number)] = name
            elif key == "example":
                examples.append(value)
            elif key in keys:
                raise ValueError(f"{RULES.name}: {key} is given twice in rule {keys.get('rule')}")
            else:
                keys[key] = value
        if keys:
            found.append(Rule(keys.pop("rule"), keys, tuple(examples), keys.pop("finds")))
    return RuleSet(tuple(found), signals)


def cause_in_logs(
    logs: Iterable[Path], ranks: Sequence[str], below: Path, *, better_than_cascade: bool = False
) -> Cause | None:
    """Find the cause in node logs, and in an srun.err.

    logs: in the order in which equally good causes count. An unreadable one is skipped.
    ranks: the node of each rank, to find a rank by its local rank. below: the run folder that holds the logs.
    better_than_cascade: leave out what is no better than a cascade, which the caller already has.
    """
    known = rules()
    best: _Best = _Best(known.cascades[0].order if better_than_cascade else None)
    for path in logs:
        source = path.name if path.name == "srun.err" else "log"
        _judge(known, source, path, _last_lines(path, below), ranks, best)
    return best.cause


class _Best:
    """The best cause so far. limit: a cause must have a lower order than this."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.cause: Cause | None = None
        self.stamp = b""

    def wants(self, rule: Rule, order: int, stamp: bytes) -> bool:
        if self.limit is not None and order >= self.limit:
            return False
        if self.cause is None or order < self.cause.order:
            return True
        return order == self.cause.order and rule.newest and stamp > self.stamp


@dataclass
class _Progress:
    """How far one rule is in one log: over, or in a report that began at this line and has named this rank."""

    over: bool = False
    began: int | None = None
    rank: int | None = None


def _judge(known: RuleSet, source: str, path: Path, lines: Iterable[bytes], ranks: Sequence[str], best: _Best) -> None:
    candidates = known.candidates[source]
    here = [(rule, _Progress()) for rule in known.of_lines(source)]
    report_end = -1
    for number, whole in enumerate(lines):
        line = whole[:_LINE]
        if number > report_end and not candidates.search(line):
            continue
        line = line.rstrip(b"\r")
        for rule, progress in here:
            if rule.has("after", line):
                progress.began, progress.rank = number, None
                report_end = number + _REPORT
            elif not progress.over and _belongs(rule, progress, number, line):
                if found := _found(known, rule, progress, line, path, ranks, best):
                    best.cause, best.stamp = found, _stamp(line)


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


def _found(
    known: RuleSet, rule: Rule, progress: _Progress, line: bytes, path: Path, ranks: Sequence[str], best: _Best
) -> Cause | None:
    """The cause that the line tells, if it is better than the best one so far."""
    text = rule.text(line)
    cascade = known.cascade_order(text)
    order = rule.order if cascade is None else cascade
    if not best.wants(rule, order, _stamp(line)):
        return None
    shown = text.decode("utf-8", errors="replace")
    for key in ("number", "signal"):
        if key in rule.patterns:
            number = rule.number(key, line)
            if number is None:
                return None
            shown = known.signal_name(number) if key == "signal" else str(number)
    if not shown:
        return None
    shown = rule.keys.get("says", "{}").replace("{}", shown, 1)
    rank = progress.rank if "after" in rule.patterns else rule.number("rank", line)
    node = rule.node(line, path.name.removesuffix(".log"))
    local = rule.number("local_rank", line)
    if local is not None:
        on_node = [each for each, name in enumerate(ranks) if name == node]
        if local < len(on_node):
            rank = on_node[local]
        else:
            shown = f"local rank {local}: {shown}"
    return Cause(order, rank, node, shown, path, cascade is not None)


def _stamp(line: bytes) -> bytes:
    """Torchrun's time in front of a line: its first two words."""
    return b" ".join(_WORD.findall(line)[:2])


def _last_lines(path: Path, below: Path) -> Iterator[bytes]:
    """The whole lines at the end of a log; none if it cannot be read."""
    try:
        with open_plain(path, below) as handle:
            skipped = max(0, os.fstat(handle.fileno()).st_size - _LAST_BYTES)
            handle.seek(skipped)
            lines = handle.read(_LAST_BYTES).split(b"\n")
    except OSError:
        return  # removed meanwhile, or no log
    yield from lines[1:] if skipped else lines
