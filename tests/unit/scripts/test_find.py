"""What all imagined jobs agree on is known; every other word says what it depends on."""

from __future__ import annotations

import pytest

from slurmddp.scripts.check.launches import Launch
from slurmddp.scripts.check.script import parse
from slurmddp.scripts.check.values import differ, merge
from tests.unit.scripts import needs_namespaces
from tests.unit.scripts.test_unknown import HEAD


def launch(text: str) -> Launch:
    (found,) = parse(f"{HEAD}{text}\n").found.launches
    return found


def shown(value: str | None) -> str:
    return (value or "").replace("\0", "|")


@needs_namespaces
@pytest.mark.parametrize(
    ("before", "word", "value"),
    [
        # The same in each job.
        ("N=$(echo a | tr a-z A-Z)", "$N", "A"),
        ("A=(x y)", '"${A[@]: -1}"', "y"),
        # The recorder shares a shell with the script: it takes no name, and no match, from it.
        ("[[ v12 =~ v([0-9]+) ]]; V=${BASH_REMATCH[1]}", "--v=$V", "--v=12"),
        ("path=/d; D=/o; [ -d $path/t ] && D=$path/t", "--d=$D", "--d=/|varies|"),
        ("export name=a; export text=b; export other=c", "$name$text", "ab"),
        # What only a job knows, in words that stay around it.
        ("", "--a=$MASTER_ADDR:1", "--a=|head|:1"),
        ("", "$((10000 + SLURM_JOB_ID % 20000))", "|varies|"),
        ("", "run-$SLURM_JOB_ID.log", "run-|varies|.log"),
        ("", "$SLURM_JOB_NODELIST", "|nodelist|"),
        ("", "$SLURM_JOB_PARTITION", "|varies|"),
        ("", "$SLURM_CPUS_ON_NODE", "|varies|"),
        ("", "$(nproc)", "|varies|"),
        ("", "$(hostname -I)", "|head||hostname-ip|"),
        ("", '"$(dirname "$0")/x"', "|spool|/x"),
        # The shell that submits: its variables, and what follows from them.
        ("", "$DATA/x", "|?:DATA|/x"),
        ("", "${DATA:-/d}", "/d|maybe|"),
        ("", "~/x", "~/x"),
        ("", "$TMPDIR/x", "|?:TMPDIR|/x"),
        ('if [ "$DATA" ]; then A=1; else A=2; fi', "--a=$A", "--a=|?|"),
        # Slurm's variables: not set without an option, no such name, in a form that is no number.
        ("", "$SLURM_MEM_PER_GPU.", "|unset:SLURM_MEM_PER_GPU|."),
        ("", "$SLURM_NODE_COUNT.", "|nosuch:SLURM_NODE_COUNT|."),
        ("", "$SLURM_TASKS_PER_NODE", "|compressed:SLURM_TASKS_PER_NODE|"),
        # Tasks: expanded too early, in each of them, at random, and what does not reach them.
        ("", "$SLURM_NODEID", "|early:SLURM_NODEID|"),
        ("", "--rank=$((SLURM_PROCID))", "--rank=|early:SLURM_PROCID|"),
        ("", "bash -c 'exec python t.py --r=$SLURM_NODEID'", "--r=|task:SLURM_NODEID|"),
        ("", "bash -c 'exec python t.py $(hostname).x'", "|own|.x"),
        ("", "bash -c 'exec python t.py --id $RANDOM'", "|random|"),
        ("X=5", "bash -c 'exec python t.py --x=$X.'", "--x=|unexported:X|."),
    ],
)
def test_a_word_is_known_or_says_what_it_depends_on(before: str, word: str, value: str) -> None:
    program = word if word.startswith("bash") else f"python t.py {word}"
    assert shown(launch(f"{before}\nsrun {program}").program[-1]) == value


@needs_namespaces
def test_a_launch_has_its_lines_its_environment_and_its_step() -> None:
    found = launch(
        "export A=1 B=$X\nC=3\n\nsrun --label \\\n  -N 3 env D=4 \\\n  torchrun --nnodes=3 \\\n  t.py $Y a &"
    )
    assert (found.kind, found.line, found.option("nnodes"), found.unsure) == ("torchrun", 14, "3", False)
    assert found.step and (found.step.line, found.step.options) == (12, {"label": "", "nodes": "3"})
    assert found.step.command.background and found.step.resources.tasks == 3
    assert [shown(word) for word in found.program] == ["t.py", "|?:Y|", "a"]
    assert {name: shown(found.env(name)) for name in "ABD"} == {"A": "1", "B": "|?:X|", "D": "4"}
    assert "C" in found.hidden and found.env("C") is None


@needs_namespaces
def test_variables_of_the_recorder_are_not_those_of_the_script() -> None:
    names = [
        "name",
        "whole",
        "streams",
        "nodes",
        "ntasks",
        "host",
        "hosts",
        "list",
        "n",
        "count",
        "value",
        "word",
        "rest",
        "first",
        "procid",
    ]
    found = launch(f"export {' '.join(f'{name}=mine' for name in names)}\nsrun timeout 5 python t.py")
    assert {name: found.env(name) for name in names} == dict.fromkeys(names, "mine")


@needs_namespaces
@pytest.mark.parametrize(
    ("text", "unsure"),
    [("[ -f there ] && srun python t.py", True), ('[ "$X" ] && srun python t.py', True),
     ("$PRE python t.py", True), ("if [ $SLURM_NNODES = 3 ]; then srun python t.py; fi", False)],
)  # fmt: skip
def test_a_launch_is_sure_if_each_job_makes_it(text: str, unsure: bool) -> None:
    assert launch(text).unsure is unsure


@needs_namespaces
def test_passes_of_a_loop_are_one_launch() -> None:
    found = launch("for i in 0 1 2; do\n  srun -N 1 -n 1 -r $i torchrun --node_rank=$i --nnodes=3 t.py &\ndone\nwait")
    assert (shown(found.option("node-rank")), found.option("nnodes")) == ("|loop|", "3")
    assert found.step and found.step.fan_out and shown(found.step.options["relative"]) == "|loop|"


@needs_namespaces
def test_what_a_script_writes_over_its_records_is_text() -> None:
    text = "printf 'x\\0(\\0y\\0007\\0a[\\0z\\0008\\0B\\0z\\0' >/.sandbox/records/assigned; srun python t.py"
    found = parse(f"{HEAD}{text}\n").found
    assert {name for _, name in found.assigned} <= {"MASTER_ADDR", "B"} and len(found.launches) == 1


def test_where_two_texts_or_lists_differ() -> None:
    assert differ("--port=12001", "--port=12045", "?") == "--port=?"
    assert differ("a:1:c", "a:c", "?") in ("a:?c", "a?:c")
    assert merge(["a", "b", "z"], ["a", "z"], "?") == ["a", "?", "z"]
    assert merge(["a", "x=1"], ["a", "x=2"], "?") == ["a", "x=?"]
