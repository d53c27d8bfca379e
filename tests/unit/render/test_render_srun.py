"""launch.mode srun: each rank is a task of Slurm's, and its process becomes the program without torchrun."""

import os
import subprocess
from pathlib import Path

import pytest

from slurmddp.errors import UserError
from slurmddp.render.per_node import node_commands
from slurmddp.report.plan import plan_report
from tests.helpers import LM_JOB, Desk, check_bash, make_code, plan_of, refusal

JOB = "name: own\nsite: cores\ntrain: {script: a.py, args: [--lr, '1']}\ncontainer: {runtime: none, python: python3}\n"
SRUN = ("launch.mode=srun", "resources.nodes=2", "resources.ranks_per_node=2", "resources.cpus_per_node=8")


def test_the_ranks_srun_starts_them_itself(desk: Desk) -> None:
    job, node = desk.scripts(JOB, *SRUN, "launch.mpi=pmix")
    assert " tasks_per_node=2 #" in job and " rank_options=(--cpus-per-task=4 --mpi=pmix) #" in job
    assert "step_options=(--cpus-per-task=8 --overlap)" in job, "all other steps have one task per node"
    assert "torchrun=" not in node and 'exec "${program[@]}"\n' in node
    check_bash(job, "job.sh", desk.root)
    check_bash(node, "node.sh", desk.root)
    assert "tasks_per_node" not in desk.scripts(JOB, *SRUN[1:])[0]


def test_plan_shows_the_command_and_what_this_mode_lacks(desk: Desk) -> None:
    resolved = desk.resolve(JOB, *SRUN, "launch.mpi=pmix")
    shown = plan_report(plan_of(resolved, desk.project), resolved)
    command = "srun --ntasks-per-node=2 --cpus-per-task=4 --mpi=pmix python3 code/project/a.py --lr 1\n"
    assert f"program             {command}" in shown
    assert "a rank dies         all ranks restart in the next attempt\n" in shown
    assert "launch.mode srun    no restart in place, no signed rendezvous" in shown
    resolved = desk.resolve(JOB.replace("a.py", "a.sh"), *SRUN)
    assert "--cpus-per-task=4 bash code/project/a.sh" in plan_report(plan_of(resolved, desk.project), resolved)


@pytest.mark.parametrize("mode", [(), SRUN], ids=["torchrun", "srun"])
def test_a_command_before_each_rank(desk: Desk, mode: tuple[str, ...]) -> None:
    options = ('launch.wrap=[strace, "-o", "{run}/it\'s {rank}"]', *mode)
    wrap = """-m slurmddp.runtime.wrap 3 strace -o "$run"'/it'"'"'s {rank}' -m slurmddp.runtime.begin "$run"/code"""
    node, python = desk.scripts(JOB, *options)[1], '"$python" ' if mode else ""
    assert f"program=(\n  {python}{wrap}" in node
    check_bash(node, "node.sh", desk.root)
    resolved = desk.resolve(JOB, *options)
    shown = plan_report(plan_of(resolved, desk.project), resolved)
    assert """ code/project/a.py --lr 1, each rank behind: strace -o '{run}/it'"'"'s {rank}'\n""" in shown
    if not mode:
        line = node_commands(desk.plan(JOB, *options), "n1", 29400)[-1]
        assert (
            """ -m slurmddp.runtime.wrap 3 strace -o 'RUN_FOLDER/it'"'"'s {rank}' -m slurmddp.runtime.begin """ in line
        )


@pytest.mark.parametrize(
    ("job", "options", "said"),
    [
        (LM_JOB, (), "a task needs torchrun"),
        (JOB.replace("cores", "here"), (), "site here has no Slurm"),
        (JOB, ("container.runtime=pyxis", "container.image=/a.sqsh"), "pyxis starts each container"),
        (JOB, ("resources.ranks_per_node=auto", "resources.cpus_per_node=null"), "ranks_per_node: auto"),
        (JOB, ("resources.ranks_per_node=4", "resources.cpus_per_node=2"), "4 ranks share 2"),
        (JOB, ("launch.max_restarts=3",), "are for torchrun: remove them"),
        (JOB, ("launch.rendezvous=static",), "are for torchrun: remove them"),
        (JOB, ("launch.mode=torchrun", "launch.mpi=pmix"), "needs mode srun"),
    ],
)
def test_what_slurm_cannot_start_by_itself(desk: Desk, job: str, options: tuple[str, ...], said: str) -> None:
    with pytest.raises(UserError) as caught:
        desk.plan(job, "launch.mode=srun", *options)
    assert "launch" in refusal(caught.value) and said in refusal(caught.value)


