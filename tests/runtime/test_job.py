"""Reading job.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from slurmddp.runtime import job
from slurmddp.runtime.errors import UserError

from .harness import make_job


def test_a_whole_job_is_read(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(make_job(train__optimizer__lr=1)))
    wanted = job.load(path)
    assert (wanted.batch.total, wanted.batch.micro) == (5, 2)
    assert wanted.train.optimizer.lr == 1.0 and isinstance(wanted.train.optimizer.lr, float)
    assert wanted.train.schedule.steps is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train__steps": "6"}, "train.steps must be a whole number, not text"),
        ({"train__steps": True}, "train.steps must be a whole number, not true or false"),
        ({"train__steps": 0}, "train.steps must be at least 1, not 0"),
        ({"train__precision": "fp8"}, "train.precision must be one of fp32, bf16, fp16, not 'fp8'"),
        ({"train__optimizer__betas": [0.9]}, "train.optimizer.betas must be two numbers"),
        ({"train__optimizer__betas": [0.9, "x"]}, r"train.optimizer.betas\[1\] must be a number"),
        ({"train__optimizer__momentom": 1}, "unknown key train.optimizer.momentom; known keys: name, lr"),
        ({"train__optimizer": None}, "train.optimizer must be an object, not null"),
        ({"resume_from": [3]}, r"resume_from\[0\] must be text"),
        ({"batch__global": 0}, "batch.global must be at least 1"),
        ({"timeouts__collective": 0}, "timeouts.collective must be above 0"),
        ({"schema": 1}, "schema is 1, but this runtime needs 4"),
    ],
)
def test_a_mistake_is_named_by_its_key(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(make_job(**change)))
    with pytest.raises(UserError, match=message) as caught:
        job.load(path)
    assert str(path) in str(caught.value)


def test_a_missing_key_is_named() -> None:
    data = make_job()
    del data["train"]["schedule"]["warmup"]
    with pytest.raises(UserError, match=r"the key train\.schedule\.warmup is missing"):
        job.parse(data)


@pytest.mark.parametrize("content", ["", "{", "[]", "3"])
def test_what_is_not_a_job_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "job.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"job\.json"):
        job.load(path)
    with pytest.raises(UserError, match="No such file"):
        job.load(tmp_path / "none.json")
