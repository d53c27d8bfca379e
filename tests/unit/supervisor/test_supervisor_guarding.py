"""A guard that dies is started again, and job.sh does not count on it meanwhile."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmddp.supervisor.guarding import Guarding
from slurmddp.supervisor.values import Values

VALUES = {"elastic": "", "standby": "", "python": "/opt/python"}


class Stage:
    """A job whose guard's step is a stand-in. steps: the commands that started it."""

    def __init__(self, folder: Path, elastic: str = "") -> None:
        self.seconds, self.steps, self.said = 0.0, [], []  # type: float, list[list[str]], list[str]
        self.child: Any = SimpleNamespace(code=None)
        self.mark = folder / "guard"
        self.mark.touch()
        self.job: Any = SimpleNamespace(
            values=Values("/run", str(folder), {**VALUES, "elastic": elastic}, (), ()), run="/run", env={}, ending="",
            scheduler=SimpleNamespace(host="node1"), nodes=SimpleNamespace(usable=["node1", "node2"]),
            loop=SimpleNamespace(start=self.start), say=self.said.append,
        )  # fmt: skip
        self.guarding = Guarding(self.job, lambda: self.seconds)

    def start(self, words: list[str], env: dict[str, str]) -> Any:
        self.steps.append(words)
        self.child = SimpleNamespace(code=None)
        return self.child

    def look(self, *moments: float) -> list[int]:
        """How often it had been started by then."""
        counts = []
        for self.seconds in moments:
            self.guarding.look()
            counts.append(len(self.steps))
        return counts


def test_one_that_dies_is_started_again_at_once_and_then_ever_later(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.guarding.look()
    stage.guarding.start()
    assert stage.look(2, 4) == [1, 1] and stage.mark.exists()
    stage.child.code = 137
    assert stage.look(6, 6.5, 7, 9) == [1, 1, 2, 2]
    assert not stage.mark.exists() and len(stage.said) == 1 and "137" in stage.said[0]
    stage.child.code = 1
    assert stage.look(40, 69, 70) == [2, 2, 3], "what killed it may go on"
    stage.child.code = 1
    assert stage.look(80, 139, 140) == [3, 3, 4]
    assert stage.steps[0] == stage.steps[2]


@pytest.mark.parametrize(("code", "ending"), [(0, ""), (137, "time limit")])
def test_one_that_is_over_is_not_started_again(tmp_path: Path, code: int, ending: str) -> None:
    stage = Stage(tmp_path)
    stage.guarding.start()
    stage.child.code, stage.job.ending = code, ending
    assert stage.look(10, 100, 1000) == [1, 1, 1] and stage.said == []


@pytest.mark.parametrize(
    ("elastic", "options"),
    [("", ["--nodes=1", "--nodelist=node1"]), ("yes", ["--no-kill", "--nodes=2", "--ntasks=2"])],
)
def test_it_runs_beside_job_sh_or_on_each_node(tmp_path: Path, elastic: str, options: list[str]) -> None:
    stage = Stage(tmp_path, elastic)
    stage.guarding.start()
    assert set(options) < set(stage.steps[0]) and stage.steps[0][-3:-1] == ["python=/opt/python", "--"]
