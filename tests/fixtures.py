"""What tests of the login side start with: a desk for each, the `slurmddp` command in this process, and no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers import Desk, Result


@pytest.fixture(scope="module", autouse=True)
def without_torch() -> Iterator[None]:
    """`make unit` installs no torch: a test that imports it fails here too, where torch happens to be installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)
        yield


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path / "desk")


@pytest.fixture
def cli(desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """`cli("submit", "job.yaml")`: the installed command's entry point, on the desk, without a new process."""
    from slurmddp.commands.app import main

    def run(*arguments: str, **variables: str) -> Result:
        with monkeypatch.context() as patch:
            for name in list(os.environ):
                if name not in ("PYTEST_CURRENT_TEST", "TMPDIR"):
                    patch.delenv(name)
            for name, value in {**desk.environment, **variables}.items():
                patch.setenv(name, value)
            patch.chdir(desk.project)
            patch.setattr(sys, "argv", ["slurmddp", *arguments])
            for name in ("stdout", "stderr"):  # `main` replaces them: put back what is there now
                patch.setattr(sys, name, getattr(sys, name))
            capsys.readouterr()
            try:
                main()
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else (0 if end.code is None else 1)
            shown = capsys.readouterr()
        return Result(code, shown.out, shown.err)

    return run
