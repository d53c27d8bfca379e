"""The rules of cause.rules: what a line of a log means. The head of the file says what the keys mean."""

import pkgutil
import re
from functools import lru_cache
from typing import Dict, List, Mapping, Optional, Pattern, Sequence, Tuple

from slurmddp.records import cause
from slurmddp.records.text import plain_line

_RULES = "cause.rules"
#: Begins the second part of the file, which only slurmddp/doctor reads.
_DOCTOR = "\n# ---- "
#: Keys whose values are patterns.
PATTERNS = ("match", "unless", "until", "after", "rank", "task", "local_rank", "node", "text", "number", "signal")
#: Digits of a number. A longer one is none that torchrun or Slurm writes.
_DIGITS = 9
_NUMBER = re.compile(rb"[0-9]+")
_NODE = re.compile(rb"[^ :]+")


class Rule:
    """One block of the file.

    source: log, srun.err or text. order: the lowest is the cause. newest: the newest line counts instead of the first.
    """

    def __init__(self, name: str, keys: Mapping[str, str], examples: Sequence[str] = (), finds: str = "") -> None:
        self.name, self.keys, self.examples, self.finds = name, keys, tuple(examples), finds
        self.source = keys["in"]
        self.kind = keys["kind"]
        self.order = int(keys.get("order", "99"))
        self.newest = "take" in keys
        self.patterns = {key: re.compile(keys[key].encode()) for key in PATTERNS if key in keys}

    def has(self, key: str, line: bytes) -> bool:
        """Return whether the rule has this pattern and the line contains it."""
        return key in self.patterns and self.patterns[key].search(line) is not None

    def number(self, key: str, line: bytes) -> Optional[int]:
        """Return the number right behind the pattern of this key; None if there is none."""
        digits = self._value(key, line, _NUMBER)
        return int(digits) if digits and len(digits) <= _DIGITS else None

    def node(self, line: bytes, otherwise: str) -> str:
        """Return the node that the line names, else the log's."""
        name = self._value("node", line, _NODE)
        return plain_line(name) if name else otherwise

    def text(self, line: bytes) -> bytes:
        """Return what stands behind the pattern `text`, else the whole line."""
        match = self.patterns["text"].search(line) if "text" in self.patterns else None
        return line[match.end() :] if match else line

    def _value(self, key: str, line: bytes, value: Pattern[bytes]) -> Optional[bytes]:
        before = self.patterns[key].search(line) if key in self.patterns else None
        match = value.match(line, before.end()) if before else None
        return match.group() if match else None


class RuleSet:
    """All rules, and the names of signals by their numbers."""

    def __init__(self, rules: Sequence[Rule], signals: Mapping[int, str]) -> None:
        self.rules, self.signals = tuple(rules), signals
        self._texts = self.of_lines("text")
        #: The order of each consequence.
        self.weak_order = next(rule.order for rule in self._texts if rule.kind == cause.CONSEQUENCE)
        #: By source: one pattern for lines that any rule may want. It keeps the search of a long log fast.
        self.candidates = {source: self._candidates(source) for source in ("log", "srun.err")}

    def of_lines(self, source: str) -> Tuple[Rule, ...]:
        """Return the rules for lines of node logs (log), of srun's errors (srun.err), or for texts (text)."""
        return tuple(rule for rule in self.rules if rule.source == source)

    def kind_of_text(self, text: bytes, otherwise: str) -> str:
        """Return the kind of the first rule for texts that matches."""
        return next((rule.kind for rule in self._texts if rule.has("match", text)), otherwise)

    def signal_name(self, number: int) -> str:
        """Return `SIGSEGV`, or `signal 40`."""
        return self.signals.get(number, f"signal {number}")

    def _candidates(self, source: str) -> Pattern[bytes]:
        patterns = (rule.keys.get(key) for rule in self.of_lines(source) for key in ("match", "after"))
        return re.compile("|".join(filter(None, patterns)).encode())


def rules_text() -> str:
    """Return the file. It may lie in an archive. Raises OSError."""
    return (pkgutil.get_data("slurmddp.causes", _RULES) or b"").decode("utf-8")


@lru_cache(maxsize=1)
def rules() -> RuleSet:
    """Return the rules of this slurmddp. A program whose folder may be purged while it runs calls it at its start.

    Raises OSError.
    """
    return parse_rules(split_rules(rules_text())[0])


def kind_of(text: str, otherwise: str) -> str:
    return rules().kind_of_text(text.encode("utf-8", errors="replace"), otherwise)


def is_consequence(text: str) -> bool:
    """Return whether this is what ranks see after another rank failed."""
    return kind_of(text, "") == cause.CONSEQUENCE


def killed_by(signal: str) -> str:
    """Return `killed by SIGKILL (out of memory?)` for SIGKILL."""
    return "killed by " + next((name for name in rules().signals.values() if name.split(" ")[0] == signal), signal)


def split_rules(text: str) -> Tuple[str, str]:
    """Return the rules for logs of a run, and those for doctor."""
    first, _, second = text.partition(_DOCTOR)
    return first, f"#{second}"


def parse_rules(text: str) -> RuleSet:
    """Read the rules file. It is ours: a mistake in it is a KeyError or a ValueError."""
    parsed: List[Rule] = []
    signals: Dict[int, str] = {}
    for block in text.split("\n\n"):
        keys: Dict[str, str] = {}
        examples: List[str] = []
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
                raise ValueError(f"{_RULES}: {key} is given twice in rule {keys.get('rule')}")
            else:
                keys[key] = value
        if keys:
            parsed.append(Rule(keys.pop("rule"), keys, examples, keys.pop("finds")))
    return RuleSet(parsed, signals)
