"""`slurmddp sync` with the trackers' own libraries, and what each of them reads back afterwards."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from slurmddp.run.layout import RunFolder
from tests.helpers import Desk, append_event

JOB = "site: gpus\ntrain: {task: lm, batch: {global: 512}}\n"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run that restarted: its second attempt trains steps 20 and 30 again."""
    desk = Desk(tmp_path / "desk")
    folder = RunFolder(desk.project / "gpt-1")
    folder.path.mkdir()
    facts = {"schema": 1, "run": "gpt-1", "name": "gpt", "created": "2026-01-01T00:00:00+00:00", "site": "gpus"}
    folder.manifest.write_text(json.dumps(facts))
    folder.job_yaml.write_text(JOB)
    append_event(folder.events, "job_started", attempt=0, job_id="7", node="n1", nodes="n1")
    add(folder, 0, 10, 20, 30)
    return folder


def add(run: RunFolder, attempt: int, *steps: int) -> None:
    with run.metrics.open("a") as file:
        for step in steps:
            row = {"time": 1e9 + step, "attempt": attempt, "step": step, "loss": 1 / step, "start": attempt}
            file.write(json.dumps({**row, "seconds": {"data": 0.5 * (1 + steps.index(step))}}) + "\n")


def sync(run: RunFolder, to: str, **variables: str) -> dict[str, Any]:
    """`slurmddp sync` as a process, which writes its files below the desk only."""
    done = subprocess.run(
        [sys.executable, "-m", "slurmddp", "sync", str(run.path), "--to", to, "--json"],
        env={**Desk(run.path.parents[1]).environment, "PYTHONPATH": ":".join(sys.path), **variables},
        cwd=run.path.parent, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def sync_in_parts(run: RunFolder, to: str, **variables: str) -> dict[str, Any]:
    """Sync four times: the first attempt, the second, nothing new, and the end of the run."""
    lines = [sync(run, to, **variables)["lines"]]
    add(run, 1, 20, 30, 40)
    lines += [sync(run, to, **variables)["lines"] for _ in range(2)]
    append_event(run.events, "job_ended", attempt=1, job_id="7", exit_code=0, signal="", decision="done")
    last = sync(run, to, **variables)
    assert [*lines, last["lines"]] == [3, 3, 0, 0]
    return last


def test_tensorboard_shows_each_step_once(run: RunFolder) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for step in (10, 30):
        told = {"step": step, "seconds": 1.0, "loss": 0.5, "count": 1, "samples": 1}
        append_event(run.events, "evaluated", attempt=0, job_id="7", node="n1", rank=0, time=1e9 + step + 5, **told)
    where = sync_in_parts(run, "tensorboard")["where"]
    assert where == str(run.path / "trackers/tensorboard")
    found = EventAccumulator(where).Reload()
    assert set(found.Tags()["scalars"]) == {"attempt", "loss", "seconds/data", "validation/loss"}
    assert [(event.step, event.value) for event in found.Scalars("validation/loss")] == [(10, 0.5)]
    shown = [(event.step, event.value, event.wall_time) for event in found.Scalars("attempt")]
    assert shown == [(10, 0, 1e9 + 10), (20, 1, 1e9 + 20), (30, 1, 1e9 + 30), (40, 1, 1e9 + 40)]


@pytest.mark.long
@pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed: pip install mlflow-skinny")
def test_mlflow_has_one_run(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}
    where = sync_in_parts(run, "mlflow", **variables)["where"]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("gpt")
    (found,) = client.search_runs([experiment.experiment_id])
    assert where == f"{variables['MLFLOW_TRACKING_URI']} experiment gpt, run {found.info.run_id}"
    assert (found.info.run_name, found.info.status) == ("gpt-1", "FINISHED")
    assert found.data.params == {
        "site": "gpus", "slurmddp": "None", "train.task": "lm", "train.batch.global": "512",
    }  # fmt: skip
    history = client.get_metric_history(found.info.run_id, "attempt")
    steps = [(10, 0), (20, 0), (30, 0), (20, 1), (30, 1), (40, 1)]
    assert [(point.step, point.value) for point in history] == steps
    assert history[0].timestamp == 1000 * (10**9 + 10)
    (run.path / "trackers/mlflow.json").unlink()
    sync(run, "mlflow", **variables)
    assert len(client.search_runs([experiment.experiment_id])) == 1, "it is found again by its tag"


@pytest.mark.long
@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed: pip install wandb")
def test_wandb_writes_the_parts_of_one_run_offline(run: RunFolder) -> None:
    where = Path(sync_in_parts(run, "wandb", WANDB_MODE="offline")["where"])
    assert where.parent == run.path / "trackers/wandb"
    records = [list(wandb_records(path)) for path in sorted(where.parent.glob("offline-run-*/*.wandb"))]
    assert len(records) == 3, "two with lines, one with the end"
    for part in records:
        (begin,) = [record.run for record in part if record.HasField("run")]
        assert (begin.run_id, begin.project, begin.resume) == ("gpt-1", "gpt", True)
    rows = [
        {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for part in records
        for record in part
        if record.HasField("history")
    ]
    shown = [(row["_step"], row["step"], row["attempt"], row["_timestamp"], row["seconds/data"]) for row in rows]
    steps = [(10, 0), (20, 0), (30, 0), (20, 1), (30, 1), (40, 1)]
    assert shown == [(at, step, attempt, 1e9 + step, 0.5) for at, (step, attempt) in enumerate(steps, 1)]


def wandb_records(path: Path) -> Iterator[Any]:
    """Read a file of wandb: 7 bytes, then LevelDB's log format (blocks of 32 KiB; checksum, length, kind, data)."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<xxxxHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(whole)
            whole = b""
