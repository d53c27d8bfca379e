"""The small parts: schedule, journal, stop file, console, tasks by name, text windows, data workers."""

import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmddp.records.rank_events import LinksProbed
from slurmddp.runtime import console, environment, optimizer, tasks, world
from slurmddp.runtime.data import loading
from slurmddp.runtime.data.order import SampleOrder
from slurmddp.runtime.errors import UserError
from slurmddp.runtime.job import Schedule
from slurmddp.runtime.journal import Events, Journal
from slurmddp.runtime.tasks.lm import Windows
from slurmddp.runtime.tasks.options import checked
from slurmddp.runtime.tasks.text import ByteStream, find_files
from slurmddp.runtime.watch import failures
from slurmddp.runtime.watch.stop import StopFile
from slurmddp.shared import units
from slurmddp.shared.journal import JsonLines
from slurmddp.shared.task_options import OPTIONS

from .harness import place


@pytest.mark.parametrize(("kind", "middle", "end"), [("cosine", 0.55, 0.1), ("linear", 0.55, 0.1), ("constant", 1, 1)])
def test_schedule(kind: Any, middle: float, end: float) -> None:
    wanted = Schedule(kind, warmup=10, min_ratio=0.1, steps=None)
    assert [optimizer.ratio(wanted, step, 110) for step in (0, 4, 9)] == [0.1, 0.5, 1.0]
    assert optimizer.ratio(wanted, 10, 110) == 1.0
    assert optimizer.ratio(wanted, 60, 110) == pytest.approx(middle)
    assert optimizer.ratio(wanted, 110, 110) == optimizer.ratio(wanted, 1000, 110) == pytest.approx(end)
    assert optimizer.ratio(Schedule(kind, 0, 0.1, 20), 0, 5) == 1.0


def test_events_are_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for rank in range(2):
        Events(path, attempt=1, node="n", rank=rank).write(LinksProbed(None, float("nan"), "a\nb ü"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["rank"] for line in lines] == [0, 1]
    facts = {"event": "links_probed", "attempt": 1, "node": "n", "factor": None, "text": "a\nb ü"}
    assert facts.items() <= lines[0].items()
    assert abs(lines[0]["time"] - time.time()) < 10


def test_a_full_disk_is_an_error() -> None:
    with pytest.raises(OSError, match="No space"):
        JsonLines(Path("/dev/full")).write({"a": 1})


def test_a_journal_on_a_full_disk_ends_no_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    journal = Journal(path)
    for number in range(3):
        journal.write({"a": number})
    assert capfd.readouterr().err == (
        "warning: metrics.jsonl cannot be written (No space left on device): training continues\n"
    )
    path.unlink()
    again = Journal(path)
    again._lost = 3
    again.write({"a": 3})
    again.write({"a": 4})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"a": 3, "lines_lost": 3}, {"a": 4}]


def test_the_breaker_on_a_full_disk_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here the limit on a file's size: a file that is /dev/full cannot be read to its end."""
    (tmp_path / "began").write_text("0\n")
    (tmp_path / "failures").write_text("0 1\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, hard))
    try:
        assert failures.begin(tmp_path, 0, {failures.LIMIT: "2"}) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "warning: cannot count the failure of the last start" in capsys.readouterr().err


def test_a_line_that_was_cut_takes_no_other_with_it(tmp_path: Path) -> None:
    """By a disk that was full for a while (here: the limit on a file's size), and by the end of an earlier writer."""
    path = tmp_path / "events.jsonl"
    path.write_text('{"a": 0}\n{"cut by its wri')
    with JsonLines(path) as lines:
        lines.write({"a": 1})
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, hard))
        try:
            with pytest.raises(OSError, match="only 5 of"):
                lines.write({"a": 2})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        lines.write({"a": 3})
    assert path.read_text().splitlines() == ['{"a": 0}', '{"cut by its wri', '{"a": 1}', '{"a":', '{"a": 3}']


