"""Steps whose numbers are read one step late, as on a GPU: everything as if they were read at once."""

import contextlib
import io
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from slurmddp.runtime import session
from slurmddp.runtime.step import Stepper
from slurmddp.runtime.world import World

from .harness import Failed, Ranks, Run, trainer
from .saving import load
from .test_checkpoint import same
from .test_exact import POISONED

#: Of a metrics line, what is no duration and no time.
FACTS = ("step", "attempt", "loss", "positive", "grad_norm", "lr", "epoch", "samples", "skipped")
SETTINGS: dict[str, Any] = {"checkpoint__every_steps": 3, "train__steps": 8, "checkpoint__keep": 9}


def train(joined: World, root: Path, late: bool, stop_at: int | None = None) -> list[list[int]]:
    """Return, for each step, those whose numbers were waited for before it was launched."""
    with mock.patch.object(session, "Stepper", partial(Stepper, late=late)):
        made = trainer(joined, root)
    run, read = made.session.stepper.run, []

    def stopping(*arguments: Any, **options: Any) -> Any:
        if options["step"] == stop_at:
            made.session.watch.stop.request("asked by the test")
        outcomes = run(*arguments, **options)
        read.append([outcome.step for outcome in outcomes])
        return outcomes

    with (
        mock.patch.object(made.session.stepper, "run", stopping),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        made.run()
    return read


def both(ranks: Ranks, folder: Path, **changes: Any) -> tuple[list[Run], list[dict[int, tuple[str, str]]]]:
    """The same run read at once and late, and what its ranks raised."""
    runs = [Run.create(folder / name, **SETTINGS, **changes) for name in ("at-once", "late")]
    raised: list[dict[int, tuple[str, str]]] = []
    for run, late in zip(runs, (False, True), strict=True):
        try:
            ranks(2, train, run.root, late)
            raised.append({})
        except Failed as failed:
            raised.append(failed.failures)
    return runs, raised


def facts(run: Run) -> list[dict[str, Any]]:
    return [{name: line[name] for name in FACTS if name in line} for line in run.lines("metrics.jsonl")]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train__optimizer__name": "sgd", "train__optimizer__clip": 0.5},
        {"train__optimizer__clip": None, "train__evaluate__every_steps": 4, "train__log_every": 3},
        {"train__data": {"poison": POISONED}, "train__on_nonfinite": "skip"},
        {"train__data": {"poison_gradient": POISONED}, "train__on_nonfinite": "skip"},
        {"train__data": {"poison": POISONED}},
        {"train__data": {"poison_gradient": POISONED}},
    ],
    ids=["adamw", "sgd", "unclipped", "loss skipped", "gradient skipped", "loss stops", "gradient stops"],
)
def test_nothing_differs(ranks: Ranks, tmp_path: Path, changes: dict[str, Any]) -> None:
    (first, late), raised = both(ranks, tmp_path, **changes)
    assert raised[0] == raised[1]
    assert bool(raised[0]) == ("train__data" in changes and "train__on_nonfinite" not in changes)
    assert len(facts(first)) > 2 and facts(first) == facts(late)
    assert first.stream(0) == late.stream(0)
    assert [event["why"] for event in first.events("step_skipped")] == [
        event["why"] for event in late.events("step_skipped")
    ]
    assert first.saved() == late.saved() != []
    for name in first.saved():
        assert same(load(first.root / "checkpoints" / name), load(late.root / "checkpoints" / name))


@pytest.mark.ranks(2)
def test_a_step_does_not_wait_for_its_numbers(ranks: Ranks, tmp_path: Path) -> None:
    """But the first does. Where the state is saved (3, 6, 8), numbers are read once the step is launched."""
    run = Run.create(tmp_path / "run", **SETTINGS)
    assert ranks(2, train, run.root, True) == 2 * [[[1], [], [2], [], [4], [5], [], [7]]]


@pytest.mark.ranks(2)
def test_a_request_is_met_one_step_later(ranks: Ranks, tmp_path: Path) -> None:
    for late, last in ((False, 4), (True, 5)):
        run = Run.create(tmp_path / str(late), **SETTINGS)
        ranks(2, train, run.root, late, 3)  # after the step has begun
        assert (run.marker()["state"], run.marker()["step"]) == ("stopped", last)
        assert run.saved() == ["step-00000003", f"step-{last:08d}"]
        assert [line["step"] for line in run.lines("metrics.jsonl")] == list(range(1, last + 1))
