"""`slurmddp image`: what is on the shelf, what is in it, and what nobody needs."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmddp.images.build_lock import only_build
from slurmddp.images.provenance import lock_path, lock_text
from slurmddp.run import index, manifest
from slurmddp.run.layout import RunFolder
from tests.helpers import LM_JOB, Desk, Result

Cli = Callable[..., Result]

NGC = "docker://nvcr.io/nvidia/pytorch:25.04-py3"


def put(folder: Path, name: str, recipe: str, age: int, **lock: Any) -> Path:
    """An image of ours with its lock, so many seconds old."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_bytes(b"x" * 2048)
    os.utime(path, (1_800_000_000 - age,) * 2)
    state = path.stat()
    facts = {"bytes": state.st_size, "mtime": state.st_mtime, "sha256": "0" * 64, "recipe": recipe, "base": NGC, **lock}
    lock_path(path).write_text(lock_text(facts))
    (folder / f"{name}.def").write_text("Bootstrap: docker\n")
    return path


@pytest.fixture
def images(desk: Desk) -> Path:
    folder = desk.project / "images"
    put(folder, "ngc-old.sif", "ngc", 300)
    put(folder, "ngc-used.sif", "ngc", 200)
    put(folder, "ngc-new.sif", "ngc", 100, torch="2.7.0", packages=[f"p{number}==1" for number in range(20)])
    put(folder, "other-1.sif", "other", 400)
    changed = put(folder, "changed.sif", "ngc", 500)
    changed.write_bytes(b"y")
    (folder / "theirs.sif").write_bytes(b"z")
    return folder


def test_list(images: Path, cli: Cli) -> None:
    lines = cli("image", "list").out.splitlines()
    assert lines[0].split() == ["IMAGE", "SIZE", "MADE", "RECIPE", "BASE", "TORCH", "STATE"]
    row = next(line for line in lines if line.startswith("ngc-new.sif"))
    assert "2.0 KiB" in row and NGC in row and row.endswith("2.7.0  whole")
    assert next(line for line in lines if line.startswith("changed.sif")).endswith("changed")
    assert next(line for line in lines if line.startswith("theirs.sif")).endswith("no lock")
    found = json.loads(cli("image", "list", str(images), "--json").out)
    assert {item["state"] for item in found} == {"whole", "changed", "no lock"}
    assert cli("image", "list", "nowhere").code == 2


def test_inspect(images: Path, cli: Cli) -> None:
    out = cli("image", "inspect", "images/ngc-new.sif").out
    assert "state     matches its lock file" in out and f"base      {NGC}" in out
    assert "CUDA      12.9.0.036" in out and "driver    575.51.02" in out and "and 8 more" in out
    assert "minor-version" in cli("image", "inspect", "images/ngc-new.sif", "--driver", "535.183.01").out
    forward = cli("image", "inspect", "images/ngc-new.sif", "--driver", "470.57.02", "--gpu", "a100").out
    assert "CUDA 12.x needs driver" in forward
    assert json.loads(cli("image", "inspect", "images/ngc-new.sif", "--json").out)["lock"]["torch"] == "2.7.0"
    assert "no lock file: slurmddp did not build the image" in cli("image", "inspect", "images/theirs.sif").out
    assert "CHANGED" in cli("image", "inspect", "images/changed.sif").out
    missing = cli("image", "inspect", "images/gone.sif")
    assert missing.code == 2 and "cannot read the image" in missing.err


