"""The newest samples of a run's GPUs, as status and report show them."""

import json
import time
from pathlib import Path
from typing import Any

from slurmddp.report.gpus import gpu_table, gpus_line, read_gpus
from slurmddp.run.layout import RunFolder


def gpu(index: int, use: float | None = 93.0, **more: Any) -> dict[str, Any]:
    figures = {"memory_gib": 61.0, "total_gib": 80.0, "watts": 412.0, "mhz": 1410.0, "celsius": 64.0, "slowed": []}
    return {"gpu": index, "use": use, **figures, **more}


def write(folder: RunFolder, node: str, *gpus: dict[str, Any], ago: float = 0, attempt: int = 0) -> Path:
    path = folder.gpu_samples(attempt, node)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({"time": time.time() - ago, "gpus": gpus}) + "\n")
    return path


def test_the_newest_line_of_each_node_counts(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    write(run, "n1", gpu(0, 1.0))
    path = write(run, "n1", gpu(0, 90.0, slowed=["power cap"]), gpu(1, 96.0))
    write(run, "n2", gpu(0, 41.0, watts=300.0, slowed=["hw thermal slowdown"]))
    write(run, "n3", gpu(0, 0.0), attempt=1)
    with path.open("a") as file:
        file.write('{"time": 9e9, "gpus": [')  # being written
    gpus = read_gpus(run, 0)
    assert [(each.node, each.index, each.figures["use"]) for each in gpus] == [
        ("n1", 0, 90),
        ("n1", 1, 96),
        ("n2", 0, 41),
    ]
    assert gpus_line(gpus) == (
        "90 % busy, 61 of 80 GiB, 412 W; least busy: n2 GPU 0, 41 %; clocks lowered: n2 GPU 0 (hw thermal slowdown)"
    )
    assert gpu_table(gpus) == {
        "n1": "2 GPUs: 90 to 96 % busy, 61 GiB, 412 W, 64 °C, 1410 MHz, clocks lowered: power cap",
        "n2": "1 GPU: 41 % busy, 61 GiB, 300 W, 64 °C, 1410 MHz, clocks lowered: hw thermal slowdown",
    }
    assert gpus[0].as_dict().items() >= {"node": "n1", "gpu": 0, "use": 90, "slowed": ["power cap"]}.items()


def test_old_samples_say_nothing_of_now(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    write(run, "n1", gpu(0), ago=600)
    assert gpus_line(read_gpus(run, 0)) is None and gpu_table(read_gpus(run, 0))


def test_what_is_not_told_is_left_out(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    write(run, "n1", {"gpu": 0, "use": None, "watts": 100})
    assert gpus_line(read_gpus(run, 0)) == "100 W"
    assert gpu_table(read_gpus(run, 0)) == {"n1": "1 GPU: 100 W"}


def test_damaged_and_missing_files_are_no_error(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert read_gpus(run, 0) == read_gpus(run, None) == []
    path = write(run, "n1", gpu(0))
    for line in (
        "[]",
        "{}",
        '{"time": 1, "gpus": 3}',
        '{"time": "x", "gpus": [{"gpu": 0}]}',
        '{"time": 1, "gpus": [1]}',
    ):
        path.write_text(line + "\n")
        assert read_gpus(run, 0) == []
    path.write_text("x" * 50_000)
    assert read_gpus(run, 0) == []
