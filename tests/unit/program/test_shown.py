"""What the reader of programs found is shown before a job: by check, and by a dry run in the same words."""

from __future__ import annotations

from collections.abc import Callable

from tests.helpers import Desk, Result

SCRIPT = "import torch\nloss.backward()\ntorch.save(model.state_dict(), 'model.pt')\n"
JOB = "name: t\nsite: here\ntrain: {script: train.py}\nresources: {ranks_per_node: 2}\n"


def test_a_dry_run_says_of_the_script_what_check_says(desk: Desk, cli: Callable[..., Result]) -> None:
    desk.write("train.py", SCRIPT)
    desk.write("job.yaml", JOB)
    check, dry = cli("check", "job.yaml"), cli("submit", "job.yaml", "--dry-run")
    said = [line for line in (check.err + check.out).splitlines() if "note: the script" in line]
    assert len(said) > 2 and said[1].startswith("train.py:3: note: the script writes this save on every rank"), check
    assert [line for line in dry.err.splitlines() if "note: the script" in line] == said, dry.err
