"""What bash says about a script counts more than its text: launches, options, and what a correction changes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from slurmddp.scripts.check import recorded
from slurmddp.scripts.check.finding import check_script
from slurmddp.scripts.check.recorded import record, unset_names
from slurmddp.scripts.check.script import parse
from tests.unit.scripts import needs_namespaces
from tests.unit.scripts.test_unknown import C10D, HEAD

pytestmark = needs_namespaces


def errors(text: str) -> list[str]:
    return [each.rule.id for each in check_script(parse(text)) if each.severity == "error"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        # Known to bash alone.
        (f"N=$(echo 1)\nsrun torchrun --nnodes=$N --nproc_per_node=4 {C10D} x.py", ["nnodes"]),
        (f"case $SLURM_NNODES in 3) N=2 ;; esac\nsrun torchrun --nnodes=$N --nproc_per_node=4 {C10D} x.py", ["nnodes"]),
        (f"N=4; let N-=1\nsrun torchrun --nnodes=$N --nproc_per_node=4 {C10D} x.py", []),
        # Nothing starts it, in some jobs at least.
        (f"exit 0\nsrun torchrun --nnodes=1 --nproc_per_node=4 {C10D} x.py", []),
        (f"[ -f there ] || exit 1\nsrun torchrun --nnodes=1 --nproc_per_node=4 {C10D} x.py", []),
        # A script that ends at its first failure, with text that may look like redirections.
        ("set -euxo pipefail\ncat <<EOF >a.json\n{\"a\": [1 > 2 < 3]}\nEOF\n"
         f"srun torchrun --nnodes=1 --nproc_per_node=4 {C10D} x.py", ["nnodes"]),
        # What the shell that submits it may set is no reason for an error.
        (f"srun torchrun --nnodes=${{N:-1}} --nproc_per_node=4 {C10D} x.py", []),
        (f"srun torchrun $OPTIONS --nproc_per_node=4 {C10D} x.py", []),
    ],
)  # fmt: skip
def test_bash_knows_more_than_the_text(text: str, found: list[str]) -> None:
    assert errors(f"{HEAD}{text}\n") == found


def test_files_beside_the_script_are_read_but_nothing_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("export A=secret\n")
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / ".env").write_text("N=1\n")
    (folder / "link.sh").symlink_to(tmp_path / "secret")
    text = f"{HEAD}source .env\nsource link.sh\nsrun torchrun --nnodes=$N --nproc_per_node=4 {C10D} x.py $A\n"
    script = parse(text, folder / "a.sbatch")
    runs = record(script) or ()
    assert runs and all("--nnodes=1" in each.words for run in runs for each in run.started if each.name == "torchrun")
    assert "secret" not in str([each.words for run in runs for each in run.started if each.name == "torchrun"])


def test_variables_of_the_shell_that_submits() -> None:
    text = "A=1\nfor i in 1; do read -r B <<<x; done\necho $A $i $B $C ${D:-2} $SLURM_JOB_ID $HOME # $E\n"
    assert unset_names(text) >= {"C", "D"} and not unset_names(text) & {"A", "i", "B", "SLURM_JOB_ID", "HOME"}


@pytest.mark.parametrize(
    "line",
    [
        "SANDBOX_LINE=x srun python train.py",
        "srun env SLURM_NTASKS=x SLURM_STEP_NUM_NODES=y python train.py",
        "SANDBOX_TASK=1 srun python train.py; SANDBOX_TASK=a:b:c python train.py",
        "printf '1\\0x' >/.sandbox/records/\u00b2; printf '%5000d' 1 >/.sandbox/records/7; srun python train.py",
    ],
)
def test_what_a_script_records_may_be_anything(line: str) -> None:
    runs = record(parse(HEAD + line + "\n", Path("a.sbatch")))
    assert runs and all(any(each.name == "srun" for each in run.started) for run in runs)


@pytest.mark.parametrize(
    "text",
    ["\n" * 200_000, "   #" * 50_000, "a[" * 100_000, "printf 'line 1: a%.0s' {1..60000} >&2\n"],
    ids=["lines", "comments", "brackets", "errors"],
)
def test_a_script_that_would_take_long_to_search(text: str) -> None:
    began = time.process_time()
    script = parse(HEAD + text, Path("a.sbatch"))
    unset_names(script.text)
    recorded.beside(script)
    record(script)
    assert time.process_time() - began < 20


def test_hidden_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/config").write_text("token\n")
    (tmp_path / "env.sh").write_text("A=1\n")
    script = parse(f"{HEAD}source .git/config\nsource ./env.sh\n", tmp_path / "a.sbatch")
    assert recorded.beside(script) == {"env.sh": "A=1\n"}
