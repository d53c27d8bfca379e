"""How a rank of a bundled task reports its failure."""

from pathlib import Path

import pytest

from slurmddp.records.json_lines import LONGEST
from slurmddp.records.rank_events import Error
from slurmddp.runtime import train
from slurmddp.runtime.journal import Events, read_events


def test_a_message_of_any_length_is_an_event_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "leave", lambda code: None)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    path = tmp_path / "events.jsonl"
    train.fail(ValueError("boom " + "x" * (2 * LONGEST)), None, Events(path, attempt=0, node="n1", rank=0))
    (event,) = read_events(path, Error)
    assert isinstance(event.facts, Error) and event.facts.kind == "ValueError"
    assert event.facts.message == "boom " + "x" * (train.LONGEST - 5)
    assert len(path.read_bytes()) < LONGEST
