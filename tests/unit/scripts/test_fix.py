"""check --script --fix: what is corrected is gone when checked again, and everything else stays byte for byte."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmddp.commands.check.script import fix_lines
from slurmddp.scripts.check import fix
from slurmddp.scripts.check.finding import Finding, check_script
from slurmddp.scripts.check.fix import FIXES, MOST, Draft, Fixed, fix_script
from slurmddp.scripts.check.script import Script, parse, read
from tests.unit.scripts import needs_namespaces

pytestmark = needs_namespaces
FIXTURES = Path(__file__).parent / "fixtures"
#: Rules whose bad script has no single right answer: the values, or the intention, are the user's.
LEFT = {
    "cpus-not-inherited", "deepspeed-per-node", "idle-gpus", "log-overwritten", "nccl-disabled", "no-cpus",
    "no-gpus", "no-requeue", "no-time", "sbatch-disabled", "sbatch-variable", "secret", "spool-path", "syntax",
    "exit-code-lost", "random-port", "option-twice", "quoted-list", "literal-tilde", "empty-option",
    "too-many-ranks", "undefined-variable",
}  # fmt: skip


def some(pattern: str, every: int) -> list[Any]:
    """Return the fixtures; bash evaluates each several times, so `make test` has only every one of so many."""
    return [
        pytest.param(path, id=f"{path.parent.name}-{path.stem}", marks=() if number % every == 0 else pytest.mark.long)
        for number, path in enumerate(sorted(FIXTURES.glob(pattern)))
    ]


def reads(text: str) -> bool:
    done = subprocess.run(["bash", "-n"], input=text.encode(errors="surrogateescape"), capture_output=True, check=False)
    return done.returncode == 0


def fixed(text: str) -> Fixed:
    return fix_script(parse(text))


def errors(script: Script) -> list[str]:
    return [each.rule.id for each in check_script(script) if each.severity == "error"]


@pytest.mark.parametrize("id", sorted(path.stem for path in (FIXTURES / "bad").iterdir()))
def test_a_bad_script_is_corrected_or_its_finding_is_left(id: str) -> None:
    script = read(FIXTURES / "bad" / f"{id}.sbatch")
    result = fix_script(script)
    if id in LEFT:
        assert (result.text, result.done) == (script.text, []) and id in {each.rule.id for each in result.left}
    else:
        assert id in FIXES and id in {each.rule.id for each in result.done}
        assert errors(parse(result.text)) == [] and id not in {each.rule.id for each in result.left}


@pytest.mark.parametrize("path", some("*/*.sbatch", 10))
def test_a_corrected_script_is_read_by_bash_and_has_no_new_error(path: Path) -> None:
    script = read(path)
    result = fix_script(script)
    assert reads(result.text) or not reads(script.text.replace("\r", ""))
    assert set(errors(parse(result.text))) <= set(errors(script))
    assert len(errors(parse(result.text))) == sum(each.severity == "error" for each in result.left)
    assert fixed(result.text).text == result.text, "a second run changes nothing"
    if path.parent.name == "good":
        assert result.text == script.text and not result.done


@pytest.mark.parametrize("path", some("fine/*.sbatch", 5))
def test_what_a_script_that_works_asks_for_stays(path: Path) -> None:
    script = read(path)
    after = parse(fix_script(script).text)
    assert after.job == script.job and len(after.found.launches) == len(script.found.launches)
    assert [line for line in script.lines if line.startswith("#SBATCH")] == [
        line for line in after.lines if line.startswith("#SBATCH")
    ]


GOOD = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.out

# caf\udce9: a byte that is no UTF-8
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
srun --ntasks-per-node=1 torchrun \\
    --nnodes=$SLURM_NNODES \\
    --nproc_per_node=4 \\
    --rdzv_id=$SLURM_JOB_ID --rdzv_backend=c10d \\
    --rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT \\
    train.py --lr 3e-4   # nothing behind this line"""
