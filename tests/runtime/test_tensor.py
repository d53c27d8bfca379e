"""Tensor parallelism of the task lm, on any mesh, against one process."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from .harness import Ranks, Run

STEPS = 20
MODEL: dict[str, Any] = {"layers": 2, "heads": 4, "width": 16}


def lm(root: Path, name: str, data: dict[str, Any], **changes: Any) -> Run:
    """A run of 20 steps on 9 samples a step, which no number of ranks divides."""
    usual: dict[str, Any] = {
        "train__task": "lm", "train__data": data, "train__model": MODEL, "train__steps": STEPS,
        "train__optimizer__lr": 1e-3, "train__optimizer__clip": 0.5, "batch__global": 9, "batch__micro": 2,
        "checkpoint__every_steps": None, "train__schedule__steps": STEPS,
    }  # fmt: skip
    return Run.create(root / name, **(usual | changes))


def windows(root: Path) -> dict[str, Any]:
    text = root / "text"
    text.write_bytes(random.Random(0).randbytes(9 * 400))
    return {"path": str(text), "context": 8, "validation_fraction": 0.1}


def documents(root: Path) -> dict[str, Any]:
    """Of 1 to 40 bytes: most lengths are no multiple of a tensor group."""
    dice, path = random.Random(0), root / "documents.jsonl"
    lines = (json.dumps({"text": "".join(dice.choices("abcdefgh", k=dice.randint(1, 40)))}) for _ in range(300))
    path.write_text("\n".join(lines) + "\n")
    return {"path": str(path), "context": 16, "format": "jsonl", "validation_fraction": 0.1}


def mesh(replicate: int, shard: int, tensor: int) -> dict[str, Any]:
    return {"parallel__replicate": replicate, "parallel__shard": shard, "parallel__tensor": tensor}


FACTS = ("loss", "grad_norm", "bits_per_byte", "samples", "padding", "epoch")


def same_curve(run: Run, wanted: Run) -> None:
    """Loss, norm and counts of each step within 1e-5, and of the validation."""
    found, reference = run.lines("metrics.jsonl"), wanted.lines("metrics.jsonl")
    assert len(found) == len(reference) == STEPS
    for ours, theirs in zip(found, reference, strict=True):
        known = {key: value for key, value in theirs.items() if key in FACTS}
        assert {key: ours[key] for key in known} == pytest.approx(known, rel=1e-5), ours["step"]
    ours, theirs = run.marker()["validation"], wanted.marker()["validation"]
    assert ours == pytest.approx(theirs, rel=1e-5) and ours["count"] == theirs["count"]


def same_samples(run: Run, wanted: Run, tensor: int) -> None:
    """The ranks of a tensor group take the same ones; the groups together, each of the step's samples once."""
    traces = [path.read_text() for path in sorted((run.root / "trace" / "attempt-000").iterdir())]
    for first in range(0, len(traces), tensor):
        assert set(traces[first : first + tensor]) == {traces[first]}
    for step, ids in wanted.stream(0).items():
        rows = [json.loads(trace.splitlines()[step - 1]) for trace in traces[::tensor]]
        assert sorted(number for row in rows for number in row["ids"]) == sorted(ids)


@pytest.mark.ranks(8)
def test_two_by_two_by_two_is_one_process(ranks: Ranks, tmp_path: Path) -> None:
    data = windows(tmp_path)
    one, eight = lm(tmp_path, "one", data), lm(tmp_path, "eight", data, **mesh(2, 2, 2))
    ranks.train(1, one)
    output = ranks.train(8, eight)
    assert "parallel   HSDP+TP, replicate 2 x shard 2 x tensor 2" in output
    assert "accumulation 2 x tensor groups 4" in output
    assert eight.events("started")[0]["parallel"] == "HSDP+TP"
    same_curve(eight, one)
    same_samples(eight, one, 2)
