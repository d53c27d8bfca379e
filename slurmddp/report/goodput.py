"""How much of a run's time went into training, and what the rest was."""

import time
from typing import Any

from slurmddp.errors import UserError
from slurmddp.report.progress import span
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


def goodput_line(times: Ledger | None) -> str | None:
    """Return `87 % of 3:12:04 (training 2:47:10, queue 0:12:00, ...)`; None if nothing has begun."""
    if times is None or times.wall < 1000 or not times.attempts:
        return None
    # What would be shown as 0:00:00 is left to the table.
    largest = sorted((kind for kind in KINDS if times.spent[kind] >= 1000), key=lambda kind: -times.spent[kind])
    shown = ["training"] if "training" in largest else []
    shown += [kind for kind in largest if kind != "training"][: _NAMED - len(shown)]
    named = ", ".join(f"{kind} {span(times.spent[kind] / 1000)}" for kind in shown)
    more = ", ..." if len(largest) > len(shown) else ""
    return f"{_headline(times)} ({named}{more})"


def recovered_line(times: Ledger | None) -> str | None:
    """Return `3 times, the longest gap 0:00:21`; None if nothing failed, or nothing is known to have gone on."""
    if times is None or not times.recovered:
        return None
    gaps = [each.milliseconds for each in times.recoveries if each.recovered]
    often = "once, in" if len(gaps) == 1 else f"{len(gaps)} times, at most in"
    return f"{often} {span(max(gaps) / 1000)}"


def goodput_text(times: Ledger, *, going: bool) -> str:
    """Return the goodput, then each kind with seconds, share and meaning. The seconds add up to the last line."""
    so_far = " so far" if going else ""
    tried = f", {_count(times.attempts, 'attempt')}" if times.attempts != times.jobs else ""
    counts = f"{_count(times.jobs, 'start')} of the job{tried}, {_count(times.rank_starts, 'start')} of the ranks"
    failed = f", {times.failures} of these failed or were killed" if times.failures else ""
    lines = [f"goodput  {_headline(times)}{so_far}: {counts}{failed}", ""]
    if recovered := recovered_line(times):
        lines.insert(1, f"recovered {recovered}")
    rows = [("KIND", "SECONDS", "SHARE", "MEANING")]
    for kind, meaning in KINDS.items():
        if times.spent[kind]:
            rows.append((kind, _seconds(times.spent[kind]), _percent(times.spent[kind], times.wall), meaning))
    until = f"from submission to {'now' if going else 'the end'}"
    rows.append(("all", _seconds(times.wall), _percent(times.wall, times.wall), until))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        [*lines, *(f"{a.ljust(widths[0])}  {b.rjust(widths[1])}  {c.rjust(widths[2])}  {d}" for a, b, c, d in rows)]
    )


def goodput_dict(times: Ledger, *, going: bool) -> dict[str, Any]:
    """Return the ledger for --json. The keys are stable; every kind is there. Times are seconds with three decimals."""
    return {
        "going": going,
        "begin": times.begin / 1000,
        "end": times.end / 1000,
        "wall_seconds": times.wall / 1000,
        "goodput": None if times.goodput is None else round(times.goodput, 6),
        "seconds": {kind: milliseconds / 1000 for kind, milliseconds in times.spent.items()},
        **{name: getattr(times, name) for name in ("jobs", "attempts", "rank_starts", "failures", "recovered")},
        "recoveries": [
            {
                "attempt": each.attempt,
                "step": each.step,
                "seconds": each.milliseconds / 1000,
                "failed": each.failed,
                "went_on": each.went_on,
            }
            for each in times.recoveries
        ],
    }


def _headline(times: Ledger) -> str:
    if not times.wall:
        return "n/a"
    if times.goodput is None:
        unknown = span(times.spent["run"] / 1000)
        return f"n/a ({unknown} of your own script were not measured), {span(times.wall / 1000)}"
    return f"{100 * times.goodput:.3g} % of {span(times.wall / 1000)}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _seconds(milliseconds: int) -> str:
    return f"{milliseconds // 1000}.{milliseconds % 1000:03d}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