def test_stop_file_is_looked_for_once_an_interval(tmp_path: Path) -> None:
    path = tmp_path / "stop"
    stop = StopFile(path, interval=0.2)
    assert not stop.seen()
    path.write_text("time limit\nmore")
    assert not stop.seen()
    time.sleep(0.21)
    assert stop.seen() and stop.reason() == "time limit"
    path.unlink()
    assert stop.seen() and stop.reason() == "stop file"
    assert not StopFile(None).seen()


def test_environment_of_torchrun() -> None:
    given = {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "SLURMDDP_NODE": "n1",
    }
    place = environment.read(given)
    assert (place.rank, place.local_rank, place.world, place.attempt, place.node) == (3, 1, 4, 0, "n1")
    with pytest.raises(UserError, match="RANK is not set: start this program with torchrun"):
        environment.read({})
    with pytest.raises(UserError, match="SLURMDDP_ATTEMPT must be a whole number, not 'x'"):
        environment.read({**given, "SLURMDDP_ATTEMPT": "x"})


@pytest.mark.parametrize("rank", [0, 1])
def test_more_ranks_than_gpus_are_refused_by_all_of_them(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank of a node is the one that speaks for all."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match=r"node node0 has 1 GPU\(s\) for 2 ranks: each rank needs one"):
        world.start(place(rank, 2, local_world=2, node="node0"), timeout=1)


def test_progress_line() -> None:
    line = console.progress(step=120, steps=2000, loss=2.345, rate=3e-4, speed=12345, unit="tokens", eta=83)
    assert line == "step  120/2000  loss 2.3450  lr 3.0e-04  12.3k tok/s  eta 1:23"
    assert units.clock(3723) == "1:02:03"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt", "train.task must be lm, images or package.module:factory, not 'gpt'"),
        ("nothing.here:create", "there is no module 'nothing' on the path"),
        ("runtime.deeper:create", "no module 'runtime.deeper'"),
        ("runtime.toy:make", "has no function 'make'"),
        ("runtime.toy:incomplete", "lacks targets_per_sample, unit, metrics, build_model"),
    ],
)
def test_a_task_that_is_none(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tasks.create(name, {}, {})


def test_an_error_inside_a_users_module_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_task.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        tasks.create("users_task:create", {}, {})


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        (
            {"path": "/not/here/at/all"},
            {},
            r"/not/here/at/all does not exist \(but / does\)",
        ),
        ({}, {}, "train.data.path must be a path or a list of paths, not None"),
        ({"path": "TEXT", "contxt": 3}, {}, "unknown key train.data.contxt; known keys: path, context"),
        ({"path": "TEXT", "context": "3"}, {}, "train.data.context must be a whole number"),
        ({"path": "TEXT", "context": 0}, {}, "train.data.context must be a whole number from 1 up, not 0"),
        ({"path": ["TEXT", 3]}, {}, "train.data.path must be a path or a list of paths, not"),
        (
            {"path": "TEXT", "validation_fraction": 0.6},
            {},
            "train.data.validation_fraction must be a number from 0 to 0.5, not 0.6",
        ),
        ({"path": "TEXT"}, {"tied": 1}, "train.model.tied must be true or false, not 1"),
        ({"path": "TEXT", "context": 50}, {}, "too few"),
        ({"path": "TEXT", "glob": "*.none"}, {}, "no file with content matches"),
        (
            {"path": "TEXT", "context": 1},
            {"width": 5},
            r"train.model.width must be a multiple of train.model.heads \(4\), not 5",
        ),
    ],
)
def test_mistakes_in_lm(tmp_path: Path, data: dict[str, Any], model: dict[str, Any], message: str) -> None:
    (tmp_path / "a.txt").write_text("some text, short")
    if data.get("path") == "TEXT":
        data = {**data, "path": str(tmp_path)}
    with pytest.raises(UserError, match=message):
        tasks.create("lm", data, model)


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        ({}, {}, "train.data.path must be a path, not None"),
        ({"path": "/not/here"}, {}, "/not/here does not exist"),
        ({"path": ["/a"]}, {}, "train.data.path must be a path, not"),
        (
            {"path": "/a", "context": 3},
            {},
            "unknown key train.data.context; known keys: path, validation_fraction, size",
        ),
        (
            {"path": "/a", "validation_fraction": 1},
            {},
            "train.data.validation_fraction must be a number from 0 to below 1, not 1",
        ),
        ({"path": "/a"}, {"kind": "vit"}, "train.model.kind must be mlp or cnn, not 'vit'"),
    ],
)
def test_mistakes_in_images(data: dict[str, Any], model: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tasks.create("images", data, model)


@pytest.mark.parametrize("task", tasks.BUNDLED)
def test_every_bundled_task_has_its_options_and_defaults_that_fit(task: str) -> None:
    found = {name for part in OPTIONS[task].values() for name, option in part.items() if option.required}
    assert found == {"path"}
    assert checked(task, "data", {"path": "/a"}) == {
        **{name: option.default for name, option in OPTIONS[task]["data"].items()},
        "path": "/a",
    }
    assert checked(task, "model", checked(task, "model", {})) == checked(task, "model", {})


def test_the_options_are_read_without_torch() -> None:
    code = "import slurmddp.shared.task_options, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_text_is_one_stream_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, text in (
        ("b.txt", "BBB"),
        ("a.txt", "AA"),
        ("sub/c.txt", "CCCC"),
        ("empty.txt", ""),
        ("x.py", "no"),
    ):
        (tmp_path / name).write_text(text)
    stream = ByteStream(find_files([str(tmp_path)], "**/*.txt", []))
    assert len(stream) == 9
    whole = b"AABBBCCCC"
    for start in range(9):
        for count in range(10 - start):
            assert stream.read(start, count) == whole[start : start + count]
    assert [name for name, *_ in find_files([str(tmp_path)], "**/*.txt", ["sub/*"])] == ["a.txt", "b.txt"]
    before = stream.fingerprint()
    assert ByteStream(find_files([str(tmp_path)], "**/*.txt", [])).fingerprint() == before
    (tmp_path / "b.txt").write_text("BBX")
    assert ByteStream(find_files([str(tmp_path)], "**/*.txt", [])).fingerprint() != before
    (tmp_path / "a.txt").write_text("A")
    with pytest.raises(OSError, match=r"a\.txt had 2 bytes at the start, and is now shorter than"):
        stream.read(0, 2)


