"""Correct a batch script where a rule knows the one right answer, line by line; every other byte stays.

A fix proposes drafts. One counts only if the rules, asked again, find less, and if the recorded launches differ in the
words that it means to change, and in no others. Where two drafts count that start different things, none is made."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from slurmddp.scripts.check.finding import Finding, check_script
from slurmddp.scripts.check.recorded import record
from slurmddp.scripts.check.rules.common import services
from slurmddp.scripts.check.same import changed, disagreement, outcome
from slurmddp.scripts.check.script import Script, parse

MOST = 60  # fixes in one script: after each one, all rules read it again
MOST_DRAFTS = 300  # drafts that the rules read, also of fixes that did not help
#: While one of these is left, the rules do not see the whole command, so only the text is corrected.
_UNREAD = {"syntax", "broken-continuation", "no-program"}

Fix = Callable[["Draft", Finding], Iterator["Draft"]]
#: What corrects the findings of a rule, in the order in which it is tried.
FIXES: dict[str, Fix] = {}
#: By rule: the facts of a launch that its correction means to change, as a pattern of same.py's names; None: it
#: corrects the text that bash reads, so launches are not compared.
CHANGES: dict[str, str | None] = {}


def fixes(*rules: str, changes: str | None = "") -> Callable[[Fix], Fix]:
    """Register a function as the fix of these rules: it yields drafts, the best one first. changes: see CHANGES."""

    def register(function: Fix) -> Fix:
        FIXES.update(dict.fromkeys(rules, function))
        CHANGES.update(dict.fromkeys(rules, changes))
        return function

    return register


def _of_text(id: str) -> bool:
    """Tell whether the findings of a rule are corrected before bash evaluates the script."""
    return id == "syntax" or (id != "no-program" and CHANGES.get(id, "") is None)


@dataclass(frozen=True)
class Draft:
    """A script on its way. origins: the line of the file that each line was, or was added behind."""

    path: Path
    lines: tuple[str, ...]
    origins: tuple[int, ...]

    @cached_property
    def text(self) -> str:
        return "\n".join(self.lines)

    @cached_property
    def script(self) -> Script:
        """Return the script as the rules read it."""
        return parse(self.text, self.path)

    @cached_property
    def findings(self) -> list[Finding]:
        return check_script(self.script)

    @cached_property
    def in_text(self) -> list[Finding]:
        """Return what the rules find that read its text alone."""
        return check_script(self.script, {"syntax", *filter(_of_text, CHANGES)})

    def line(self, at: int) -> str:
        """Return a line, counted from 1; empty, if there is none."""
        return self.lines[at - 1] if 0 < at <= len(self.lines) else ""

    def _with(self, at: int, end: int, *texts: str) -> Draft:
        """Replace the lines from `at` up to `end`, which stays."""
        origin = self.origins[min(max(at - 2 + (end > at), 0), len(self.origins) - 1)]
        return replace(
            self,
            lines=(*self.lines[: at - 1], *texts, *self.lines[end - 1 :]),
            origins=(*self.origins[: at - 1], *[origin] * len(texts), *self.origins[end - 1 :]),
        )

    def put(self, at: int, text: str) -> Draft:
        return self._with(at, at + 1, text)

    def insert(self, at: int, *texts: str) -> Draft:
        """Add lines before a line."""
        return self._with(at, at, *texts)

    def remove(self, at: int) -> Draft:
        return self._with(at, at + 1)

    def splice(self, at: int, start: int, end: int, text: str) -> Draft:
        """Replace a part of a line."""
        return self.put(at, self.line(at)[:start] + text + self.line(at)[end:])

    def sub(self, at: int, pattern: str, new: str) -> Draft:
        """Replace the first match of a pattern in a line; nothing changes if there is none."""
        return self.put(at, re.sub(pattern, new, self.line(at), count=1))

    def swap(self, at: int, old: str, new: str) -> Draft:
        """Replace the first `old` of a line; nothing changes if it is not there."""
        return self.put(at, self.line(at).replace(old, new, 1))

    def written(self, before: Draft) -> tuple[tuple[int, str], ...]:
        """Return the lines that this draft has and another has not, each with its line of the file."""
        rest = Counter(before.lines)
        rest.subtract(self.lines)
        pairs = zip(self.origins, self.lines, strict=True)
        return tuple((line, text) for line, text in pairs if rest[text] < 0)

    def origin(self, finding: Finding) -> Finding:
        """Return a finding with its line in the file."""
        return replace(finding, line=self.origins[min(max(finding.line, 1), len(self.origins)) - 1])


@dataclass(frozen=True)
class Choice:
    """A finding that several corrections would remove, each with the lines that it writes: line of the file, text."""

    finding: Finding
    corrections: tuple[tuple[tuple[int, str], ...], ...]

    def as_dict(self) -> dict[str, object]:
        """Return it for --json."""
        written = [[{"line": line, "text": text} for line, text in each] for each in self.corrections]
        return {"rule": self.finding.rule.id, "line": self.finding.line, "corrections": written}


@dataclass(frozen=True)
class Fixed:
    """A corrected script: what was corrected, and what was not, both with the lines of the file."""

    text: str
    done: list[Finding]
    left: list[Finding]
    origins: tuple[int, ...]  # the line of the file that each line was, or was added behind
    stopped: bool = False  # at a limit, so that more might be corrected
    doubt: str = ""  # why no launch was corrected, or not all of them, or nothing at all
    choices: tuple[Choice, ...] = ()


@dataclass
class _Search:
    """The search for the next correction of a draft, and what stands in the way of others."""

    tries: Iterator[int]
    choices: list[Choice] = field(default_factory=list)
    unproven: str = ""

    def step(self, draft: Draft, rules: Collection[str], *, of_text: bool) -> tuple[Finding, Draft] | None:
        """Return the first finding that one correction removes, and the corrected draft."""
        self.choices, self.unproven = [], ""
        read = not of_text and not doubt(draft)
        for id in [each for each in FIXES if each in rules and _of_text(each) == of_text]:
            for finding in draft.in_text if of_text else draft.findings:
                sure = read and (finding.severity == finding.rule.severity or id == "launcher-per-task")
                if finding.rule.id == id and (sure or CHANGES[id] is None):
                    proven = self._proven(draft, finding)
                    if len(proven) == 1:
                        return finding, proven[0]
                    if proven:
                        written = tuple(after.written(draft) for after in proven)
                        self.choices.append(Choice(draft.origin(finding), written))
        return None

    def _proven(self, draft: Draft, finding: Finding) -> list[Draft]:
        """Return the drafts that help and change what they mean to: the first of those that start the same."""
        found, seen, id = list[Draft](), list[object](), finding.rule.id
        meant = CHANGES[id]
        for after in FIXES[id](draft, finding):
            if after.lines == draft.lines:
                continue
            if next(self.tries, None) is None:
                return []
            if not _better(draft, after, id):
                continue
            wrong = set() if meant is None else changed(draft.script, after.script, finding, meant)
            if wrong is None:
                self.unproven = "bash could not evaluate the script, so no correction of a launch is proven"
            elif wrong:
                self.unproven = f"the correction of {id} would also change {', '.join(sorted(wrong))}"
            elif (starts := after.lines if meant is None else outcome(after.script)) not in seen:
                found.append(after)
                seen.append(starts)
        return found


def fix_script(script: Script, only: Collection[str] | None = None) -> Fixed:
    """Correct what can be corrected; only: by these rules. The script itself stays as it is."""
    import slurmddp.scripts.check.fixes  # noqa: F401 - registers the fixes

    before = draft = Draft(script.path, tuple(script.lines), tuple(range(1, len(script.lines) + 1)))
    done: list[Finding] = []
    search, rules = _Search(iter(range(MOST_DRAFTS))), FIXES if only is None else only
    for of_text in (True, False):  # bash evaluates what can be read at last
        while len(done) < MOST and (found := search.step(draft, rules, of_text=of_text)):
            done.append(draft.origin(found[0]))
            draft = found[1]
    if any(each.rule.id == "syntax" for each in draft.findings):  # what else is in it, nobody can know
        return Fixed(script.text, [], check_script(script), before.origins, doubt="bash cannot read the script")
    if any(CHANGES[each.rule.id] is not None for each in done) and (name := disagreement(draft.script)):
        why = f"the tasks of a step would differ in {name}"
        return replace(fix_script(script, {id for id in rules if CHANGES.get(id, "") is None}), doubt=why)
    left = sorted(map(draft.origin, draft.findings), key=lambda each: each.line)
    stopped = bool(left) and (len(done) == MOST or next(search.tries, None) is None)
    why = (doubt(draft) or search.unproven) if any(CHANGES.get(each.rule.id) is not None for each in left) else ""
    if draft.script.is_shell and record(draft.script) is None:
        why = "bash could not evaluate the script here, so only its text was read"
    done.sort(key=lambda each: each.line)
    return Fixed(draft.text, done, left, draft.origins, stopped, why, tuple(search.choices))


def doubt(draft: Draft) -> str:
    """Return why nothing but the text is corrected; empty, if everything may be."""
    script, found = draft.script, draft.script.found
    part = (  # of the nodes
        each.step for each in found.launches
        if each.step and "nodelist" in each.step.options and not each.fan_out
        and each.step.resources.nodes != script.job.nodes
    )  # fmt: skip
    reasons = {
        "bash does not read the script as it is meant":
            any(each.rule.id in _UNREAD and each.severity == "error" for each in draft.findings),
        "it starts several programs side by side": bool(services(script)),
        "what starts a program, or an option of srun, is known only when the job runs":
            any(each.unsure and not each.command.branch for each in found.launches)
            or any(each.opaque for each in found.steps),
        "a step runs on a part of the nodes, or on nodes that are known only when the job runs":
            any(part) or any(each.resources.unread for each in found.steps),
        "a launch is in a branch": any(each.branch for each in found.launches),
    }  # fmt: skip
    return next((reason for reason, holds in reasons.items() if holds), "")


def _better(before: Draft, after: Draft, id: str) -> bool:
    """Tell whether a rule finds less, and bash still reads the script. Errors of other rules may come to light."""

    def found(draft: Draft, id: str) -> int:
        return sum(each.rule.id == id for each in (draft.in_text if _of_text(id) else draft.findings))

    others = ("syntax",) if _of_text(id) else ("syntax", "undefined-variable")
    return found(after, id) < found(before, id) and all(found(after, each) <= found(before, each) for each in others)
