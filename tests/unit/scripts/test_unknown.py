"""A value that is known only when the job runs is never the reason for an error, nor for a correction."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmddp.scripts.check.finding import check_script
from slurmddp.scripts.check.fix import fix_script
from slurmddp.scripts.check.script import parse, read
from tests.helpers import ROOT
from tests.unit.scripts import needs_namespaces

SCRIPTS = sorted((Path(__file__).parent / "fixtures/unknown").iterdir())
CASES = ROOT.parent / "shared/cases/scripts"
HEAD = """\
#!/bin/bash
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
"""
PORT = "$((10000 + SLURM_JOB_ID % 20000))"
C10D = f"--rdzv_backend=c10d --rdzv_id=$SLURM_JOB_ID --rdzv_endpoint=$MASTER_ADDR:{PORT}"
TORCHRUN = f"torchrun --nnodes=$SLURM_NNODES --nproc_per_node=4 {C10D} train.py"


def found(text: str) -> list[str]:
    return [each.rule.id for each in check_script(parse(text)) if each.severity == "error"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_that_may_work_has_no_error(path: Path) -> None:
    assert found(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_that_may_work_is_not_corrected(path: Path) -> None:
    script = read(path)
    assert fix_script(script).text == script.text


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        # The same forms, with the mistake in what is known.
        (f'L="torchrun"\nif [ "$X" ]; then L="$L --max_restarts=3"; fi\n$L --nnodes=3 {C10D} x.py', "one-node-only"),
        (f'L="srun"\nif [ "$X" ]; then L="$L --label"; fi\nsrun torchrun --nnodes=2 {C10D} x.py', "nnodes"),
        (f"main() {{\n  N=1\n  srun torchrun --nnodes=$N --nproc_per_node=4 {C10D} train.py\n}}\nmain", "nnodes"),
        (f"for lr in 1 2; do\n  N=1\n  srun torchrun --nnodes=$N --nproc_per_node=4 {C10D} train.py\ndone", "nnodes"),
        ("TRIES = 3\nsrun hostname", "blank-in-assignment"),
        (f'N=1\nif [ "$X" ]; then N=1; fi\nsrun torchrun --nnodes=$N --nproc_per_node=4 {C10D} train.py', "nnodes"),
        ("srun accelerate launch --use_deepspeed --num_machines 3 --num_processes 12 --rdzv_backend c10d "
         f"--main_process_ip $MASTER_ADDR --main_process_port {PORT} x.py", "deepspeed-per-node"),
    ],
)  # fmt: skip
@needs_namespaces
def test_what_is_known_to_be_wrong_is_an_error(text: str, rule: str) -> None:
    assert rule in found(f"{HEAD}{text}\n")


@needs_namespaces
def test_a_mistake_in_a_branch_stays() -> None:
    text = f'{HEAD}if [ "$X" ]; then\n  srun torchrun --nnodes=1 {C10D} x.py\nfi\n'
    assert found(text) == []
    result = fix_script(parse(text))
    assert result.text == text
    result = fix_script(parse(text.replace(PORT, "29511")))
    assert "29511" in result.text and result.doubt == "a launch is in a branch"


@needs_namespaces
def test_a_fixed_port_that_occurs_twice_stays() -> None:
    """A second program may meet the first one there."""
    torchrun = (
        "srun torchrun --nnodes=3 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_id=7 --rdzv_endpoint=$MASTER_ADDR:29511"
    )
    text = f"{HEAD}{torchrun} train.py\n"
    assert "29511" not in fix_script(parse(text)).text
    text = f"{HEAD}{torchrun} train.py --port 29511\n"
    assert fix_script(parse(text)).text == text


@needs_namespaces
def test_options_of_newer_slurm_are_known() -> None:
    """Those of Slurm 26.05 that 24.11 does not have, and srun's own."""
    lines = ["mem-update=20@10", "resources=flat:2", "requeue=expedite", "segment=4", "consolidate-segments",
             "spread-segments", "container-type=oci", "resv-ports", "kill-on-invalid-dep yes", "stepmgr"]  # fmt: skip
    text = "#!/bin/bash\n" + "".join(f"#SBATCH --{line}\n" for line in lines)
    srun = "srun --async --quit-on-interrupt --wait-for-children --x11 --nice -I --segment 2 -T 4 torchrun x.py\n"
    script = parse(f"{text}#SBATCH --nodes=1\n{srun}")
    assert not [each for each in check_script(script) if each.rule.id == "sbatch-option"]
    assert len(script.found.launches) == 1


@needs_namespaces
@pytest.mark.skipif(not CASES.is_dir(), reason="../shared/cases is not beside this checkout")
class TestCases:
    """The small inputs of ../shared/cases/scripts; its README has what is right for each."""

    def test_only_the_launcher_of_accelerate_is_an_error(self) -> None:
        paths = sorted(CASES.glob("*.sbatch"))
        errors = {
            path.stem: [each.rule.id for each in check_script(read(path)) if each.severity == "error"] for path in paths
        }
        assert len(paths) == 20 and {name: ids for name, ids in errors.items() if ids} == {
            "dsp": ["deepspeed-per-node"]
        }

    def test_uid_is_set_and_a_fixed_port(self) -> None:
        findings = check_script(read(CASES / "uid.sbatch"))
        assert [each.rule.id for each in findings if each.severity == "warning"] == ["fixed-port"]

    @pytest.mark.parametrize("name", ["sub3", "if1", "if2", "arr", "loop", "svc", "ray", "uid", "arith_not_a_command"])
    def test_what_is_not_known_is_not_corrected(self, name: str) -> None:
        script = read(CASES / f"{name}.sbatch")
        assert fix_script(script).text == script.text


def test_a_file_without_end_is_one_message(tmp_path: Path) -> None:
    import os

    from slurmddp.errors import UserError

    fifo = tmp_path / "pipe.sbatch"
    os.mkfifo(fifo)
    for path in (fifo, Path("/dev/zero")):
        with pytest.raises(UserError, match="not a regular file"):
            read(path)
