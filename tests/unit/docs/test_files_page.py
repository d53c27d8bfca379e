"""docs/files.md lists every event and key that the code writes, no other, and the versions of the files."""

import json
import re
import subprocess
import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from slurmddp.records import events, metrics
from slurmddp.records.events import Event
from slurmddp.records.job_events import HoldReleased
from slurmddp.records.rank_events import RanksStopped
from slurmddp.run import manifest
from slurmddp.run.events import append_line
from slurmddp.runtime.job import Job
from slurmddp.runtime.journal import Events
from slurmddp.shared import schemas
from tests.helpers import ROOT, SIF, Desk, Result

from . import event_tables, written

PAGE = (ROOT / "docs/files.md").read_text(encoding="utf-8")
#: Keys of all lines, which some events have a field for.
HEAD = {"time", "attempt", "job_id", "node", "rank"}
KINDS = {int: "whole number", float: "number", str: "text", bool: "true or false", list: "list", dict: "object"}


def section(title: str) -> str:
    """The text below a heading, up to the next one."""
    (found,) = re.findall(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return found


def rows(title: str) -> dict[str, str]:
    """First column -> last column of a section's table."""
    table = re.findall(r"^\| `([^`]+)` \|(?:.*\|)?(.*)\|$", section(title), re.MULTILINE)
    assert len(table) == len(dict(table)), f"a row twice: {title}"
    return dict(table)


def names(cell: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", cell))


def test_the_page_has_the_events_and_their_keys() -> None:
    assert event_tables.page(PAGE) == PAGE, "run: python -m tests.unit.docs.event_tables"


def test_the_keys_that_each_line_has(tmp_path: Path) -> None:
    Events(tmp_path / "rank", attempt=0, node="n", rank=0).write(RanksStopped())
    append_line(tmp_path / "login", Event(HoldReleased(), 1.0).write())
    common = names(section("events.jsonl"))
    assert set(json.loads((tmp_path / "login").read_text())) == {"time", "event"} <= common
    ranks = names(section("The ranks and torchrun's agents").split("|")[0])
    assert set(json.loads((tmp_path / "rank").read_text())) <= {"time", "event"} | ranks
    job = names(section("job.sh and the guard").split("|")[0])
    assert set(Event(HoldReleased(), 1.0, 0, "7", "n").write()) == {"time", "event"} | job
    assert "lines_lost" in common


def test_the_page_has_the_keys_of_metrics() -> None:
    keys, parts = written.metrics()
    keys.discard(written.OF_THE_TASK)
    table = rows("metrics.jsonl")
    assert set(table) == keys
    assert names(table["seconds"]) == parts


def job_keys(model: type = Job, above: str = "") -> dict[str, str]:
    """Dotted key -> its kind of value, of job.json as the ranks read it."""
    found: dict[str, str] = {}
    hints = get_type_hints(model)
    for field in fields(model):
        key = above + field.metadata.get("key", field.name)
        found |= (
            job_keys(hints[field.name], f"{key}.")
            if is_dataclass(hints[field.name])
            else {key: kind(hints[field.name])}
        )
    return found


def kind(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if each is type(None) else kind(each) for each in arguments)
    if origin is Literal:
        return ", ".join(map(str, arguments))
    if origin is list:
        return f"list of {KINDS[arguments[0]]}s"
    return KINDS[origin or hint]


def test_the_page_has_the_keys_of_job_json_and_their_kinds() -> None:
    assert {key: cell.strip() for key, cell in rows("job.json").items()} == job_keys()


def test_the_page_has_the_keys_of_the_manifest(
    desk: Desk, cli: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.write("train.py", "")
    desk.write("job.yaml", "site: here\ntrain: {script: train.py}\ncontainer: {python: /bin/true}\n")
    subprocess.run(["git", "init", "-q", str(desk.project)], check=True)
    assert cli("run", "job.yaml").code == 0
    (path,) = (desk.project / "runs").glob("*/manifest.json")
    facts = json.loads(path.read_text())
    git = set(facts["git"]) | set(unable_git(desk, monkeypatch))
    image = set(manifest.image_facts(desk.write("image.sif", SIF))) | set(manifest.image_facts(desk.project))
    below = {"git": git, "image": image, "schemas": set(manifest.SCHEMAS)}
    table = rows("manifest.json")
    assert set(table) == set(facts) | {f"{key}.{name}" for key, inner in below.items() for name in inner}


def unable_git(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        facts = manifest.git_facts(desk.project)
    assert facts is not None
    return facts


def test_the_page_has_the_versions() -> None:
    numbers = {name: int(cell) for name, cell in rows("Versions").items() if cell.strip().isdigit()}
    assert numbers == {
        "manifest.json": manifest.SCHEMA,
        "job.json": schemas.JOB,
        "events.jsonl": events.VERSION,
        "metrics.jsonl": metrics.VERSION,
    }


def test_the_keys_of_status_and_runs(desk: Desk, cli: Callable[..., Result]) -> None:
    desk.program("squeue", "#!/bin/bash\nexit 0\n")
    run = desk.project / "runs" / "gpt-1"
    run.mkdir(parents=True)
    (run / "manifest.json").write_text(json.dumps({"run": "gpt-1", "name": "gpt", "created": "2026-01-01T00:00:00Z"}))
    state = desk.home / ".local/state/slurmddp"
    state.mkdir(parents=True)
    entry = {"id": "gpt-1", "path": str(run), "created": "2026-01-01T00:00:00Z", "name": "gpt"}
    (state / "runs.jsonl").write_text(json.dumps(entry) + "\n")
    documented = set(rows("status --json and runs --json"))
    assert set(json.loads(cli("status", "gpt-1", "--json").out)) == documented - {"site"}
    (told,) = json.loads(cli("runs", "--json").out)
    assert set(told) == documented - {"recovered", "scaling", "gpus"}
