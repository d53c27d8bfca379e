"""launch.accelerate: a config file of Accelerate reaches the nodes as it was, and one that cannot work is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.helpers import SIF, Desk, Result, check_bash

Cli = Callable[..., Result]

#: As `accelerate config` writes it, cut to what matters here.
CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true}
machine_rank: 0
mixed_precision: bf16
num_machines: 2
num_processes: 8
"""
OPTIONS = ("--site", "gpus", "--image", "image.sif", "--nodes", "2", "--set", "launch.accelerate=acc.yaml")
SUBMIT = ("submit", "train.py", *OPTIONS)


@pytest.fixture
def ready(desk: Desk) -> Desk:
    desk.write("acc.yaml", CONFIG)
    desk.write("train.py", "print('hello')\n")
    desk.write("image.sif", SIF)
    desk.program("sbatch", "#!/bin/bash\necho 4711\n")
    return desk


def submitted(cli: Cli, *command: str) -> Path:
    done = cli(*command, "--json")
    assert done.code == 0, done.err
    return Path(json.loads(done.out)["run_folder"])


def test_the_run_has_a_copy_that_its_agents_read(ready: Desk, cli: Cli) -> None:
    run = submitted(cli, *SUBMIT)
    assert (run / "accelerate.yaml").read_text() == CONFIG
    node = (run / "node.sh").read_text()
    assert '\n  "$python" -m slurmddp.runtime.agent.accelerate "$run/accelerate.yaml" "$run" # torchrun' in node
    check_bash(node, "node.sh", ready.root)
    assert yaml.safe_load((run / "job.yaml").read_text())["launch"]["accelerate"] == f"{ready.project}/acc.yaml"


def test_a_rerun_has_the_file_of_the_run_and_a_resumed_run_the_file_of_now(ready: Desk, cli: Cli) -> None:
    first = submitted(cli, *SUBMIT)
    ready.write("acc.yaml", CONFIG.replace("bf16", "fp16"))
    (first / "checkpoints/state-1").mkdir(parents=True)
    resumed = submitted(cli, "submit", "--resume", str(first), str(first / "job.yaml"))
    assert "fp16" in (resumed / "accelerate.yaml").read_text()
    for source in (first, submitted(cli, "rerun", first.name)):
        assert (submitted(cli, "rerun", source.name) / "accelerate.yaml").read_text() == CONFIG


def test_render_and_plan_have_it_too(ready: Desk, cli: Cli) -> None:
    done = cli("check", "train.py", *OPTIONS, "--write", "out")
    assert done.code == 0 and (ready.project / "out/accelerate.yaml").read_text() == CONFIG, done.err
    shown = cli("check", "train.py", *OPTIONS).out
    assert f"torchrun code/project/train.py, with the variables of {ready.project}/acc.yaml" in shown
    line = cli("check", "train.py", *OPTIONS, "--per-node", "--head", "h").out.splitlines()[-1]
    assert "-m slurmddp.runtime.agent.accelerate RUN_FOLDER/accelerate.yaml RUN_FOLDER --nnodes=2" in line
    (ready.project / "acc.yaml").unlink()
    done = cli("check", "train.py", *OPTIONS, "--write", "elsewhere")
    assert done.code == 0 and "note: no accelerate.yaml written:" in done.err


@pytest.mark.parametrize(
    ("old", "new", "ignored"),
    [
        ("num_processes: 8\n", "", ""),
        ("num_processes: 8", "num_processes: -1", ""),
        ("num_processes: 8", "num_processes: 4", "num_processes 4"),
        ("num_machines: 2", "num_machines: 1", "num_machines 1"),
        ("debug: false", "", ""),
        ("machine_rank: 0", "gpu_ids: all", ""),
        ("machine_rank: 0", "gpu_ids: '0,1'", "gpu_ids 0,1"),
    ],
)
def test_what_the_job_says_otherwise_is_a_warning(ready: Desk, cli: Cli, old: str, new: str, ignored: str) -> None:
    ready.write("acc.yaml", CONFIG.replace(old, new))
    done = cli(*SUBMIT)
    assert done.code == 0, done.err
    told = [line for line in done.err.splitlines() if "is ignored" in line]
    wanted = (
        f"warning: --set launch.accelerate: {ignored} of {ready.project}/acc.yaml is ignored: the job starts 2 x 4 "
    )
    assert [line.startswith(wanted) for line in told] == [True] * bool(ignored), done.err


