"""A test that passes only at its second try is named and counted, and more than two fail the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers import ROOT

FLAKY = """
import pathlib, pytest
@pytest.mark.parametrize("number", range({count}))
def test_flaky(number):
    seen = pathlib.Path(__file__).with_name(f"seen-{{number}}")
    if not seen.exists():
        seen.touch()
        raise AssertionError("only the first time")
"""


def run(folder: Path, count: int, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    (folder / "test_flaky.py").write_text(FLAKY.format(count=count))
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.reruns", "--reruns", "1", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [*command, *options, str(folder)], env=environment, capture_output=True, text=True, check=False
    )


def test_more_than_two_in_all_parts_of_a_run_fail_it(tmp_path: Path) -> None:
    counted = {"SLURMDDP_RERUNS": str(tmp_path / "build" / "reruns")}
    two = run(tmp_path / "two", 2, "-n", "1", **counted)
    assert two.returncode == 0, two.stdout
    assert "reruns: 2 in this run of `make test`, until now (2 allowed)" in two.stdout
    assert "RERUN test_flaky.py::test_flaky[1]" in two.stdout
    third = run(tmp_path / "third", 1, **counted)
    assert third.returncode == 1, third.stdout
    assert "1 passed" in third.stdout and "Find the cause of each" in third.stdout
