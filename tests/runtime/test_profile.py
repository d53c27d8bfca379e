"""`slurmddp debug profile` on the ranks: the same steps on all of them, readable traces, and the same training."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from .harness import Ranks, Run


def asked(tmp_path: Path, name: str, request: Any, **changes: Any) -> Run:
    run = Run.create(tmp_path / name, train__steps=12, **changes)
    (run.root / "profile.json").write_text(request if isinstance(request, str) else json.dumps(request))
    return run


def names(path: str) -> set[str]:
    """Of all that a trace holds."""
    return {event.get("name", "") for event in json.loads(gzip.open(path).read())["traceEvents"]}


@pytest.mark.ranks(2)
def test_steps_of_a_running_job_are_profiled_and_training_is_the_same(ranks: Ranks, tmp_path: Path) -> None:
    plain = Run.create(tmp_path / "plain", train__steps=12)
    ranks.train(2, plain)
    for name, wanted, files in (("one", "0", 1), ("all", "all", 2)):
        run = asked(tmp_path, name, {"steps": 3, "ranks": wanted})
        said = ranks.train(2, run)
        (event,) = run.events("profiled")
        assert event["last"] - event["step"] == 2 and not event["error"] and len(event["files"]) == files
        assert f"profiled   steps {event['step']} to {event['last']}: {event['files'][0]}\n" in said
        assert {path.name for path in (run.root / "trace/attempt-000").glob("profile-*")} == {
            Path(file).name for file in event["files"]
        }
        for file in event["files"]:
            assert any(name.startswith("aten::") for name in names(file))
        assert not (run.root / "profile.json").exists()
        assert run.losses(0) == plain.losses(0)


@pytest.mark.ranks(2)
def test_what_was_profiled_when_training_ends_is_written(ranks: Ranks, tmp_path: Path) -> None:
    run = asked(tmp_path, "run", {"steps": 999, "ranks": "0"})
    ranks.train(2, run)
    (event,) = run.events("profiled")
    assert event["last"] == 12 and names(event["files"][0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("request_", ["", "[]", '{"steps": "5", "ranks": "0"}', '{"steps": 0, "ranks": "0"}'])
def test_a_request_that_is_none_changes_nothing(ranks: Ranks, tmp_path: Path, request_: str) -> None:
    run = asked(tmp_path, "run", request_)
    ranks.train(2, run)
    assert not run.events("profiled") and run.marker()["state"] == "done"


@pytest.mark.ranks(2)
def test_a_trace_that_cannot_be_written_is_reported(ranks: Ranks, tmp_path: Path) -> None:
    run = asked(tmp_path, "run", {"steps": 2, "ranks": "0"}, train__trace_samples=False)
    (run.root / "trace").write_text("a file where the folder belongs")
    ranks.train(2, run)
    (event,) = run.events("profiled")
    assert event["files"] == [] and event["error"].startswith("rank 0: ")
    assert run.marker()["state"] == "done"
