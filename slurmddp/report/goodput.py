"""How much of a run's time went into training, and what the rest was."""

from __future__ import annotations

import time
from typing import Any

from slurmddp.errors import UserError
from slurmddp.run.evidence import evidence
from slurmddp.run.layout import RunFolder
from slurmddp.run.ledger import KINDS, Ledger, ledger
from slurmddp.run.metrics import ledger_lines

#: How many kinds the one line of `slurmddp status` names.
_NAMED = 3


def run_ledger(folder: RunFolder, *, going: bool) -> Ledger | None:
    """Account for the time of a run. going: whether it may still change, so that its time ends now.

    None for a run that was never submitted. Raises UserError for a damaged submission.json, OSError.
    """
    now = time.time() if going else None
    facts = evidence(folder)
    rows = ledger_lines(folder.metrics, facts.events)
    return ledger(facts, rows, script=not folder.job_json.exists(), now=now)


def never_submitted(folder: RunFolder) -> UserError:
    return UserError(f"run {folder.id} was never submitted: it has no goodput")


def goodput_line(found: Ledger | None) -> str | None:
    """Return `87 % of 3:12:04 (training 2:47:10, queue 0:12:00, ...)`; None if nothing has begun."""
    if found is None or found.wall < 1000 or not found.attempts:
        return None
    # What would be shown as 0:00:00 is left to the table.
    largest = sorted((kind for kind in KINDS if found.spent[kind] >= 1000), key=lambda kind: -found.spent[kind])
    shown = ["training"] if "training" in largest else []
    shown += [kind for kind in largest if kind != "training"][: _NAMED - len(shown)]
    named = ", ".join(f"{kind} {_clock(found.spent[kind])}" for kind in shown)
    more = ", ..." if len(largest) > len(shown) else ""
    return f"{_headline(found)} ({named}{more})"


def recovered_line(found: Ledger | None) -> str | None:
    """Return `3 times, the longest gap 0:00:21`; None if nothing failed, or nothing is known to have gone on."""
    if found is None or not found.recovered:
        return None
    gaps = [each.milliseconds for each in found.recoveries if each.recovered]
    times = "once, in" if len(gaps) == 1 else f"{len(gaps)} times, at most in"
    return f"{times} {_clock(max(gaps))}"


def goodput_text(found: Ledger, *, going: bool) -> str:
    """Return the goodput, then each kind with seconds, share and meaning. The seconds add up to the last line."""
    so_far = " so far" if going else ""
    tried = f", {_count(found.attempts, 'attempt')}" if found.attempts != found.jobs else ""
    counts = f"{_count(found.jobs, 'start')} of the job{tried}, {_count(found.rank_starts, 'start')} of the ranks"
    failed = f", {found.failures} of these failed or were killed" if found.failures else ""
    lines = [f"goodput  {_headline(found)}{so_far}: {counts}{failed}", ""]
    if recovered := recovered_line(found):
        lines.insert(1, f"recovered {recovered}")
    rows = [("KIND", "SECONDS", "SHARE", "MEANING")]
    for kind, meaning in KINDS.items():
        if found.spent[kind]:
            rows.append((kind, _seconds(found.spent[kind]), _percent(found.spent[kind], found.wall), meaning))
    rows.append(("all", _seconds(found.wall), _percent(found.wall, found.wall), "from submission to " + _until(going)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        [*lines, *(f"{a.ljust(widths[0])}  {b.rjust(widths[1])}  {c.rjust(widths[2])}  {d}" for a, b, c, d in rows)]
    )


def goodput_dict(found: Ledger, *, going: bool) -> dict[str, Any]:
    """Return the ledger for --json. The keys are stable; every kind is there. Times are seconds with three decimals."""
    return {
        "going": going,
        "begin": found.begin / 1000,
        "end": found.end / 1000,
        "wall_seconds": found.wall / 1000,
        "goodput": None if found.goodput is None else round(found.goodput, 6),
        "seconds": {kind: milliseconds / 1000 for kind, milliseconds in found.spent.items()},
        "jobs": found.jobs,
        "attempts": found.attempts,
        "rank_starts": found.rank_starts,
        "failures": found.failures,
        "recovered": found.recovered,
        "recoveries": [
            {
                "attempt": each.attempt,
                "step": each.step,
                "seconds": each.milliseconds / 1000,
                "failed": each.failed,
                "went_on": each.went_on,
            }
            for each in found.recoveries
        ],
    }


def _headline(found: Ledger) -> str:
    if not found.wall:
        return "n/a"
    if found.goodput is None:
        unknown = _clock(found.spent["run"])
        return f"n/a ({unknown} of your own script were not measured), {_clock(found.wall)}"
    return f"{100 * found.goodput:.3g} % of {_clock(found.wall)}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _seconds(milliseconds: int) -> str:
    return f"{milliseconds // 1000}.{milliseconds % 1000:03d}"


def _clock(milliseconds: int) -> str:
    """3:12:04."""
    minutes, seconds = divmod(milliseconds // 1000, 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _until(going: bool) -> str:
    return "now" if going else "the end"
