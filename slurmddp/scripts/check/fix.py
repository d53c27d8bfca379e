"""Correct a batch script where a rule knows the one right answer, line by line; every other byte stays.

A fix proposes drafts. One counts only if the rules, asked again, find less, and if the recorded launches differ in the
words that it means to change, and in no others. Where two drafts count that start different things, none is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from slurmddp.scripts.check.finding import Finding, check_script
from slurmddp.scripts.check.launches import Step
from slurmddp.scripts.check.recorded import record
from slurmddp.scripts.check.rules.common import services
from slurmddp.scripts.check.same import changed, disagreement, outcome
from slurmddp.scripts.check.script import Script, parse

MOST = 60  # fixes in one script: after each one, all rules read it again
MOST_DRAFTS = 300  # drafts that the rules read, also of fixes that did not help
#: While one of these is left, the rules do not see the whole command, so only the text is corrected.
_UNREAD = {"syntax", "broken-continuation", "no-program"}
_TEXT = {
    "crlf", "invisible-character", "no-shebang", "broken-continuation", "blank-in-assignment", "no-program",
    "sbatch-option", "sbatch-after-command", "sbatch-disabled", "sbatch-variable", "log-folder", "conda-activate",
}  # fmt: skip

#: Those of them, and the syntax, for which nothing has to be evaluated.
_PURE = (_TEXT - {"no-program"}) | {"syntax"}

Fix = Callable[["Draft", Finding], Iterator["Draft"]]
#: What corrects the findings of a rule, in the order in which it is tried.
FIXES: dict[str, Fix] = {}


def fixes(*rules: str) -> Callable[[Fix], Fix]:
    """Register a function as the fix of these rules: it yields drafts, the best one first."""

    def register(function: Fix) -> Fix:
        FIXES.update(dict.fromkeys(rules, function))
        return function

    return register


@dataclass(frozen=True)
class Draft:
    """A script on its way. origins: the line of the file that each line was, or was added behind."""

    path: Path
    lines: tuple[str, ...]
    origins: tuple[int, ...]

    @cached_property
    def text(self) -> str:
        """Return the whole script."""
        return "\n".join(self.lines)

    @cached_property
    def script(self) -> Script:
        """Return the script as the rules read it."""
        return parse(self.text, self.path)

    @cached_property
    def findings(self) -> list[Finding]:
        """Return what the rules find."""
        return check_script(self.script)

    @cached_property
    def in_text(self) -> list[Finding]:
        """Return what the rules find that read its text alone."""
        return check_script(self.script, _PURE)

    def line(self, at: int) -> str:
        """Return a line, counted from 1; empty, if there is none."""
        return self.lines[at - 1] if 0 < at <= len(self.lines) else ""

    def put(self, at: int, text: str) -> Draft:
        """Replace a line."""
        return replace(self, lines=(*self.lines[: at - 1], text, *self.lines[at:]))

    def swap(self, at: int, old: str, new: str) -> Draft:
        """Replace the first `old` of a line; nothing changes if it is not there."""
        return self.put(at, self.line(at).replace(old, new, 1)) if old in self.line(at) else self

    def insert(self, at: int, *texts: str) -> Draft:
        """Add lines before a line."""
        origin = self.origins[min(max(at - 2, 0), len(self.origins) - 1)]
        return replace(
            self,
            lines=(*self.lines[: at - 1], *texts, *self.lines[at - 1 :]),
            origins=(*self.origins[: at - 1], *[origin] * len(texts), *self.origins[at - 1 :]),
        )

    def remove(self, at: int) -> Draft:
        """Remove a line."""
        lines, origins = self.lines, self.origins
        return replace(self, lines=(*lines[: at - 1], *lines[at:]), origins=(*origins[: at - 1], *origins[at:]))

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
    origins: tuple[int, ...] = ()  # the line of the file that each line was, or was added behind
    stopped: bool = False  # at a limit, so that more might be corrected
    doubt: str = ""  # why no launch was corrected, or not all of them, or nothing at all
    choices: tuple[Choice, ...] = ()


@dataclass
class _Search:
    """The next correction of a draft, and what stands in the way of others."""

    tries: Iterator[int]
    finding: Finding | None = None
    after: Draft | None = None
    choices: tuple[Choice, ...] = ()
    unproven: str = ""

    def step(self, draft: Draft, rules: Collection[str], *, pure: bool) -> bool:
        """Find the first finding that one correction removes; return whether there is one."""
        rules = {id for id in rules if (id in _PURE) == pure}
        read = not pure and not doubt(draft)
        self.choices, self.unproven = (), ""
        for id, propose in FIXES.items():
            for finding in draft.in_text if pure else draft.findings:
                sure = read and (finding.severity == finding.rule.severity or id == "launcher-per-task")
                if finding.rule.id == id and id in rules and (sure or id in _TEXT):
                    proven = self._proven(draft, finding, propose)
                    if len(proven) == 1:
                        self.finding, self.after = finding, proven[0]
                        return True
                    written = tuple(after.written(draft) for after in proven)
                    self.choices += (Choice(draft.origin(finding), written),) if proven else ()
        return False

    def _proven(self, draft: Draft, finding: Finding, propose: Fix) -> list[Draft]:
        """Return the drafts that help and change what they mean to: the first of those that start the same."""
        found, seen, id = list[Draft](), list[object](), finding.rule.id
        for after in propose(draft, finding):
            if after.lines == draft.lines:
                continue
            if next(self.tries, None) is None:
                return []
            if not _better(draft, after, id):
                continue
            wrong = set() if id in _TEXT else changed(draft.script, after.script, finding)
            if wrong is None:
                self.unproven = "bash could not evaluate the script, so no correction of a launch is proven"
            elif wrong:
                self.unproven = f"the correction of {id} would also change {', '.join(sorted(wrong))}"
            elif (starts := after.lines if id in _TEXT else outcome(after.script)) not in seen:
                found.append(after)
                seen.append(starts)
        return found


def fix_script(script: Script, only: Collection[str] | None = None) -> Fixed:
    """Correct what can be corrected; only: by these rules. The script itself stays as it is."""
    import slurmddp.scripts.check.fixes  # noqa: F401 - registers the fixes

    draft = Draft(script.path, tuple(script.lines), tuple(range(1, len(script.lines) + 1)))
    done: list[Finding] = []
    search, rules = _Search(iter(range(MOST_DRAFTS))), FIXES if only is None else only
    for pure in (True, False):  # bash evaluates what can be read at last
        while len(done) < MOST and search.step(draft, rules, pure=pure):
            assert search.finding and search.after
            done.append(draft.origin(search.finding))
            draft = search.after
    if any(each.rule.id == "syntax" for each in draft.findings):  # what else is in it, nobody can know
        findings = check_script(script)
        return Fixed(
            script.text, [], findings, tuple(range(1, len(script.lines) + 1)), doubt="bash cannot read the script"
        )
    if any(each.rule.id not in _TEXT for each in done) and (name := disagreement(draft.script)):
        why = f"the tasks of a step would differ in {name}"
        return replace(fix_script(script, _TEXT & set(rules)), doubt=why)
    left = [draft.origin(each) for each in draft.findings]
    done.sort(key=lambda each: each.line)
    left.sort(key=lambda each: each.line)
    stopped = bool(left) and (len(done) == MOST or next(search.tries, None) is None)
    why = (doubt(draft) or search.unproven) if {each.rule.id for each in left} & (FIXES.keys() - _TEXT) else ""
    if draft.script.is_shell and record(draft.script) is None:
        why = "bash could not evaluate the script here, so only its text was read"
    return Fixed(draft.text, done, left, draft.origins, stopped, why, search.choices)


def doubt(draft: Draft) -> str:
    """Return why nothing but the text is corrected; empty, if everything may be."""
    found = draft.script.found
    if any(each.rule.id in _UNREAD and each.severity == "error" for each in draft.findings):
        return "bash does not read the script as it is meant"
    if services(draft.script):
        return "it starts several programs side by side"
    if any(each.unsure and not each.command.branch for each in found.launches) or any(
        each.opaque for each in found.steps
    ):
        return "what starts a program, or an option of srun, is known only when the job runs"
    if any(each.resources.unread or _part(draft.script, each) for each in found.steps):
        return "a step runs on a part of the nodes, or on nodes that are known only when the job runs"
    if any(each.branch for each in found.launches):
        return "a launch is in a branch"
    return ""


def _part(script: Script, step: Step) -> bool:
    launched = any(each.step is step for each in script.found.launches)
    return launched and "nodelist" in step.options and not step.fan_out and step.resources.nodes != script.job.nodes


def _better(before: Draft, after: Draft, id: str) -> bool:
    """Tell whether a rule finds less, and bash still reads the script. Errors of other rules may come to light."""

    def found(draft: Draft, id: str) -> int:
        return sum(each.rule.id == id for each in (draft.in_text if id in _PURE else draft.findings))

    return found(after, id) < found(before, id) and all(
        found(after, each) <= found(before, each)
        for each in (("syntax",) if id in _PURE else ("syntax", "undefined-variable"))
    )
