"""`submit --plain`: a short sbatch script with srun and torchrun, that needs nothing of ours."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmddp.render.plain import plain_script
from slurmddp.sites.catalogue import Catalogue
from tests.golden.update import ENVIRONMENT, SITES, plain
from tests.helpers import Desk, Result, check_bash

Cli = Callable[..., Result]

JOB = "name: own\nsite: gpus\nsnapshot: false\ntrain: {script: src/train.py, args: [--lr, 3e-4]}\n"
OPTIONS = ("resources.nodes=2", "resources.time=1h")


@pytest.mark.parametrize("site", SITES)
def test_on_every_site_with_slurm_it_is_short_and_has_nothing_of_ours(site: str, tmp_path: Path) -> None:
    if not Catalogue(ENVIRONMENT).load(site)[0].queues:
        return
    text = plain(site, "plain-image")
    lines = text.splitlines()
    assert len(lines) <= 40
    assert text.count("\nsrun ") == 1
    assert "torchrun --nnodes=" in text or "-m torch.distributed.run --nnodes=" in text
    code = (
        "\n".join(line for line in lines[1:] if not line.startswith("#"))
        .replace("/slurmddp/cache", "")
        .replace("/.cache/slurmddp", "")
    )
    assert "slurmddp" not in code.lower(), code
    assert not [word for word in ("--signal", "--open-mode", "--requeue ", "{run}", "Undefined", "{{") if word in text]
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    if site in ("leonardo", "clariden"):  # Singularity, and pyxis
        check_bash(text, f"{site}.sh", tmp_path)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), "apptainer exec --nv --pwd "),
        (("container.runtime=none", "setup=[conda activate gpt]"), "\nconda activate gpt || exit\nset -eu"),
        (("container.python=/opt/my env/python",), "'/opt/my env/python' -m torch.distributed.run --nnodes="),
        (("resources.ranks_per_node=auto",), "--nproc-per-node=gpu "),
        (("resources.nodes={min: 2, max: 4, spares: 1}",), "#SBATCH --nodes=2-4\n"),
        (("train.script=src/run.sh",), "--no-python bash "),
        (("network.debug=true",), "export APPTAINERENV_NCCL_DEBUG=INFO "),
        (("environment.TEXT=x{{run}}",), "APPTAINERENV_TEXT='x{run}' "),
        (("paths.cache=/scratch/cache",), " --bind /scratch/cache:/scratch/cache:rw"),
        (("paths.cache=/scratch/cache",), "\nmkdir -p /scratch/cache # for downloads\n"),
    ],
)
def test_what_the_job_asks_for_is_in_it(desk: Desk, tmp_path: Path, options: tuple[str, ...], expected: str) -> None:
    text = plain_script(desk.plan(JOB, *OPTIONS, *options), "own.sbatch")
    assert expected in text, text
    check_bash(text, "own.sbatch", tmp_path)


@pytest.fixture
def project(desk: Desk) -> Desk:
    desk.write("train.py")
    (desk.root / "venv/bin").mkdir(parents=True)
    (desk.root / "venv/bin/activate").touch()
    return desk


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--set", "launch.mode=srun"), "launch.mode srun starts ranks without torchrun"),
        (("--set", "launch.wrap=[strace]"), "launch.wrap needs the supervised job"),
        (("--workdir", "run"), "it has no run folder for {run}"),
        (("--set", "environment.OUT={run}/out"), "it has no run folder for {run}"),
        (("--site", "here"), "site here has no Slurm"),
        (("--set", "resources.ranks_per_node=auto"), "resources.ranks_per_node must be a number"),
        (("--resume", "last"), "--plain and --resume cannot be combined"),
        (("--dry-run", "--full"), "--plain and --full cannot be combined"),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_message(
    project: Desk, cli: Cli, words: tuple[str, ...], message: str
) -> None:
    site = () if "--site" in words else ("--site", "cores")
    project.program("sbatch", "#!/bin/sh\nexit 9\n")
    project.program("srun", "#!/bin/sh\nexit 9\n")
    done = cli("submit", "--plain", "train.py", *site, *words)
    assert (done.code, done.out) == (2, "") and message in done.err and "\n  ->" in done.err, done.err
    assert done.err.count("--plain cannot run") <= 1 and not list(project.project.glob("*.sbatch"))


def test_the_bundled_trainer_is_refused(desk: Desk, cli: Cli) -> None:
    desk.write("job.yaml", f"name: a\nsite: cores\ntrain: {{task: lm, data: {{path: {desk.project}}}}}\n")
    done = cli("submit", "--plain", "--dry-run", "job.yaml")
    assert (done.code, done.out) == (2, "") and "the bundled trainer (train.task) is a part of slurmddp" in done.err


def test_a_dry_run_prints_the_script_alone_and_what_it_lacks(project: Desk, cli: Cli) -> None:
    words = ("submit", "--plain", "train.py", "--site", "cores", "--venv", str(project.root / "venv"), "--dry-run")
    done = cli(*words, "--", "--lr", "3e-4")
    assert done.code == 0 and done.out.startswith("#!/bin/bash\n") and done.out.endswith("/train.py --lr 3e-4\n")
    assert f"\nsource {project.root}/venv/bin/activate || exit\n" in done.out
    for lack in ("no restart", "no requeue", "no preflight", "no alerts", "no copy of your code", "no run folder"):
        assert f"  - {lack}" in done.err
    told = json.loads(cli(*words, "--json").out)
    assert told["next"] == [f"sbatch {told['file']}"] and told["job_id"] is None and len(told["missing"]) == 8
    asked = ("--set", "train.resume_args=[--resume, '{checkpoint}']", "--set", "checkpoint.watch=[out]")
    lacks = cli(*words, *asked).err
    assert "  - no --resume {checkpoint} behind a save (train.resume_args)" in lacks and "(checkpoint.watch)" in lacks
    assert not list(project.project.glob("*.sbatch"))


def test_submit_writes_the_script_once_and_never_over_another(project: Desk, cli: Cli) -> None:
    project.program("sbatch", '#!/bin/sh\necho "$@" >>"$HOME/sbatch"; echo 41\n')
    words = ("submit", "--plain", "train.py", "--site", "cores", "--name", "own")
    done = cli(*words)
    log = project.project / "own-41.log"
    assert (done.code, done.out) == (0, f"script  own.sbatch\njob     41\nlog     {log}\n"), done.err
    assert (project.home / "sbatch").read_text() == "--parsable own.sbatch\n"
    assert json.loads(cli(*words, "--json").out)["next"][-1] == f"slurmddp doctor {log}"
    refused = cli(*words, "--nodes", "2")
    assert refused.code == 2 and "own.sbatch exists" in refused.err and "--name" in refused.err
    assert not os.path.lexists(project.home / ".local/state/slurmddp")


def test_with_a_fake_srun_the_script_says_what_it_would_start(project: Desk, cli: Cli) -> None:
    project.program("srun", '#!/bin/sh\nprintf "%s\\n" "$PWD" "$@"\n')
    project.program("scontrol", '#!/bin/sh\nprintf "n1\\nn2\\n"\n')
    script = cli("submit", "--plain", "train.py", "--site", "cores", "--nodes", "2", "--dry-run", "--", "a b").out
    slurm = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "20007"}
    done = subprocess.run(
        ["bash", "-s"], input=script, text=True, capture_output=True, check=True, env={**project.environment, **slurm}
    )
    lines = done.stdout.splitlines()
    assert lines[0] == str(project.project) and lines[-2:] == [str(project.project / "train.py"), "a b"]
    assert "--nnodes=2" in lines and "--rdzv-endpoint=n1:10007" in lines and "--rdzv-id=20007" in lines