@pytest.mark.parametrize("length", [40, 41, 47, 200, 1003])
@pytest.mark.parametrize("validation", [0, 1, 3, 4])
def test_windows_cover_the_text_without_overlap(tmp_path: Path, length: int, validation: int) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(number % 251 for number in range(length)))
    stream = ByteStream([("text", path, length)])
    parts = [Windows(stream, 4, validation, training=training) for training in (True, False)]
    assert len(parts[1]) == validation
    assert sorted(part.window(i) for part in parts for i in range(len(part))) == list(range(length // 5))
    for part in parts:
        for index in range(len(part)):
            start = part.window(index) * 5
            assert part[index].tolist() == [number % 251 for number in range(start, start + 5)]


def test_data_workers_survive_the_jobs_signals() -> None:
    task = tasks.create("runtime.toy:create", {}, {})
    lists = loading.training_lists(SampleOrder(23, 1), start=0, steps=40, total=4, micro=4, world=1, rank=0)
    others = set(multiprocessing.active_children())  # ranks of earlier tests in this process
    micros = loading.load(task, task.train_samples(), lists, rank=0, workers=2, pin_memory=False)
    loaded = next(micros).ids
    workers = set(multiprocessing.active_children()) - others
    assert len(workers) == 2
    for worker in workers:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(worker.pid, number)
    for micro in micros:
        loaded += micro.ids
    assert loaded == SampleOrder(23, 1).ids(torch.arange(160))