HARM = [
    ("#!/bin/bash\n", ""),
    ("--ntasks-per-node=1\n", "--ntasks-per-node=4\n"),
    ("#SBATCH --nodes=2", "#SBATCH \u2014nodes=2"),
    ("--time=04:00:00", "--time=4h"),
    ('$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)', "localhost"),
    ("$((10000 + SLURM_JOB_ID % 20000))", "29500"),
    ("export MASTER_PORT=", "MASTER_PORT = "),
    ("srun --ntasks-per-node=1 ", ""),
    ("--nnodes=$SLURM_NNODES \\", "--nnodes=1 \\  # nodes"),
    ("--nproc_per_node=4 \\", "--nproc_per_node=$SLURM_GPUS_ON_NODES \\"),
    ("$MASTER_ADDR:$MASTER_PORT \\\n", "$(hostname -I):$MASTER_PORT \\\n\n    # the program\n"),
]


def test_a_script_without_a_finding_is_not_touched() -> None:
    result = fixed(GOOD)
    assert (result.text, result.done, result.left) == (GOOD, [], [])


@settings(deadline=None, max_examples=8)  # bash evaluates each, and each step of its correction
@given(st.sets(st.sampled_from(range(len(HARM)))), st.booleans())
def test_any_faults_together_are_corrected(chosen: set[int], crlf: bool) -> None:
    text = GOOD
    for number in sorted(chosen):
        text = text.replace(*HARM[number])
    result = fixed(text.replace("\n", "\r\n") if crlf else text)
    assert errors(parse(result.text)) == [] and reads(result.text), result.text
    assert {each.rule.id for each in result.left} <= {"sbatch-disabled"}, result.text
    assert result.text.endswith("train.py --lr 3e-4   # nothing behind this line") and "caf\udce9" in result.text


HEAD = "#!/bin/bash\n#SBATCH -N 2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=4\n#SBATCH -t 9\n"
ADDRESS = 'M=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
C10D = "--rdzv_backend=c10d --rdzv_id=$SLURM_JOB_ID"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        # The launcher hides behind variables, prefixes and programs; srun comes before all of them but assignments.
        ("A=1 uv run $T $R x.py", "A=1 srun --ntasks-per-node=1 uv run torchrun"),
        ('L="$T $R"\n$L x.py', "srun --ntasks-per-node=1 $L x.py"),
        ("apptainer exec a.sif $T $R x.py", "srun --ntasks-per-node=1 apptainer"),
        # A rank per node is expanded by the task: in the string that its shell reads, or in a shell of its own.
        ('srun bash -c "$T --node_rank=$SLURM_NODEID $S x.py"',
         "--node_rank=\\$SLURM_NODEID"),
        ("srun $T \\\n  --node_rank=$SLURM_NODEID \\\n  $S x.py",
         "srun bash -c 'exec torchrun --node_rank=\"$SLURM_NODEID\" \"$@\"' bash --nnodes=2 --nproc_per_node=4 \\\n"),
        ("srun bash -c '\n  A=$(hostname -s)\n  $T --node_rank=$SLURM_NODEID --master_addr=$A --master_port=$P x.py'",
         "export MASTER_ADDR="),
        ("srun --ntasks-per-node=4 python x.py --rank $SLURM_PROCID --lr 1",
         "bash -c 'exec \"$@\" --rank \"$SLURM_PROCID\"' bash python x.py --lr 1\n"),
        # The options of srun are replaced, not repeated.
        ("srun -n 8 $T $R x.py", "srun --ntasks-per-node=1 torchrun"),
        ("srun --ntasks-per-node 4 $T $R x.py", "srun --ntasks-per-node=1 torchrun"),
        # The host changes, the port that a variable holds stays.
        ("srun $T $B --rdzv_endpoint=localhost:$P x.py", "--rdzv_endpoint=$M:$P"),
        # accelerate counts ranks over all nodes.
        ("srun accelerate launch --num_machines=1 --num_processes=4 --main_process_ip=$M --main_process_port=$P "
         "--rdzv_backend=c10d x.py", "--num_machines=$SLURM_NNODES --num_processes=$((SLURM_NNODES * 4))"),
    ],
)  # fmt: skip
def test_the_way_it_is_corrected(text: str, line: str) -> None:
    meant = {"$T": "torchrun --nnodes=2 --nproc_per_node=4", "$R": f"{C10D} --rdzv_endpoint=$M:$P", "$B": C10D}
    for short, long in (meant | {"$S ": "--master_addr=$M --master_port=$P "}).items():
        text = text.replace(short, long)
    before = f"{HEAD}{ADDRESS}P=$((10000 + SLURM_JOB_ID % 20000))\n{text}\n"
    result = fixed(before)
    assert errors(parse(before)) and not errors(parse(result.text)), result.text
    assert line in result.text and reads(result.text), result.text


