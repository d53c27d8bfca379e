"""What the reader of programs found is shown before a job: by check, and by a dry run in the same words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmddp.program.facts import UNKNOWN as CANNOT_TELL
from slurmddp.program.facts import Fact, Facts, Place, corrected
from slurmddp.program.read import read_program
from slurmddp.program.sentences import sentences
from slurmddp.records.events import Event
from slurmddp.records.rank_events import CheckpointSaved, NoProcessGroup, ProcessGroupMade, Restarted
from slurmddp.run import index
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


#: Loads nothing, as its text says, and saves nothing.
SILENT = "import helper\nloss.backward()\noptimizer.step()\n"
ON, ANEW = (Restarted(how, step, 50, 50, None, "") for how, step in (("went on", 51), ("from zero", 1)))
UNKNOWN = Restarted("unknown", None, 50, 50, None, "")
NONE = NoProcessGroup(2, "")


@pytest.mark.parametrize(
    ("script", "events", "seen"),
    [
        (SCRIPT, [ON], {"loads": "yes"}),
        (SCRIPT, [ANEW, ON], {"loads": "yes"}),
        (SCRIPT, [ANEW], {}),  # which the text says, too
        (SCRIPT, [UNKNOWN], {}),
        (SCRIPT + "model.load_state_dict(torch.load('model.pt'))\n", [ANEW], {"loads": "no"}),
        ("import torch.distributed as dist\ndist.init_process_group()\n" + SCRIPT, [NONE], {"process_group": "no"}),
        ("import torch.distributed as dist\ndist.init_process_group()\n" + SCRIPT, [NONE, ProcessGroupMade()], {}),
        (SILENT, [CheckpointSaved(5, 1.0, 0.0, 1, "c")], {"saves": "yes"}),
    ],
)
def test_what_a_run_of_the_script_showed_corrects_its_text(
    desk: Desk, cli: Callable[..., Result], tmp_path: Path, script: str, events: list[Any], seen: dict[str, str]
) -> None:
    desk.write("train.py", script)
    desk.write("job.yaml", JOB)
    before = facts_of(cli)
    run = tmp_path / "runs/r1"
    (run / "code/project").mkdir(parents=True)
    (run / "code/project/train.py").write_text(script)
    desk.write(str(run / "manifest.json"), "{}")
    desk.write(str(run / "events.jsonl"), "".join(json.dumps(Event(each, 5.0, 0).write()) + "\n" for each in events))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(desk.home / ".local/state"))
        assert index.record(index.Entry("r1", str(run), "2026-01-02T03:04:05Z", "t", "here")) is None
    after = facts_of(cli)
    assert {name: fact["answer"] for name, fact in after.items() if fact["seen"]} == seen
    assert all(fact["seen"] == "r1" for name, fact in after.items() if name in seen)
    assert all(fact == before[name] for name, fact in after.items() if name not in seen)
    (run / "code/project/train.py").write_text(script + "#\n")
    assert facts_of(cli) == before, "another script"


def facts_of(cli: Callable[..., Result]) -> dict[str, Any]:
    done = cli("check", "job.yaml", "--json")
    facts: dict[str, Any] = json.loads(done.out)["script"]["facts"]
    return facts


def test_what_a_run_showed_is_not_said_to_depend_on_an_argument(desk: Desk) -> None:
    """A script whose text leaves open whether it loads a save went on: on what that depends is no argument."""
    read = read_program(str(desk.write("train.py", SCRIPT)), [])
    open_ = Fact("loads", CANNOT_TELL, (Place("train.py", 1, "import torch"),), "the library")
    known = tuple(open_ if each.name == "loads" else each for each in read.facts)
    facts = corrected(Facts(read.script, read.files, known, (), ()), {"loads": True}, "r1")
    assert facts["loads"].seen == "r1" and not [each for each in sentences(facts, 2) if "only with" in each.text]
