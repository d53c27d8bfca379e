"""How well a run scales: with which run it is compared, and with which not."""

import json
from pathlib import Path
from typing import Any

import pytest

from slurmddp.report.scaling import Scaling
from slurmddp.report.scaling import find_scaling as find
from slurmddp.run import index
from slurmddp.run.events import read_events
from slurmddp.run.index import Entry
from slurmddp.run.layout import RunFolder
from tests.checkpoints import make_run

TRAIN = {"task": "lm", "model": {"width": 64}, "data": {"path": "/d"}, "precision": "bf16"}


def find_scaling(folder: RunFolder) -> Scaling | None:
    return find(folder, read_events(folder.events).records)


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Add a run to the index: its nodes, and its samples per second in each line since its newest start."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made: list[RunFolder] = []

    def run(nodes: int, *speeds: float, name: str = "gpt", **train: Any) -> RunFolder:
        number = len(made)
        folder = make_run(tmp_path / f"{name}-{number}")
        job = {"run": {"name": name}, "train": {**TRAIN, **train}}
        folder.job_json.write_text(json.dumps(job))
        events = [{"event": "started", "time": 5.0, "nodes": 64}, {"event": "started", "time": 10.0, "nodes": nodes}]
        folder.events.write_text("".join(json.dumps(event) + "\n" for event in events))
        rows = [{"step": 1, "time": 7.0, "samples_per_second": 9999.0}]
        rows += [{"step": 2 + i, "time": 11.0 + i, "samples_per_second": speed} for i, speed in enumerate(speeds)]
        folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        index.record(Entry(folder.id, str(folder.path), f"2026-11-{number + 1:02d}T00:00:00+00:00", name))
        made.append(folder)
        return folder

    return run


def test_it_is_compared_with_the_run_on_the_fewest_nodes(add: Any) -> None:
    one = add(1, 90, 100, 110)
    add(2, 180, 180, 180)
    run = add(4, 10, 320, 320, 330)
    found = find_scaling(run)
    assert found is not None and found.efficiency == pytest.approx(0.8)
    assert found.line() == f"80 % of linear: 320 samples/s on 4 nodes, 100 on 1 (run {one.id})"
    than = {"run_id": one.id, "nodes": 1, "samples_per_second": 100}
    assert found.as_dict() == {"efficiency": 0.8, "nodes": 4, "samples_per_second": 320, "than": than}


@pytest.mark.parametrize(
    "other",
    [{"name": "other"}, {"model": {"width": 65}}, {"precision": "fp32"}, {"data": {"path": "/e"}}, {"task": "images"}],
)
def test_another_job_is_none_to_compare_with(add: Any, other: dict[str, Any]) -> None:
    add(1, 100, 100, 100, **other)
    assert find_scaling(add(4, 300, 300, 300)) is None


def test_without_anything_to_compare_there_is_none(add: Any) -> None:
    add(4, 100, 100, 100)
    add(2, 100, 100)  # too short
    assert find_scaling(add(4, 300, 300, 300)) is None
    damaged = add(1, 100, 100, 100)
    for text in ("", "[]", '{"run": 1, "train": {}}', '{"train": {}}'):
        damaged.job_json.write_text(text)
        assert find_scaling(damaged) is None
    assert find_scaling(add(8, 300, 300, 300)) is not None, "with the run on 4 nodes"
