"""docs/files.md lists every event and key that the code writes, no other, and the versions of the files."""

from __future__ import annotations

import json
import re
import subprocess
import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from slurmddp.records import metrics
from slurmddp.runs import manifest
from slurmddp.runs.events import append_event
from slurmddp.runtime.job import Job
from slurmddp.runtime.journal import Events
from slurmddp.shared import schemas
from tests.helpers import ROOT, SIF, Desk, Result

from . import written

PAGE = (ROOT / "docs/files.md").read_text(encoding="utf-8")
#: The keys that a table's heading names for all of its rows.
COMMON = {
    "job.sh and guard.sh": {"attempt", "job_id", "node"},
    "The ranks and torchrun's agents": {"attempt", "node", "rank"},
    "alert.sh and watchdog.sh": {"job_id"},
    "Commands on the login node": set(),
}
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


@cache
def events_of_the_code() -> dict[str, dict[str, set[str]]]:
    bash = written.events_of_bash()
    found = {
        "job.sh and guard.sh": bash.pop("job"),
        "The ranks and torchrun's agents": written.events_of_python("runtime"),
        "alert.sh and watchdog.sh": {event: keys for events in bash.values() for event, keys in events.items()},
        "Commands on the login node": {},
    }
    for folder in (ROOT / "slurmddp").iterdir():
        if folder.is_dir() and folder.name != "runtime":
            found["Commands on the login node"] |= written.events_of_python(folder.name)
    return found


@pytest.mark.parametrize("writer", COMMON)
def test_the_page_has_the_events_and_keys_of_each_writer(writer: str) -> None:
    in_code = {event: keys - COMMON[writer] for event, keys in events_of_the_code()[writer].items()}
    on_page = {event: names(cell) - COMMON[writer] for event, cell in rows(writer).items()}
    for keys in in_code.values():
        keys.discard(written.OF_THE_TASK)
    assert on_page == in_code
    assert COMMON[writer] <= names(section(writer).split("|")[0])


def test_the_keys_that_each_line_has(tmp_path: Path) -> None:
    Events(tmp_path / "rank", attempt=0, node="n", rank=0).write("x")
    append_event(tmp_path / "login", "x")
    common = names(section("events.jsonl"))
    assert set(json.loads((tmp_path / "login").read_text())) == {"time", "event"} <= common
    ranks = {"time", "event"} | COMMON["The ranks and torchrun's agents"]
    assert set(json.loads((tmp_path / "rank").read_text())) == ranks
    tell = (ROOT / "slurmddp/shell/messages.sh").read_text()
    (line,) = re.findall(r"printf '%s(\{.*\})\\n'", tell)
    assert set(re.findall(r'"(\w+)": ', line)) | {"node"} == {"time", "event"} | COMMON["job.sh and guard.sh"]
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
        "events.jsonl": schemas.EVENTS,
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