def test_an_old_launcher_gets_a_port_and_no_option_that_it_lacks() -> None:
    result = fixed("#!/bin/bash\n#SBATCH -N 1\npython -m torch.distributed.launch --nproc_per_node=2 t.py\n")
    assert "torch.distributed.launch --master_port=$((10000 + SLURM_JOB_ID % 20000)) --nproc_per_node=2" in result.text


def test_sbatch_gives_no_more_nodes_than_tasks_so_the_number_of_tasks_goes() -> None:
    text = HEAD.replace("--ntasks-per-node=1", "--ntasks=1") + ADDRESS
    text += f"srun torchrun --nnodes=2 --nproc_per_node=4 {C10D} --rdzv_endpoint=$M:$SLURM_JOB_ID x.py\n"
    assert fixed(text).text == text.replace("--ntasks=1", "--ntasks-per-node=1")


def test_what_another_script_asks_for_stays_in_it() -> None:
    text = "#!/bin/bash\nset -e\ncat > a.sbatch <<'EOF'\n#!/bin/bash\n#SBATCH -N 2\nhostname\nEOF\nsbatch a.sbatch\n"
    assert fixed(text).text == text


def test_a_finding_is_reported_with_its_line_in_the_file() -> None:
    text = "\n".join(
        [*HEAD.splitlines(), "#SBATCH -c 4", "", "srun torchrun --nproc_per_node=4 x.py", "cd $(dirname $0)"]
    )
    result = fixed(text)
    assert {each.rule.id: each.line for each in result.done}["nnodes"] == 8
    assert [(each.rule.id, each.line) for each in result.left] == [("cpus-not-inherited", 8), ("spool-path", 9)]


def test_what_no_script_needs_is_left_and_not_worked_on_for_minutes() -> None:
    result = fixed("#!/bin/bash\n" + "PORT = 1\n" * (MOST + 5))
    assert (result.text.count("PORT=1\n"), result.text.count("PORT = 1\n")) == (MOST, 5)
    assert sum(each.rule.id == "blank-in-assignment" for each in result.left) == 5


def test_the_drafts_that_do_not_help_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def useless(draft: Draft, finding: Finding) -> Iterator[Draft]:
        for number in range(1000):
            tried.append(number)
            yield draft.put(1, f"#!/bin/bash -{number}")

    fixed("#!/bin/bash\n")  # registers the real fixes
    monkeypatch.setitem(FIXES, "blank-in-assignment", useless)
    monkeypatch.setattr(fix, "MOST_DRAFTS", 5)
    script = parse("#!/bin/bash\nPORT = 1\n")
    result = fix_script(script)
    assert len(tried) == 6 and result.stopped
    assert "not every fix was tried" in list(fix_lines(script, result))[-1]


def test_a_script_that_bash_cannot_parse_is_not_touched() -> None:
    port = GOOD.replace("$((10000 + SLURM_JOB_ID % 20000))", "29500").replace("--time=04:00:00", "--time=4h")
    assert {each.rule.id for each in fixed(port).done} == {"fixed-port", "sbatch-option"}
    result = fixed(f"{port}\nif true; then\n")
    assert (result.text, result.done) == (f"{port}\nif true; then\n", [])
    assert {"fixed-port", "sbatch-option", "syntax"} <= {each.rule.id for each in result.left}
    assert "no line was corrected: bash cannot read the script" in list(fix_lines(parse(port), result))[-1]


def test_a_correction_that_bash_cannot_parse_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(draft: Draft, finding: Finding) -> Iterator[Draft]:
        yield draft.put(finding.line, "if")
        yield draft.put(finding.line, "PORT=1")

    fixed("#!/bin/bash\n")  # registers the real fixes
    monkeypatch.setitem(FIXES, "blank-in-assignment", breaks)
    assert fixed("#!/bin/bash\nPORT = 1\n").text == "#!/bin/bash\nPORT=1\n"
