"""Why a run failed: the first rank that said so, out of events and logs."""

import contextlib
from collections.abc import Mapping
from pathlib import Path

from slurmddp.causes import events as causes
from slurmddp.causes.find import find
from slurmddp.errors import UserError
from slurmddp.records.cause import NODE, NOT_FOUND, UNKNOWN, Cause
from slurmddp.records.events import Event, newest, of
from slurmddp.records.job_events import AttemptEnded, NodeExcluded
from slurmddp.records.preflight import read
from slurmddp.records.rank_events import Error, Hang, HangOver, HangReported, RankExited, RankStarted
from slurmddp.records.refusal import read as read_refusal
from slurmddp.run.events import read_events
from slurmddp.run.evidence import evidence
from slurmddp.run.layout import RunFolder
from slurmddp.run.logs import Follower
from slurmddp.shared.files import open_plain, read_json, read_plain

#: Bytes of a file of the preflight, and characters of a message that are shown.
_BYTES = 1_000_000
_LINE = 2000


def find_cause(folder: RunFolder, attempt: int | None) -> Cause | None:
    """Return why an attempt failed; None if nobody wrote it.

    What job.sh found at the end of the attempt comes first: it saw the nodes as well. Then come the events, which the
    bundled entrypoint writes, then the logs. What ranks see after another rank failed counts only where nothing else
    is found.
    """
    return _of_script(folder, attempt) or _of_logs(folder, attempt, _of_events(folder, attempt))


def newest_cause(folder: RunFolder) -> Cause | None:
    """Return why the newest attempt failed; None if nobody wrote it."""
    return find_cause(folder, evidence(folder).attempt)


def failing_attempt(folder: RunFolder, attempt: int) -> int:
    """Return the attempt that says why ranks start again and again: the one before the newest until that has failed."""
    waits = attempt > 0 and find_cause(folder, attempt) is None and find_cause(folder, attempt - 1) is not None
    return attempt - waits


def tasks_are_ranks(folder: RunFolder) -> bool | None:
    """Return whether srun starts the ranks themselves (launch.mode srun), and not agents; None: not known."""
    from slurmddp.job.document import read_file  # here: YAML takes its time, and most runs have not failed

    try:
        job = read_file(folder.job_yaml, "job", below=folder.path)
    except UserError:
        return None
    launch = job.tree.get("launch")
    return launch.get("mode") == "srun" if isinstance(launch, dict) else None


def _of_script(folder: RunFolder, attempt: int | None) -> Cause | None:
    """The cause in the newest attempt_ended, else what the check of the nodes before the start found."""
    told = [event for event in read_events(folder.events, folder.path).records if event.attempt == attempt]
    bad = {facts.excluded: facts.reason for _, facts in of(told, NodeExcluded)}
    ended = newest(told, AttemptEnded)
    text = _first_line(ended.cause.strip()) if ended else ""
    if ended and text and ended.kind != NOT_FOUND:
        return Cause(text, ended.rank, ended.node, ended.kind or UNKNOWN, more=ended.more)
    return None if ended or attempt is None else _of_preflight(folder, attempt, bad)


def _of_preflight(run: RunFolder, attempt: int, excluded: Mapping[str, str]) -> Cause | None:
    """The first node that the check before the start found bad, and how many more there were.

    excluded: what the script wrote of nodes after the check.
    """
    folder = run.attempt_logs(attempt) / "preflight"
    bad: dict[str, str] = {}
    for path in sorted(folder.glob("*.failed")):
        with contextlib.suppress(OSError):
            text = read_plain(path, _BYTES, run.path).decode("utf-8", errors="replace")
            bad[path.stem] = read_refusal(text).text
    with contextlib.suppress(OSError, ValueError):  # no check
        verdict = read(read_json(folder / "verdict.json", run.path))
        for node in verdict.findings:
            if why := verdict.bad(node):
                bad.setdefault(node, why)
    for node, reason in excluded.items():
        bad.setdefault(node, reason)
    if not bad:
        return None
    node, reason = next(iter(bad.items()))
    more = f" (and {len(bad) - 1} more: {folder})" if len(bad) > 1 else ""
    return Cause(f"{reason}{more}", None, node, NODE)


def _of_events(folder: RunFolder, attempt: int | None) -> Cause | None:
    """The newest start of the ranks first: what ended an earlier one, after which torchrun went on, ended no job."""
    starts: list[list[Cause]] = [[]]
    for event in read_events(folder.events, folder.path).records:
        if event.attempt != attempt:
            continue
        if isinstance(event.facts, RankStarted):
            starts.append([])
        elif isinstance(event.facts, HangOver):
            starts[-1] = starts[-1][:-1]
        elif found := _of_event(event):
            starts[-1].append(found)
    newest = next((found for found in reversed(starts) if found), [])
    return next((cause for cause in newest if not cause.weak), newest[0] if newest else None)


def _of_event(event: Event) -> Cause | None:
    facts, node = event.facts, event.node or ""
    if isinstance(facts, Error):
        found = causes.raised(event.rank, node, facts.kind or "error", facts.message, event.time)
        more = "\n" in facts.message.strip()
        return found._replace(text=f"{found.text} (more in events.jsonl)") if more else found
    if isinstance(facts, RankExited):
        return causes.exited(facts.rank, node, facts.signal, facts.exit_code, event.time)
    return hang_of(event)


def killed_of(event: Event) -> Cause | None:
    """Return what the signal of a rank_exited says; None for signals of a cleanup, and where no signal ended it."""
    facts = event.facts
    signal = facts.signal if isinstance(facts, RankExited) else None
    return causes.killed(event.rank, event.node or "", signal, event.time)


def hang_of(event: Event) -> Cause | None:
    """Return what a hang, or a hang_reported, says; None for another event."""
    facts = event.facts
    if not isinstance(facts, Hang | HangReported):
        return None
    step, waited = ("?" if value is None else value for value in (facts.step, facts.waited))
    text = f"no progress in {facts.phase or '?'} at step {step} for {waited} s"
    return causes.hung(facts.ranks[: len(facts.nodes)], facts.nodes[: len(facts.ranks)], text, event.time)


def _first_line(message: str) -> str:
    first, _, rest = message[:_LINE].partition("\n")
    return f"{first.rstrip()} (more in events.jsonl)" if rest else first


def _of_logs(folder: RunFolder, attempt: int | None, noted: Cause | None) -> Cause | None:
    """Return what the nodes' logs and srun's errors say, if that is better. RUN/ranks: the node of each rank."""
    logs = list(map(str, Follower(folder, attempt=attempt).node_logs()))
    errors = None if attempt is None else str(folder.attempt_logs(attempt) / "srun.err")
    try:
        ranks = read_plain(folder.ranks, _BYTES, folder.path).decode("utf-8", errors="replace").splitlines()
    except OSError:
        ranks = []  # no start of the bundled entrypoint came so far
    srun = noted is None or noted.weak  # else nothing is read
    return find(
        logs, errors, ranks, noted,
        tasks_are_ranks=srun and bool(tasks_are_ranks(folder)),
        opener=lambda path: open_plain(Path(path), folder.path),
    )  # fmt: skip
