"""docs/job.md knows every key of the job file, and no other."""

import re
from pathlib import Path

import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from slurmddp.job.alerts import Target
from slurmddp.job.job import Job
from slurmddp.job.layers import submodel
from tests.helpers import Desk

PAGE = Path(__file__).parents[3] / "docs" / "job.md"
ROWS = dict(re.findall(r"^\| `([a-z_.]+)`(?: \+)? \| (.*?) \|", PAGE.read_text(), re.MULTILINE))
#: What it says of a default that the model says by None, or that other keys decide.
WORDS = {"site", "none", "required", "one per GPU", "100; static: 0", "see below", "ranks / shard", "planned",
         "the file's name", "the script's folder", "train.steps", "stop (fp16: halve)", "python3"}  # fmt: skip
#: Where the model has a value that stands for what is decided otherwise.
DECIDED = {"name"}
TIMES = {"30m": 1800, "10m": 600, "2m": 120, "60s": 60, "30s": 30}


#: Of these one row tells all: their own keys are those of an entry, or of another way to write it.
ONE_ROW = ("resources.nodes", "container.binds", "alerts")


def keys(model: type[BaseModel] = Job, above: str = "") -> dict[str, object]:
    """The keys that have a value of their own, with the default of the model."""
    found: dict[str, object] = {}
    for name, field in model.model_fields.items():
        key = above + (field.alias or name)
        inner = None if key in ONE_ROW else submodel(field.annotation)
        found |= {key: field.default} if inner is None else keys(inner, f"{key}.")
    return found


def test_it_has_every_key_and_no_other() -> None:
    assert set(ROWS) == set(keys())


def test_its_defaults_are_those_of_the_model() -> None:
    for key, default in keys().items():
        said = ROWS[key]
        if said in WORDS and said != default:
            assert not default or default is PydanticUndefined or key in DECIDED, key
        else:
            assert TIMES.get(said) == default or yaml.safe_load(said) == said_of(default), key


def said_of(default: object) -> object:
    return list(default) if isinstance(default, tuple) else default


def test_targets_of_alerts_are_complete() -> None:
    text = PAGE.read_text()
    (row,) = [line for line in text.splitlines() if line.startswith("| `alerts`")]
    assert set(re.findall(r"`(\w+)`", row)) == {"alerts", *Target.model_fields}


def test_its_example_is_a_job(desk: Desk) -> None:
    lines = PAGE.read_text().split("\n\n")
    (example,) = [part for part in lines if part.startswith("    name:")]
    job = "\n".join(line[4:] for line in example.splitlines())
    resolved = desk.resolve(
        job.replace("leonardo", "here").replace("resources: {nodes: 4, time: 8h, account: ABC}\n", "")
    )
    assert resolved.job.train.batch.global_ == 512
