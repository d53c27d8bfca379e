"""A correction of a launch is made if it changes the words that it means to change, and no others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slurmddp.commands.check.script import fix_lines
from slurmddp.scripts.check import fix
from slurmddp.scripts.check.finding import RULES, Finding
from slurmddp.scripts.check.fix import CHANGES, FIXES, Draft, fix_script
from slurmddp.scripts.check.same import changed, disagreement
from slurmddp.scripts.check.script import parse
from tests.unit.scripts import needs_namespaces
from tests.unit.scripts.test_unknown import C10D, HEAD

pytestmark = needs_namespaces
ONE = "torchrun --nnodes=3 --nproc_per_node=4 x.py --a 1"
SEVERAL = "srun torchrun --nnodes=1 x.py"


@pytest.mark.parametrize(
    ("rule", "before", "after", "wrong"),
    [
        ("nnodes", SEVERAL, "srun torchrun --nnodes=3 x.py", set()),
        ("nnodes", f"{SEVERAL} | tee a", "srun torchrun --nnodes=3 x.py | tee a", set()),
        ("nnodes", SEVERAL, "srun torchrun --nnodes=3 x.py --a 1", {"argument --a", "number of arguments"}),
        ("nnodes", SEVERAL, "srun torchrun --nnodes=3 y.py", {"argument x.py", "argument y.py"}),
        ("nnodes", SEVERAL, "cd /a\nsrun torchrun --nnodes=3 x.py", {"folder"}),
        ("nnodes", SEVERAL, "srun torchrun --nnodes=3 x.py >log", {"stream 1"}),
        ("nnodes", SEVERAL, "A=1 srun torchrun --nnodes=3 x.py", {"A"}),
        ("nnodes", SEVERAL, "srun torchrun --nnodes=3 --max_restarts=2 x.py", {"--max-restarts"}),
        ("nnodes", SEVERAL, "srun torchrun --nnodes=3 --rdzv_id=7 x.py", {"--rdzv-id"}),
        ("nnodes", SEVERAL, "srun apptainer exec a.sif torchrun --nnodes=3 x.py", {"container"}),
        ("one-node-only", ONE, f"srun {ONE}", set()),
        ("one-node-only", ONE, f"srun {ONE} --b", {"argument --b", "number of arguments"}),
        ("nnodes", SEVERAL, "srun -n 6 torchrun --nnodes=3 x.py", set()),
        ("fixed-port", f"P=29500\nsrun torchrun --nnodes=3 {C10D} --master_port=$P x.py",
         f"P=$((10000 + SLURM_JOB_ID % 20000))\nsrun torchrun --nnodes=3 {C10D} --master_port=$P x.py 3",
         {"argument 3", "number of arguments"}),
    ],
)  # fmt: skip
def test_what_a_correction_changes_without_meaning_to(rule: str, before: str, after: str, wrong: set[str]) -> None:
    fix_script(parse("#!/bin/bash\n"))  # registers rules and fixes
    kind = next(each for each in RULES if each.id == rule)
    found = Finding("", 1, kind, "error", "port 29500 is the same in each job")
    assert changed(parse(f"{HEAD}{before}\n"), parse(f"{HEAD}{after}\n"), found, CHANGES[rule] or "") == wrong


def test_the_tasks_of_a_step_meet_at_one_place() -> None:
    apart = "srun bash -c 'torchrun --rdzv_endpoint=$(hostname) x.py'"
    assert disagreement(parse(f"{HEAD}{apart}\n")) == "--rdzv-endpoint"
    assert disagreement(parse(f"{HEAD}srun torchrun --rdzv_endpoint=$MASTER_ADDR x.py\n")) == ""


def replace_fix(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Let the fix of nnodes propose these instead of the line of the finding."""

    def proposed(draft: Draft, finding: Finding) -> Iterator[Draft]:
        yield from (draft.put(finding.line, line) for line in lines)

    fix_script(parse("#!/bin/bash\n"))  # registers the real fixes
    for rule in FIXES:
        monkeypatch.setitem(FIXES, rule, proposed if rule == "nnodes" else lambda *_: iter(()))


RIGHT = f"srun torchrun --nnodes=3 --nproc_per_node=4 {C10D} x.py"


def test_a_correction_that_changes_something_else_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    script = parse(f"{HEAD}{RIGHT.replace('nnodes=3', 'nnodes=1')}\n")
    replace_fix(monkeypatch, RIGHT)
    assert RIGHT in fix_script(script).text
    replace_fix(monkeypatch, f"{RIGHT} --seed 1")
    result = fix_script(script)
    assert result.text == script.text
    assert "nnodes would also change argument --seed, number of arguments" in result.doubt


def test_of_two_corrections_both_are_shown_and_none_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    script = parse(f"{HEAD}{RIGHT.replace('nnodes=3', 'nnodes=1')}\n")
    other = RIGHT.replace("--nnodes=3", "--nnodes=1:3")
    replace_fix(monkeypatch, RIGHT, RIGHT.replace("=3", "=$SLURM_NNODES"), other)
    result = fix_script(script)
    assert result.text == script.text and [each.finding.rule.id for each in result.choices] == ["nnodes"]
    assert result.choices[0].as_dict()["corrections"] == [[{"line": 9, "text": RIGHT}], [{"line": 9, "text": other}]]
    shown = "\n".join(fix_lines(script, result))
    assert "2 corrections are possible, none is made [nnodes]" in shown and f"2. line 9: {other}" in shown


def test_ranks_that_would_not_meet_are_a_reason_to_write_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    script = parse(f"{HEAD}{RIGHT.replace('nnodes=3', 'nnodes=1')}\n")
    replace_fix(monkeypatch, RIGHT)
    monkeypatch.setattr(fix, "disagreement", lambda _: "--rdzv-endpoint")
    result = fix_script(script)
    assert result.text == script.text and "the tasks of a step would differ in --rdzv-endpoint" in result.doubt
