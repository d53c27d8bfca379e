"""The manifest, and what it finds out about git and images."""

import json
import os
import subprocess
import uuid
from datetime import datetime
from pathlib import Path

import pytest

from slurmddp.errors import UserError
from slurmddp.images.provenance import sha256
from slurmddp.run import manifest
from slurmddp.run.layout import RunFolder
from slurmddp.run.version import version


def run_git(folder: Path, *arguments: str) -> str:
    names = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(["git", *names, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_build_write_read(tmp_path: Path) -> None:
    odd = os.fsdecode(b"/data/\xff")
    facts = manifest.build(
        RunFolder(tmp_path / "gpt-1"),
        name="gpt",
        command=["slurmddp", "submit", odd, "ä"],
        project=None,
        code_hash="ab",
        image=None,
        resumed_from=["gpt-0"],
        more={"site": "local"},
    )
    run = RunFolder(tmp_path)
    manifest.write(run, facts)
    assert manifest.read(run) == facts
    assert b"/data/\xff" in run.manifest.read_bytes()
    assert (facts["schema"], facts["run"], facts["name"]) == (1, "gpt-1", "gpt")
    assert (facts["slurmddp"], facts["site"], facts["resumed_from"]) == (version(), "local", ["gpt-0"])
    assert facts["schemas"] == {"job.json": 5, "events.jsonl": 4, "metrics.jsonl": 2}
    assert datetime.fromisoformat(facts["created"]).tzinfo is not None
    assert facts["directory"] == str(Path.cwd())
    assert facts["user"] and facts["host"] and facts["python"]
    assert facts["git"] is None and facts["image"] is None


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"schema": "x"}'])
def test_damaged(tmp_path: Path, text: "str | None") -> None:
    run = RunFolder(tmp_path)
    if text is not None:
        run.manifest.write_text(text)
    with pytest.raises(UserError, match=r"manifest\.json"):
        manifest.read(run)


@pytest.mark.parametrize(
    ("versions", "what"),
    [
        ('"schema": 1, "schemas": {"events.jsonl": 1}', "events.jsonl has version 1"),
        ('"schema": 1, "schemas": {"job.json": 99}', "job.json has version 99"),
        ('"schema": 2', "manifest.json has version 2"),
    ],
)
def test_a_run_of_another_version_is_refused_in_one_message(tmp_path: Path, versions: str, what: str) -> None:
    run = RunFolder(tmp_path)
    run.manifest.write_text(f'{{{versions}, "slurmddp": "0.0.9"}}')
    for refuse in (manifest.read, manifest.require_version):
        with pytest.raises(UserError) as caught:
            refuse(run)
        assert f"made by slurmddp 0.0.9: its {what}" in str(caught.value)
        assert f"slurmddp submit {run.job_yaml}" in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"schema": 1, "schemas": {"events.jsonl": 4, "another file": 7}}'])
def test_what_names_no_other_version_is_not_refused_for_it(tmp_path: Path, text: str) -> None:
    run = RunFolder(tmp_path)
    manifest.require_version(run)
    run.manifest.write_text(text)
    manifest.require_version(run)


def test_git(tmp_path: Path) -> None:
    project = tmp_path / "repository" / "project"
    project.mkdir(parents=True)
    assert manifest.git_facts(project) is None
    run_git(tmp_path / "repository", "init", "-q")
    root = str(tmp_path / "repository")
    assert manifest.git_facts(project) == {"commit": None, "dirty": False, "root": root}
    script = project / "train.py"
    script.write_text("x")
    assert manifest.git_facts(project) == {"commit": None, "dirty": True, "root": root}
    run_git(project, "add", ".")
    run_git(project, "commit", "-q", "-m", "x")
    commit = run_git(project, "rev-parse", "HEAD")
    clean = {"commit": commit, "dirty": False, "root": root}
    assert manifest.git_facts(project) == manifest.git_facts(script) == clean
    (tmp_path / "repository" / "elsewhere").write_text("x")
    assert manifest.git_facts(project) == clean, "an edit outside of the project"
    script.write_text("y")
    assert manifest.git_facts(project) == {**clean, "dirty": True}


def test_git_absent_or_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_git(tmp_path, "init", "-q")
    monkeypatch.setenv("PATH", "/absent")
    facts = manifest.git_facts(tmp_path)
    assert facts and facts["commit"] is None and "git could not be started" in facts["note"]


def sif(path: Path, image_id: uuid.UUID, size: int = 5000) -> Path:
    header = b"#!/usr/bin/env run-singularity\n".ljust(32, b"\0") + b"SIF_MAGIC\0" + b"01\0" + b"02\0"
    path.write_bytes(header + image_id.bytes + b"\0" * size)
    return path


def test_sif(tmp_path: Path) -> None:
    image_id = uuid.uuid4()
    image = sif(tmp_path / "a.sif", image_id)
    facts = manifest.image_facts(image)
    assert (facts["kind"], facts["sif_id"], facts["bytes"]) == ("sif", str(image_id), 5064)
    assert facts["sha256"] == sha256(image)
    assert facts["mtime"] == image.stat().st_mtime
    assert "note" not in facts


def test_hash_from_the_lock(tmp_path: Path) -> None:
    image = sif(tmp_path / "a.sif", uuid.uuid4())
    lock = {"bytes": image.stat().st_size, "mtime": image.stat().st_mtime, "sha256": "locked"}
    lock_file = tmp_path / "a.sif.lock.json"
    lock_file.write_text(json.dumps(lock))
    assert manifest.image_facts(image)["sha256"] == "locked"
    for change in ({"bytes": 1}, {"mtime": 1.0}, {"mtime": None}):
        lock_file.write_text(json.dumps({**lock, **change}))
        assert manifest.image_facts(image)["sha256"] == sha256(image)
    lock_file.write_text("{")
    assert manifest.image_facts(image)["sha256"] == sha256(image)


def test_large_images_are_not_hashed(tmp_path: Path) -> None:
    image = sif(tmp_path / "a.sif", uuid.uuid4())
    os.truncate(image, 2**30)  # sparse
    facts = manifest.image_facts(image)
    assert facts["sha256"] is None and "1 GiB" in facts["note"]


def test_other_images(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x")
    assert manifest.image_facts(tmp_path / "short")["kind"] == "file"
    assert manifest.image_facts(tmp_path)["kind"] == "folder"
    absent = manifest.image_facts(tmp_path / "absent")
    assert absent["kind"] is None and "cannot be read" in absent["note"]
