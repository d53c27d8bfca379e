"""Causes that an event tells: an exception, the end of a rank, a hang."""

from typing import Optional, Sequence

from slurmddp.causes.rules import killed_by, kind_of
from slurmddp.records.cause import EXCEPTION, EXIT, HANG, SIGNAL, Cause
from slurmddp.records.redact import redact
from slurmddp.records.text import first_line

#: Signals with which torchrun, Slurm and process groups end ranks after another failure.
_CLEANUP = ("SIGTERM", "SIGINT", "SIGABRT")


def raised(rank: Optional[int], node: str, kind: str, message: str, time: Optional[float] = None) -> Cause:
    """Return what an uncaught exception says: its first line. The whole message tells whether it is a consequence."""
    whole = f"{kind}: {message.strip()}"
    text = redact(first_line(whole))
    return Cause(text, rank, node, kind_of(whole, EXCEPTION), time)


def killed(rank: Optional[int], node: str, signal: Optional[str], time: Optional[float] = None) -> Optional[Cause]:
    """Return what a signal says that ended a rank; None for no signal, and for those of a cleanup."""
    if not signal or signal in _CLEANUP:
        return None
    return Cause(killed_by(signal), rank, node, SIGNAL, time)


def exited(
    rank: Optional[int], node: str, signal: Optional[str], exit_code: Optional[int], time: Optional[float] = None
) -> Cause:
    """Return what the end of a rank says. Where no signal killed it, its log may know more."""
    how = f"ended by {signal}" if signal else f"exited with code {'?' if exit_code is None else exit_code}"
    return killed(rank, node, signal, time) or Cause(how, rank, node, EXIT, time)


def hung(ranks: Sequence[int], nodes: Sequence[str], text: str, time: Optional[float] = None) -> Cause:
    """Return what a hang says. ranks: those that the others waited for; without any, a collective did not end."""
    who = "" if ranks else "no rank is behind the others: "
    more = f" (and {len(ranks) - 1} more)" if len(ranks) > 1 else ""
    rank, node = (ranks[0], nodes[0]) if ranks and nodes else (None, "")
    return Cause(f"{who}hang: {text}{more}", rank, node, HANG, time)
