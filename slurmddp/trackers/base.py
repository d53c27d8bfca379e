"""What all trackers have in common: what they get of a run, and what they must be able to do."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from slurmddp.errors import UserError


class Facts(NamedTuple):
    """What a tracker gets of a run. folder: for files of the tracker; settings: flat, by key."""

    run_id: str
    job_name: str
    folder: Path
    settings: Mapping[str, Any]


class Point(NamedTuple):
    """A line of metrics.jsonl, or an evaluation."""

    number: int  # counts them from 1, across restarts
    time: float
    step: int
    values: Mapping[str, float]
    #: a restart trains from this step, so that points of it and of later steps that were sent before no longer hold
    again: bool = False


class Tracker(Protocol):
    """One run of a tracker."""

    where: str  # for people
    key: str  # what finds the run again in the next sync
    durable: bool  # whether `send` returns only when nothing can be lost any more. Otherwise `close` does.

    def send(self, points: Sequence[Point]) -> None:
        """Send the points, in their order."""

    def close(self, state: str | None) -> None:
        """Send what is left. state: how the run ended, as `status` names it; None while it is going."""


def library(name: str, package: str) -> Any:
    """Import a tracker's library. Raises UserError where it is missing."""
    try:
        return import_module(name)
    except ImportError as error:
        todo = f"pip install {package}, into the Python of slurmddp"
        raise UserError(f"the library {package} cannot be imported: {error}", where="--to", todo=todo) from None