FILES = [
    (None, "cannot read the config file DESK/acc.yaml: No such file or directory"),
    ("", "is not a config file of Accelerate: it has no distributed_type"),
    ("- a\n", "it has no distributed_type"),
    ("mixed_precision: bf16\n", "it has no distributed_type"),
    ("a: [\n", "it is not valid YAML in line 2"),
    ("a: \x01\n", "it is not valid YAML"),
    ("x" * 1_000_001, "it is larger than 1000 kB"),
    (CONFIG.replace("LOCAL_MACHINE", "AMAZON_SAGEMAKER"), "acc.yaml is for AMAZON_SAGEMAKER, not for a cluster"),
    (CONFIG.replace("FSDP", "XLA"), "has distributed_type XLA: slurmddp starts ranks on GPUs and CPUs, not on TPUs"),
    (CONFIG.replace("FSDP", "'NO'"), "has distributed_type NO, which is for one rank; this job starts 8"),
    (CONFIG.replace("FSDP", "NO"), "has distributed_type NO, which is for one rank; this job starts 8"),
    (CONFIG + "mpirun_config: {mpirun_hostfile: hosts}\n", "torchrun starts the ranks of this job, not mpirun"),
    (CONFIG + "deepspeed_config: {deepspeed_config_file: ds.json}\n", "deepspeed_config_file ds.json of "),
    (CONFIG + "deepspeed_config: {deepspeed_config_file: /bin/sh}\n", "the container does not see deepspeed_config_fi"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "says"), FILES)
def test_a_file_that_cannot_work_is_refused(ready: Desk, cli: Cli, text: str | None, says: str) -> None:
    (ready.project / "acc.yaml").unlink()
    if text is not None:
        ready.write("acc.yaml", text)
    before = ready.tree(times=False)
    done = cli(*SUBMIT)
    assert done.code == 2 and done.err.startswith("slurmddp: --set launch.accelerate: "), done.err
    assert says.replace("DESK", str(ready.project)) in done.err and "\n  -> " in done.err, done.err
    assert ready.tree(times=False) == before


def test_bytes_that_are_no_text_are_refused(ready: Desk, cli: Cli) -> None:
    (ready.project / "acc.yaml").write_bytes(b"a: \xff\n")
    done = cli(*SUBMIT)
    assert done.code == 2 and "acc.yaml is not a config file of Accelerate: it is not" in done.err, done.err


@pytest.mark.parametrize("config", ["mpirun_config: {}\n", "deepspeed_config: {deepspeed_config_file: ds.json}\n"])
def test_what_works_is_accepted(ready: Desk, cli: Cli, config: str) -> None:
    ready.write("ds.json", "{}")
    ready.write("acc.yaml", CONFIG + config)
    submitted(cli, *SUBMIT)


def test_one_rank_needs_no_distribution(ready: Desk, cli: Cli) -> None:
    ready.write("acc.yaml", "distributed_type: 'NO'\nmixed_precision: bf16\n")
    submitted(cli, *SUBMIT, "--nodes", "1", "--set", "resources.gpus_per_node=1")


def test_it_is_for_torchrun_and_an_own_script(ready: Desk, cli: Cli) -> None:
    done = cli(*SUBMIT, "--set", "launch.mode=srun")
    assert done.code == 2 and "has mode srun with accelerate, which torchrun's agents read" in done.err
    ready.write("job.yaml", "site: gpus\ntrain: {task: lm, data: {path: .}}\nlaunch: {accelerate: acc.yaml}\n")
    done = cli("submit", "job.yaml")
    assert done.code == 2 and "job.yaml:3: launch.accelerate is for your own script" in done.err, done.err
