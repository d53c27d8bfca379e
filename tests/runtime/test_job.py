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
    path.write_text(json.dumps(make_job()))
    wanted = job.load(path)
    assert (wanted.batch.total, wanted.batch.micro) == (5, 2)
    assert wanted.train.schedule.steps is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train__optimizer__momentom": 1}, "unknown key train.optimizer.momentom; known keys: name, lr"),
        ({"train__optimizer": None}, "train.optimizer must be an object, not null"),
        ({"schema": 1}, "schema is 1, but this runtime needs 5"),
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
