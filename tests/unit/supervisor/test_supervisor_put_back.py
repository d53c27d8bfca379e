"""Back into the queue: what ended the attempt decides who requeues the job, and never a text for people."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slurmddp.records.cause import Cause
from slurmddp.supervisor.brain.types import NODE_FAILURE, Settings
from slurmddp.supervisor.requeue import Requeue
from slurmddp.supervisor.stopping import put_back


class Loop:
    """Notes the commands, which succeed."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []

    def be_deaf(self) -> None: ...

    def start(self, *_: Any, **__: Any) -> None: ...

    def run(self, words: list[str], *_: Any, **__: Any) -> Any:
        self.commands.append(words)
        return SimpleNamespace(code=0, text="")


@pytest.mark.parametrize(("ended_by", "asks"), [("", True), (NODE_FAILURE, False)])
def test_a_text_like_a_reason_is_no_reason(ended_by: str, asks: bool) -> None:
    loop = Loop()
    folder = SimpleNamespace(confirm=lambda: loop.commands.append(["this process leads"]))
    job: Any = SimpleNamespace(
        loop=loop, requeue=Requeue(loop, "7", "7", "n1", "/run"), attempt=0, settings=Settings("/run"),  # type: ignore[arg-type]
        nodes=SimpleNamespace(excluded=[]), folder=folder, say=lambda text: None, event=lambda facts: None,
        alert=lambda *words: None,
    )  # fmt: skip
    assert put_back(job, Cause(NODE_FAILURE), ended_by)
    assert loop.commands.pop(0) == ["this process leads"]
    assert loop.commands == ([["scontrol", "requeue", "7"]] if asks else [])