def test_there_is_no_line_per_node(desk: Desk) -> None:
    with pytest.raises(UserError, match=r"launch\.mode srun needs Slurm's srun"):
        node_commands(desk.plan(JOB, *SRUN), "head", 29400)


@pytest.mark.parametrize(
    ("more", "words"), [((), ""), (SRUN, " --ntasks=4 --ntasks-per-node=2 --cpus-per-task=4")], ids=["torchrun", "srun"]
)
def test_only_the_step_of_the_ranks_has_a_task_for_each(desk: Desk, more: tuple[str, ...], words: str) -> None:
    """Of an option that is given twice, srun takes the last one."""
    desk.program("srun", '#!/bin/bash\necho "$*" >>"$HOME/steps"\n')
    desk.program("scontrol", "#!/bin/bash\ncase $2 in hostnames) printf 'a\\nb\\n';; esac\n")
    job, _ = desk.scripts(JOB, "resources.nodes=2", "resources.cpus_per_node=8", "recovery.preflight=false", *more)
    run = desk.root / "run"
    (run / "logs").mkdir(parents=True)
    make_code(run)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "ab", "SLURMD_NODENAME": "a"}
    desk.write("job.sh", job)
    done = subprocess.run(
        ["bash", str(desk.project / "job.sh"), str(run)],
        env={**desk.environment, **slurm},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    steps = (desk.home / "steps").read_text().splitlines()
    ranks = [step for step in steps if step.endswith("/node.sh")]
    assert [f"attempt-000/%N.log --open-mode=append{words} bash -c " in step for step in ranks] == [True], ranks
    assert not any("--ntasks-per-node=2" in step for step in steps if step not in ranks)


def test_a_rank_has_the_names_of_torchrun_and_of_slurm(desk: Desk) -> None:
    """Behind a prefix, too: past --cleanenv the container has nothing else."""
    job = "name: own\nsite: gpus\ntrain: {script: a.py}\n"
    one = ("resources.nodes=1", "resources.ranks_per_node=1", f"paths.node={desk.root}/disk")
    _, script = desk.scripts(job, *SRUN[:2], *one)
    run = desk.root / "run"
    (run / "logs").mkdir(parents=True)
    make_code(run)
    desk.program(
        "apptainer", '#!/bin/bash\n[[ "$*" != *find_spec* ]] || { echo True nothing 3.11 /p; exit; }\nenv -0 >"$DUMP"\n'
    )
    ours = dict.fromkeys(("SLURMDDP_ATTEMPT", "SLURMDDP_PORT", "SLURMDDP_RENDEZVOUS_ID"), "61000")
    ours |= {"SLURMDDP_RUN": str(run), "SLURMDDP_LOGS": str(run / "logs"), "SLURMDDP_NODES": "1"}
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURMD_NODENAME": "here",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_NTASKS": "8",
    }
    ours["SLURMDDP_CHECKPOINT"] = "/out/last one.pt"  # chosen by the supervisor
    environment = {**desk.environment, **ours, **slurm, "PMIX_RANK": "5", "DUMP": str(desk.root / "dump")}
    for _ in range(2):
        done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert len((run / "logs/sessions/here").read_text().splitlines()) == 2, "the sweep knows each container of the node"
    found = dict(entry.split("=", 1) for entry in (desk.root / "dump").read_text().split("\0")[:-1])
    expected = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "61000",
                "SLURM_PROCID": "5", "SLURM_NTASKS_PER_NODE": "1", "PMIX_RANK": "5",
                "SLURMDDP_CHECKPOINT": "/out/last one.pt"}  # fmt: skip
    assert {name: found[f"APPTAINERENV_{name}"] for name in expected} == expected
    store = Path(found["APPTAINERENV_SLURMDDP_STORE"])  # in the folder that the container has, too
    assert store.is_dir() and store.parents[1].name == f"slurmddp-{os.getuid()}"
    assert store.parents[1].stat().st_mode & 0o077 == 0
