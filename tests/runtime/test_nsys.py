"""What a node's agent says where Nsight Systems does not record. nsys is a stand-in: tests/cluster/test_nsys.py has the
real one.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from .harness import ROOT
from .test_rendezvous import SIGNED, agents, output, run  # noqa: F401 - fixtures

FAILS = "echo 'Illegal --trace argument' >&2; exit 1"
#: It starts its program, begins a recording, and writes no report.
SILENT = 'if [[ $1 == launch ]]; then shift; while [[ $1 == --* ]]; do shift; done; SEEN=yes exec "$@"; fi'


def start(agents: Any, folder: Path, stand_in: str, delay: float) -> tuple[int, str]:  # noqa: F811
    program = folder / "nsys"
    if stand_in:
        program.write_text(f"#!/bin/bash\n{stand_in}\n")
        program.chmod(0o755)
    (folder / "script.py").write_text("import os, time; print('SEEN', os.environ.get('SEEN')); time.sleep(1)")
    wanted = json.dumps({"command": str(program), "delay": delay, "duration": 0.1})
    more = {"SLURMDDP_NSYS": wanted, "SLURMDDP_NSYS_FOLDER": str(folder / "scratch"), "SLURMDDP_NODE": "node1"}
    return output(agents(SIGNED, 1, PYTHONPATH=str(ROOT), **more).start(0))


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("stand_in", "delay", "error", "seen"),
    [
        (FAILS, 0.1, "nsys launch failed: Illegal --trace argument", None),
        pytest.param(SILENT, 60, "the ranks ended before launch.nsys.delay was over", "yes", marks=pytest.mark.long),
        pytest.param(SILENT, 0.1, "nsys wrote no report", "yes", marks=pytest.mark.long),
    ],
    ids=["does not start", "too late", "no report"],
)
def test_ranks_run_on_where_nothing_is_recorded(
    agents: Any,  # noqa: F811
    run: Path,  # noqa: F811
    stand_in: str,
    delay: float,
    error: str,
    seen: str | None,
) -> None:
    code, text = start(agents, run, stand_in, delay)
    assert code == 0 and f"SEEN {seen}" in text, text
    assert f"slurmddp: node node1: nsys: {error}\n" in text
    (event,) = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert (event["event"], event["node"], event["files"], event["error"]) == ("nsys_recorded", "node1", [], error)


@pytest.mark.ranks(1)
def test_an_nsys_that_is_not_there_ends_the_attempt(agents: Any, run: Path) -> None:  # noqa: F811
    code, text = start(agents, run, "", 1)
    assert code == 1 and "SEEN" not in text
    assert f"slurmddp: node node1: launch.nsys: there is no {run}/nsys where the ranks run: bind the host's" in text
