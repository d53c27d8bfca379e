"""JSON lines: appended by many at once, read while they are written."""

import json
import multiprocessing
import time
import tracemalloc
from pathlib import Path

import pytest

from slurmddp.errors import UserError
from slurmddp.records.json_lines import LONGEST
from slurmddp.records.submission import now as submitted_now
from slurmddp.run import submission
from slurmddp.run.events import append_line, read_lines
from slurmddp.run.gate import own
from slurmddp.run.layout import RunFolder
from tests.helpers import append_event


def test_append_and_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert read_lines(path).records == ()
    append_event(path, "cancel_requested", by="alice", text="a\nb ä")
    record = read_lines(path).records[0]
    assert (record["event"], record["by"], record["text"]) == ("cancel_requested", "alice", "a\nb ä")
    assert abs(record["time"] - time.time()) < 60
    assert path.read_bytes().count(b"\n") == 1


def test_torn_and_damaged_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "a"}\n\nnot json\n[1]\n\xff\xfe\n{"event": "b"}\n{"event": "to')
    found = read_lines(path)
    assert [record["event"] for record in found.records] == ["a", "b"]
    assert found.damaged == 3
    append_line(path, {"event": "c"})
    found = read_lines(path)
    assert [record["event"] for record in found.records] == ["a", "b", "c"]
    assert found.damaged == 4, "the torn line is closed, not glued to the next"


def _append(path: str, writer: int) -> None:
    for number in range(200):
        append_line(Path(path), {"writer": writer, "number": number, "fill": "x" * 300})


def test_many_writers_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append, args=(str(path), writer)) for writer in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    found = read_lines(path)
    assert found.damaged == 0
    assert {(record["writer"], record["number"]) for record in found.records} == {
        (writer, number) for writer in range(4) for number in range(200)
    }


def test_submission(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert submission.read(run) is None
    sent = submitted_now("123;alpha", "slurm", ["sbatch", "a b"])
    submission.write(own(run, to="write"), sent)
    assert submission.read(run) == sent
    assert [path.name for path in tmp_path.iterdir()] == ["submission.json"]
    with pytest.raises(ValueError, match="pbs"):
        submitted_now("1", "pbs", [])


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"job_id": "1", "scheduler": "slurm"})])
def test_damaged_submission(tmp_path: Path, text: str) -> None:
    run = RunFolder(tmp_path)
    run.submission.write_text(text)
    with pytest.raises(UserError, match=r"submission\.json"):
        submission.read(run)


def test_a_huge_line_is_never_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with path.open("wb") as file:
        file.write(b'{"a": 1}\n')
        file.truncate(100 * LONGEST)
        file.seek(0, 2)
        file.write(b'\n{"a": 2}\n')
    tracemalloc.start()
    found = read_lines(path)
    size = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert ([each["a"] for each in found.records], found.damaged) == ([1, 2], 1)
    assert size < 5 * LONGEST