def test_clean_keeps_what_is_newest_used_or_not_ours(
    images: Path, desk: Desk, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, desk.environment.get(name, ""))
    run = RunFolder(desk.project / "runs" / "gpt-20260101-120000-abcd")
    run.path.mkdir(parents=True)
    facts = {"schema": 1, "run": run.id, "name": "gpt", "image": {"path": str(images / "ngc-used.sif")}}
    run.manifest.write_text(json.dumps(facts))
    index.record(index.Entry(run.id, str(run.path), "2026-01-01T12:00:00+00:00", "gpt"))
    assert manifest.read(run)["image"]["path"].endswith("ngc-used.sif")
    left = images / ".ngc-new.sif.0123abcd.part"
    left.write_bytes(b"half")
    before = sorted(path.name for path in images.iterdir())

    shown = cli("clean", "--images", "images")
    said = shown.out
    assert "ngc-old.sif" in said and "2 newer of recipe ngc" in said and "leftover of a killed build" in said
    assert shown.code == 2 and "--yes" in shown.err and sorted(path.name for path in images.iterdir()) == before
    with only_build(images / "ngc-new.sif", [].append):
        assert "killed" not in cli("clean", "--images", "images").out, "it may be the one that is being built"
    assert "removed: " in cli("clean", "--images", "images", "--yes").out
    gone = set(before) - {path.name for path in images.iterdir()}
    assert gone == {"ngc-old.sif", "ngc-old.sif.def", "ngc-old.sif.lock.json", left.name}
    assert "nothing to remove" in cli("clean", "--images", "images").out
    assert "other-1.sif" in cli("clean", "--images", "images", "--keep", "0").out


SIF = b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\00001\00002\0"


@pytest.mark.parametrize(
    ("driver", "planned", "submitted"),
    [
        ("575.57.08", "note: CUDA: native", ""),
        ("535.183.01", "note: CUDA: minor-version compatibility", ""),
        ("470.57.02", "CUDA 12.x needs driver 525.60.13 or newer, the nodes have 470.57.02", "CUDA 12.x needs driver"),
        (
            "418.40",
            "CUDA 12.x needs driver",
            "the image may not run on these nodes: CUDA 12.x needs driver",
        ),
    ],
)
def test_the_driver_of_the_profile_and_the_cuda_of_the_image(
    desk: Desk, cli: Cli, driver: str, planned: str, submitted: str
) -> None:
    profile = desk.config / "sites" / "gpus.yaml"
    text = profile.read_text().replace("gpus_per_node: 4", f"gpus_per_node: 4, driver: '{driver}'", 1)
    assert driver in text
    profile.write_text(text)
    image = put(desk.project / "images", "ngc.sif", "ngc", 0)
    image.write_bytes(SIF)
    facts = json.loads(lock_path(image).read_text()) | {"bytes": len(SIF), "mtime": image.stat().st_mtime}
    lock_path(image).write_text(lock_text(facts))
    desk.write("job.yaml", LM_JOB)
    assert planned in cli("check", "job.yaml", "--image", "images/ngc.sif").out
    said = cli("submit", "job.yaml", "--dry-run", "--image", "images/ngc.sif").err
    assert (submitted in said) if submitted else ("the image may not run on these nodes" not in said)


def test_a_gpu_that_the_image_s_cuda_has_no_code_for(desk: Desk, cli: Cli) -> None:
    """The profile has no driver, and none would help."""
    profile = desk.config / "sites" / "gpus.yaml"
    profile.write_text(profile.read_text().replace("gpu_type: a100", "gpu_type: b300", 1))
    image = put(desk.project / "images", "ngc.sif", "ngc", 0)
    image.write_bytes(SIF)
    lock = json.loads(lock_path(image).read_text())
    facts = lock | {"bytes": len(SIF), "mtime": image.stat().st_mtime}
    desk.write("job.yaml", LM_JOB)
    for cuda, expected in (("12.3.2", "CUDA 12.3.2 has no code for b300"), ("12.9.0", "")):
        lock_path(image).write_text(lock_text(facts | {"registry": {"cuda": cuda}}))
        said = cli("submit", "job.yaml", "--dry-run", "--image", "images/ngc.sif").err
        assert (f"the image may not run on these nodes: {expected}" in said) == bool(expected), said


def test_a_driver_that_is_none(desk: Desk, cli: Cli) -> None:
    desk.site("name: s\ntitle: t\ndriver: new\n")
    desk.write("job.yaml", LM_JOB)
    assert "must be a driver version, such as 535.183.01" in cli("check", "job.yaml", "--site", "s").err
