"""A run folder, and what sends its alerts: the supervisor's own sender as a program."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slurmddp.job.plan.model import Plan
from slurmddp.render.scripts import alert_files
from slurmddp.run.layout import RunFolder
from tests.helpers import Desk, node_log, supervisor

TARGETS = ("slack", "discord", "teams", "ntfy", "json")


@dataclass
class Alerts:
    """One run at a site of the desk. `run`: its folder; `memory`: KiB for each process."""

    desk: Desk
    plan: Plan
    run: RunFolder
    memory: int | None = None

    @property
    def secrets(self) -> Path:
        return self.desk.config / "secrets" / self.run.id

    def address(self, url: str, *names: str) -> None:
        """What submission does with the addresses of these targets; without names, of all."""
        self.secrets.mkdir(parents=True, exist_ok=True)
        targets = self.plan.alerts.targets if self.plan.alerts else ()
        for name in names or [target.name for target in targets]:
            (self.secrets / name).write_text(url + "\n")

    def log(self, text: bytes, node: str = "node1", attempt: int = 0) -> Path:
        path = node_log(self.run, attempt, node)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
        return path

    def start(self, kind: str, *words: str | bytes, budget: int = 5, **more: str) -> subprocess.Popen[bytes]:
        """The sender with kind, state, cause and what happens next."""
        environment = {**self.desk.environment, "SLURMDDP_ALERT_BUDGET": str(budget), **more}
        command: list[str | bytes] = [*supervisor("alert"), str(self.run.path)]
        if self.memory:
            command = ["bash", "-c", f'ulimit -v {self.memory}; exec "$@"', "-", *command]
        return subprocess.Popen(
            [*command, kind, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def alert(self, kind: str, *words: str | bytes, budget: int = 5, **more: str) -> str:
        """The same, to its end: what it said on stderr. It always ends well and prints nothing."""
        child = self.start(kind, *words, budget=budget, **more)
        out, err = child.communicate(timeout=120)
        assert (child.returncode, out) == (0, b""), err
        return err.decode("utf-8", "replace")

    def waiting(self, place: str = "spool") -> list[Path]:
        """What lies in the spool, or among the refused: one folder a message, none half sent."""
        return sorted((self.run.path / "alerts" / place).glob("*"))

    def body(self, target: str) -> bytes:
        (found,) = [path for path in self.waiting() if path.name.endswith(f".{target}")]
        return (found / "body").read_bytes()

    def events(self) -> list[dict[str, Any]]:
        text = self.run.events.read_text() if self.run.events.exists() else ""
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def alerts_of(desk: Desk) -> Any:
    """`alerts_of("{to: slack}, {to: json}", "alerts: {from: login}")`: targets, and lines of the site's profile.

    name: the job's; runs: the folder of its run folder.
    """

    def make(
        targets: str = ", ".join(f"{{to: {to}}}" for to in TARGETS), site: str = "", name: str = "gpt", runs: str = "."
    ) -> Alerts:
        desk.site(f"name: told\ntitle: a site that tells\nbases: [here]\n{site}\n")
        desk.write("train.py", "print('hello')\n")
        plan = desk.plan(f"name: {name}\nsite: told\ntrain: {{script: train.py}}\nalerts: [{targets}]\n")
        run = RunFolder(desk.root / runs / f"{name}-20260101-120000-abcd")
        run.path.mkdir(parents=True)
        for name, text in alert_files(plan).items():
            (run.path / name).parent.mkdir(exist_ok=True)
            (run.path / name).write_text(text)
        return Alerts(desk, plan, run)

    return make
