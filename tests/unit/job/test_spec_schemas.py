"""The JSON Schemas are right about every file that we ship, and refuse mistakes."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from slurmddp.assets import asset_folder
from slurmddp.commands.init import write_job_file
from slurmddp.job.document import read_file, read_text, typed
from slurmddp.job.schema import schema_text
from tests.golden.update import SITES
from tests.helpers import LM_JOB, ROOT, Desk

fastjsonschema = pytest.importorskip("fastjsonschema")

SITE_FILES = sorted(asset_folder("site_configs").glob("**/*.yaml"))
RECIPES = sorted([*asset_folder("containers").glob("*.yaml"), *(ROOT / "examples").glob("images/*/*.yaml")])


@cache
def validator(kind: str, *, part: bool = False) -> Callable[[Any], Any]:
    """part: a base of a profile, which has no name and title."""
    schema = json.loads(schema_text(kind))
    if part:
        del schema["definitions"]["Site"]["required"]
    checked: Callable[[Any], Any] = fastjsonschema.compile(schema)
    return checked


def refused(kind: str, text: str) -> bool:
    try:
        validator(kind)(typed(read_text(text, "test", "test").tree))
    except fastjsonschema.JsonSchemaException:
        return True
    return False


@pytest.mark.parametrize("path", SITE_FILES, ids=lambda path: path.stem)
def test_shipped_profiles_and_bases(path: Path) -> None:
    validator("site", part=path.parent.name == "bases")(typed(read_file(path, "site").tree))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes(path: Path) -> None:
    validator("recipe")(typed(read_file(path, "recipe").tree))


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("kind", ["lm", "images", "script"])
def test_what_init_writes(desk: Desk, monkeypatch: pytest.MonkeyPatch, site: str, kind: str) -> None:
    monkeypatch.setenv("HOME", str(desk.home))
    path = desk.project / "job.yaml"
    write_job_file(path, site, None if kind == "script" else kind, "train.py" if kind == "script" else None)
    validator("job")(typed(read_file(path, "job").tree))


def test_the_example_of_the_docs() -> None:
    (example,) = [part for part in (ROOT / "docs/job.md").read_text().split("\n\n") if part.startswith("    name:")]
    assert not refused("job", "\n".join(line[4:] for line in example.splitlines()))


@pytest.mark.parametrize(
    "line",
    [
        "resources: {nodes: 2-4+1, time: 1-12:00:00, account: 0123, mem_per_node: 480G}",
        "resources: {nodes: {max: 4, spares: 1}, ranks_per_node: auto, time: 90m, exclusive: }",
        "environment: {OMP_NUM_THREADS: 8, DEBUG: true, RATE: 1.5}",
        "timeouts: {stop: 90, join: 1.5h, hang: }",
        "container: {binds: ['/a:/b:ro', {source: /c}], options: [--containall]}",
        "alerts: [{to: slack, on: [failed]}]",
        "parallel: {shard: 1e2}",
    ],
)
def test_what_a_job_may_say(desk: Desk, line: str) -> None:
    assert not refused("job", LM_JOB + line)
    if "shard" not in line:
        desk.resolve(LM_JOB + line)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("job", "resources: {nods: 2}"),
        ("job", "resources: {nodes: two}"),
        ("job", "resources: {nodes: 0}"),
        ("job", "resources: {time: 30}"),
        ("job", "resources: {mem_per_node: 480}"),
        ("job", "launch: {rendezvous: etcd}"),
        ("job", "environment: {A B: x}"),
        ("job", "setup: module load x"),
        ("job", "container: {binds: ['a:b:c:d']}"),
        ("job", "alerts: [{on: [failed]}]"),
        ("site", "title: t"),
        ("site", "name: s\ntitle: t\npartitions: {a: {max_time: 30}}"),
        ("site", "name: s\ntitle: t\njob: {resources: {nods: 2}}"),
        ("site", "name: s\ntitle: t\npartitions: {a: {ask: {nodes: x}}}"),
        ("site", "name: s\ntitle: t\nwhen: {a: {nodes: 2-, job: {networ: {}}}}"),
        ("recipe", "base: 25.04\npips: [x]"),
        ("recipe", "base: 25.04\nfiles: [no-destination]"),
    ],
)
def test_what_a_file_must_not_say(kind: str, line: str) -> None:
    assert refused(kind, line)


@pytest.mark.parametrize("kind", ["job", "site", "recipe"])
def test_most_keys_have_a_description(kind: str) -> None:
    """An editor shows it. What no page and no docstring tells has none."""
    schema = json.loads(schema_text(kind))
    keys = [
        (name, key, field.get("description"))
        for name, model in schema["definitions"].items()
        for key, field in model["properties"].items()
    ]
    without = [f"{name}.{key}" for name, key, text in keys if not text]
    assert len(without) < len(keys) / 4, without
