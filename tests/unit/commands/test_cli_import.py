"""slurmddp import: the job file of a batch script renders the same job, and says what it leaves out."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.helpers import ROOT, Desk, Result
from tests.unit.scripts import needs_namespaces

pytestmark = needs_namespaces
Cli = Callable[..., Result]
FIXTURES = ROOT / "tests/unit/scripts/fixtures"

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name="books run"
#SBATCH -A proj_12 -p large
#SBATCH -N 2
#SBATCH --ntasks-per-node=2 --cpus-per-task=16
#SBATCH --gres=gpu:a100:8
#SBATCH --mem-per-cpu=4G
#SBATCH --time=1-12
#SBATCH --signal=B:USR1@300
#SBATCH --reservation=friday
#SBATCH --array=0-3
#SBATCH --output=logs/%j.out
#SBATCH --constraint "big disk"

module purge
module load cuda/12.4
source envs/torch/bin/activate
export HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz0123456789
export TOKENIZERS_PARALLELISM=false
export HF_HOME=$SCRATCH/hf
export NCCL_IB_HCA=mlx5_0
export NCCL_NET_GDR_LEVEL=PHB
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=8
DATA=/data/books
cp -r $DATA /tmp/books
echo "starting on $SLURM_NNODES nodes"

srun --ntasks-per-node=1 --cpu-bind=none torchrun --nnodes=$SLURM_NNODES --nproc_per_node=4 --max_restarts=3 \\
    --rdzv_backend=c10d --rdzv_id=$SLURM_JOB_ID --rdzv_endpoint=$MASTER_ADDR:29511 \\
    code/train.py --data $DATA --lr=3e-4 --run "$SLURM_JOB_ID" --hub-token hf_secretsecretsecret --note "two words"
"""
KEYS = {
    "name": "books-run",
    "site": "fast",
    "resources": {
        "nodes": 2,
        "gpus_per_node": 8,
        "ranks_per_node": 4,
        "gpu_type": "a100",
        "cpus_per_node": 32,
        "mem_per_node": "128G",
        "time": "1-12:00:00",
        "account": "proj_12",
        "partition": "large",
        "sbatch_extra": ["--reservation=friday"],
    },
    "container": {"runtime": "none"},
    "environment": {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "8"},
    "environment_from": ["HUB_TOKEN", "HF_TOKEN"],
    "setup": [
        "module purge",
        "module load cuda/12.4",
        "source $SLURM_SUBMIT_DIR/envs/torch/bin/activate",
    ],
    "network": {"variables": {"NCCL_NET_GDR_LEVEL": "PHB"}},
    "launch": {"max_restarts": 3},
    "timeouts": {"stop": "300s"},
    "train": {
        "script": "code/train.py",
        "args": ["--data", "/data/books", "--lr=3e-4", "--note", "two words"],
    },
}
LEFT = """\
#   line 9: --signal=B:USR1@300  ->  imported as timeouts.stop; job.sh sends its own signal (docs/recovery.md)
#   line 11: --array=0-3  ->  submit once per task, for example in a loop: slurmddp submit job.yaml --name NAME -- ARGS
#   line 12: --output=logs/%j.out  ->  logs are in the run folder: slurmddp logs
#   line 13: --constraint=big disk  ->  not an option of sbatch, or not a value that it accepts
#   line 18: HF_TOKEN=[redacted]  ->  a secret: revoke it, and export HF_TOKEN in your shell before you submit
#   line 20: HF_HOME=...  ->  known only when the job runs: set it in environment
#   line 21: NCCL_IB_HCA=mlx5_0  ->  the site's profile sets NCCL_IB_HCA: mlx5
#   line 23: MASTER_ADDR  ->  slurmddp has its own way for ranks to meet
#   line 26: cp -r /data/books /tmp/books  ->  the script also starts this
#   line 29: argument --hub-token [redacted]  ->  a secret: let the script read HUB_TOKEN from its environment
#   line 29: argument --run "$SLURM_JOB_ID"  ->  known only when the job runs
"""
FAST = """\
name: fast
title: a cluster with a fast network
gpu_request: gres
gpu_request_type: true
partitions: {large: {gpus_per_node: 8, cpus_per_node: 128, max_time: 48h}}
job:
  network: {interface: ib, variables: {NCCL_IB_HCA: mlx5}}
"""


def test_a_script_becomes_the_job_file_that_asks_for_the_same(cli: Cli, desk: Desk) -> None:
    desk.site(FAST)
    desk.write("train.sbatch", SCRIPT)
    desk.write("code/train.py")
    shown = cli("import", "train.sbatch", "-o", "books.yaml", "--site", "fast")
    assert (shown.code, shown.out) == (1, "books.yaml\n"), shown.err
    assert "not imported: line 26: cp -r /data/books /tmp/books -> the script also starts this" in shown.err
    assert "not imported: line 9" not in shown.err and "not imported: line 23" not in shown.err  # slurmddp's own way
    assert "skipped 11 lines or options are not imported" in shown.err
    text = (desk.project / "books.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(text) == KEYS
    comments = text.splitlines(keepends=True)
    assert comments[0].startswith("# Made by `slurmddp import train.sbatch`.")
    assert comments[1].startswith("# yaml-language-server: $schema=")
    assert comments[2].startswith(
        "# What slurmddp adds to the script: requeue (recovery.requeue), a stop before the time"
    )
    assert text.split("# Not imported:\n")[1].startswith(LEFT), text
    assert "hf_" not in text
    job, node = desk.scripts(text)
    for line in ("--job-name=books-run", "--nodes=2", "--cpus-per-task=32", "--gres=gpu:a100:8", "--mem=131072M",
                 "--time=1-12:00:00", "--partition=large", "--account=proj_12", "--reservation=friday"):  # fmt: skip
        assert f"#SBATCH {line}\n" in job, job
    assert "module load cuda/12.4" in node and "two words" in node
    refused = cli("import", "train.sbatch", "-o", "books.yaml", "--site", "fast")
    assert refused.code == 2 and "books.yaml exists" in refused.err


def imported(cli: Cli, desk: Desk, text: str, *options: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """(keys, comments) of a script's job file; on a site of GPUs with a container by default."""
    desk.write("a.sbatch", f"#!/bin/bash\n{text}")
    shown = cli("import", "a.sbatch", "--site", "gpus", *options)
    assert shown.code == code, shown.err
    assert ("not imported: line" in shown.err) == bool(code), shown.err
    comments = "".join(line for line in shown.out.splitlines(keepends=True) if line.startswith("#"))
    return yaml.safe_load(shown.out), comments


HEAD = "#SBATCH -N 2\n#SBATCH --gpus-per-node=4\n#SBATCH --ntasks-per-node=4\n#SBATCH -t 30\n"


@pytest.mark.parametrize(
    ("line", "keys"),
    [
        ("srun python -u train.py --a 1", {"train": {"script": "train.py", "args": ["--a", "1"]}}),
        ("srun -N 2 --ntasks-per-node=2 python train.py", {"resources.ranks_per_node": 2}),
        ("A=(--x 1)\nsrun --ntasks-per-node=1 /env/bin/torchrun --nproc_per_node=gpu train.py ${A[@]}",
         {"train": {"script": "train.py", "args": ["--x", "1"]}, "container.python": "/env/bin/python3"}),
        ("srun --ntasks-per-node=1 accelerate launch --num_machines 2 --num_processes 4 --mixed_precision bf16 t.py",
         {"environment": {"ACCELERATE_MIXED_PRECISION": "bf16"}, "resources.ranks_per_node": 2}),
        ("srun --ntasks-per-node=1 accelerate launch --config_file a.yaml t.py", {"launch": {"accelerate": "a.yaml"}}),
        ("srun apptainer exec --nv --cleanenv --workdir /t -B /a:/b:ro,$SCRATCH --pwd /w $IMAGES/t.sif python /w/t.py",
         {"container": {"runtime": "apptainer", "image": "${IMAGES}/t.sif", "binds": ["/a:/b:ro", "${SCRATCH}"],
                        "options": ["--cleanenv", "--workdir=/t"]}, "train": {"script": "/w/t.py", "workdir": "/w"}}),
        ("srun singularity exec --rocm t.sif bash -c 'export X=1; python t.py'",
         {"container": {"runtime": "singularity", "image": "t.sif"}, "environment": {"X": "1"}}),
        ("srun --container-image=/i/t.sqsh --container-mounts=/a:/b --container-workdir=/w -n 2 torchrun /t.py",
         {"container": {"runtime": "pyxis", "image": "/i/t.sqsh", "binds": ["/a:/b"]}, "train.workdir": "/w"}),
        ("srun --ntasks-per-node=1 uv run torchrun --nproc_per_node=4 t.py",
         {"setup": ["source $SLURM_SUBMIT_DIR/.venv/bin/activate"], "container": {"runtime": "none"}}),
        ("srun python -m pkg.train", {"train.module": "pkg.train", "launch.mode": "srun"}),
        ("srun python t.py --seeds {1..3}", {"train.args": ["--seeds", "1", "2", "3"]}),
        ("srun --mpi=pmix python t.py", {"launch": {"mode": "srun", "mpi": "pmix"}}),
        ("srun --export=ALL,A=1,B=2 env C=3 python t.py", {"environment": {"A": "1", "B": "2", "C": "3"}}),
        ("srun ./venv/bin/python t.py", {"container.python": "./venv/bin/python"}),
        ("srun python3.11 t.py", {"container.python": "python3.11"}),
        ("cd /p\ncd q || exit 1\nmkdir -p out\nsource env.sh\nsrun ./v/bin/python t.py --data d\ncd /tmp",
         {"train": {"script": "/p/q/t.py", "args": ["--data", "d"], "workdir": "/p/q"},
          "container.python": "./v/bin/python", "setup": ["mkdir -p /p/q/out", "source /p/q/env.sh"]}),
        ("cd $SCRATCH/x\nsrun apptainer exec -B d:/d i.sif python -m pkg.t",
         {"train": {"module": "pkg.t", "project": "${SCRATCH}/x", "workdir": "${SCRATCH}/x"},
          "container": {"runtime": "apptainer", "image": "${SCRATCH}/x/i.sif", "binds": ["${SCRATCH}/x/d:/d"]}}),
        ("cd ~/p\ncd $SLURM_SUBMIT_DIR\nsrun python t.py", {"train": {"script": "t.py"}}),
        ("cd src && srun python t.py --data d",
         {"train": {"script": "src/t.py", "args": ["--data", "d"], "workdir": "src"}}),
        ("cd src/a\ncd ../b\nmkdir -p out\nsource env.sh\nsrun ./v/bin/python t.py",
         {"train": {"script": "src/b/t.py", "workdir": "src/b"}, "container.python": "./v/bin/python",
          "setup": ["mkdir -p $SLURM_SUBMIT_DIR/src/b/out", "source $SLURM_SUBMIT_DIR/src/b/env.sh"]}),
        ("cd $SLURM_SUBMIT_DIR/run\nsrun apptainer exec -B d:/d i.sif python -m pkg.t",
         {"train": {"module": "pkg.t", "project": "run", "workdir": "./run"},
          "container": {"runtime": "apptainer", "image": "run/i.sif", "binds": ["run/d:/d"]}}),
        ("cd src\ncd ..\nsrun python t.py", {"train": {"script": "t.py"}}),
        ("cd /p\nsrun python $SLURM_SUBMIT_DIR/t.py", {"train": {"script": "t.py", "workdir": "/p"}}),
        ("cd src\nsrun python $PWD/t.py", {"train": {"script": "src/t.py", "workdir": "src"}}),
        ("cd ../p\nsrun python t.py", {"train": {"script": "../p/t.py", "workdir": "../p"}}),
        ("srun apptainer exec ~/t.sif /opt/bin/python t.py",
         {"container": {"runtime": "apptainer", "image": "~/t.sif", "python": "/opt/bin/python"}}),
        ("srun --ntasks-per-node=1 torchrun --max_restarts 0 t.py", {"launch.max_restarts": 0}),
        ("set -a\nsource .env\nFOO=3\nset +a\nsrun python t.py",
         {"setup": ["set -a", "source $SLURM_SUBMIT_DIR/.env", "set +a"], "environment": {"FOO": "3"}}),
        ("mkdir -p logs /scratch/x\nsrun python t.py",
         {"setup": ["mkdir -p $SLURM_SUBMIT_DIR/logs /scratch/x"]}),
        ("export NCCL_DEBUG=INFO\nsrun python t.py", {"network.variables": {"NCCL_DEBUG": "INFO"}}),
        ("export OMP_NUM_THREADS=$SLURM_NTASKS_PER_NODE\nsrun python t.py", {"environment": {"OMP_NUM_THREADS": "4"}}),
        ("srun hostname\npython -c 'import torch; print(torch.__version__)'\nnvidia-smi -l &\nsrun python t.py",
         {"train": {"script": "t.py"}}),
        ('for n in $(scontrol show hostnames); do\n  srun -N 1 -n 1 -w $n torchrun --nnodes=2 t.py &\ndone\nwait',
         {"train": {"script": "t.py"}, "resources.ranks_per_node": 1}),
        ("B=$SCRATCH/x\nA=/a\nexport C=$B/c D=$A/1\nconda activate env\nsrun python t.py",
         {"setup": ["B=$SCRATCH/x", "export C=$B/c", 'source "$(conda info --base)/etc/profile.d/conda.sh"',
                    "conda activate env"], "environment": {"D": "/a/1"}}),
        ("export NCCL_SOCKET_IFNAME=ib0\nsrun python t.py ~/out $HOME/x",
         {"network": {"interface": "ib0"}, "train.args": ["HOME/out", "HOME/x"]}),
    ],
)  # fmt: skip
def test_each_way_to_launch(cli: Cli, desk: Desk, line: str, keys: dict[str, Any]) -> None:
    found, _ = imported(cli, desk, HEAD + line + "\n")
    for dotted, expected in keys.items():
        value: Any = found
        for part in dotted.split("."):
            value = value[part]
        if isinstance(expected, list):
            expected = [each.replace("HOME/", f"{desk.home}/") if "$" not in each else each for each in expected]
        assert value == expected, found
    assert found["resources"]["nodes"] == 2 and found["resources"]["time"] == "00:30:00"


@pytest.mark.parametrize(
    ("option", "keys", "left"),
    [
        ("--time=90:30", {"time": "01:30:30"}, ""),
        ("--nodes=2-4", {"nodes": "2-4"}, ""),
        ("--exclusive", {"exclusive": True}, ""),
        ("--mem=0", {"sbatch_extra": ["--mem=0"]}, ""),
        ("--mem=400000", {"mem_per_node": "400000M"}, ""),
        ("--mem-per-gpu=10G", {"mem_per_node": "40G"}, ""),
        ("--gpus-per-node=h100:4", {"gpu_type": "h100"}, ""),
        ("--chdir=/w", {}, ""),
        ("--chdir=sub", {}, ""),
        ("--mail-user=a@b.org", {"sbatch_extra": ["--mail-user=a@b.org"]}, ""),
        ("--time=4h", {"time": "04:00:00"}, ""),
        ("--kill-on-bad-exit=1", {}, "--kill-on-bad-exit=1  ->  not an option of sbatch"),
        ("--open-mode=append", {}, "--open-mode=append  ->  logs are never overwritten"),
        ("--container-image=x.sqsh", {}, "--container-image=x.sqsh  ->  set container.image"),
        ("--export=NONE", {}, "--export=NONE  ->  the job starts with a clean environment"),
    ],
)
def test_each_option(cli: Cli, desk: Desk, option: str, keys: dict[str, Any], left: str) -> None:
    gpus = "" if "gpus-per-node" in option else "--gpus-per-node=4"
    code = int("not an option" in left or "container" in option)
    found, comments = imported(cli, desk, f"#SBATCH {gpus}\n#SBATCH {option}\nsrun python t.py\n", code=code)
    assert keys.items() <= found["resources"].items(), found
    assert (f"line 3: {left}" in comments) if left else ("line 3" not in comments), comments


def test_no_secret_is_copied(cli: Cli, desk: Desk) -> None:
    desk.environment["HF_TOKEN"] = "live-1234567"
    lines = 'export WANDB_API_KEY="live-7654321"\nwandb login 0123456789012345678901234567890123456789\n'
    words = "--hub $HF_TOKEN --token live-abc=defghij --api-key=live-000 --use-token --lr 1"
    found, comments = imported(cli, desk, f"{HEAD}{lines}srun python t.py {words}\n", code=1)
    assert found["train"]["args"] == ["--use-token", "--lr", "1"]
    assert found["environment_from"] == ["TOKEN", "API_KEY", "WANDB_API_KEY"]
    assert "live" not in comments + str(found) and "0123456789" not in comments


def test_a_foreign_script_learns_only_folders_of_your_shell(cli: Cli, desk: Desk) -> None:
    desk.environment |= {"DATABASE_URL": "live://a", "GH_PAT": "live-2", "SCRATCH": "/scratch/u", "DATA_DIR": "/d"}
    words = "--db $DATABASE_URL --pat=$GH_PAT --out $SCRATCH/x --data $DATA_DIR"
    found, comments = imported(cli, desk, f"{HEAD}srun python t.py {words}\n", code=1)
    assert found["train"]["args"] == ["--out", "/scratch/u/x", "--data", "/d"]
    assert "live" not in comments and "a variable of your shell" in comments


def test_no_secret_is_copied_under_another_name_or_key(cli: Cli, desk: Desk) -> None:
    token, key = "hf_" + "a1" * 20, "0123456789" * 4
    text = (
        f"export MODEL_NOTE={token}\nSERVICE_TOKEN=live-1234567\nsource env.sh $SERVICE_TOKEN\n"
        f"wandb login --relogin {key}\nif true; then export MY_PASSWORD='live two'; fi\n"
        f"srun apptainer exec --env=WANDB_API_KEY=live-7654321 --pwd /w t.sif python t.py --hub {token} --lr 1\n"
    )
    found, comments = imported(cli, desk, HEAD + text, code=1)
    for secret in ("live", "a1a1", "01234567"):
        assert secret not in comments + str(found), comments
    assert found["train"]["args"] == ["--lr", "1"] and found["train"]["workdir"] == "/w"
    assert "environment" not in found and found["environment_from"] == ["MY_PASSWORD", "WANDB_API_KEY"]
    assert "line 6: environment.MODEL_NOTE: ...  ->  a secret" in comments
    assert "source env.sh [redacted]  ->  the script also" in comments


def test_what_a_task_cannot_be_is_said(cli: Cli, desk: Desk) -> None:
    found, comments = imported(
        cli, desk, HEAD + "trap 'scontrol requeue $SLURM_JOB_ID' USR1\nif [ -n \"$X\" ]; then module load a; fi\n"
        'python prepare.py\nsrun python train.py "$@" --rank $SLURM_PROCID\n', code=1
    )  # fmt: skip
    for text in ("line 6: trap", "line 7: module load a  ->  in a branch", "line 8: python prepare.py  ->  the script",
                 'line 9: argument "$@"  ->  from sbatch'):  # fmt: skip
        assert text in comments, comments
    assert found["train"] == {"script": "train.py", "args": ["--rank", "0"]}  # which the batch shell makes of it


@pytest.mark.parametrize(
    ("text", "missing"),
    [("hostname\n", "no launch of torchrun, accelerate, deepspeed or python was found"),
     ("srun ./a.sh\n", "The last program that the script starts: ./a.sh"),
     ("bash /a/b.sh\n", "The last program that the script starts: bash /a/b.sh"),
     ("torchrun $PROGRAM\n", "train"), ("srun my_program\n", "no launch"),
     ("exit 0\nsrun torchrun t.py\n", "no launch"),
     ("f() { srun torchrun t.py; }\n", "no launch")],
)  # fmt: skip
def test_a_job_file_that_is_not_complete_exits_with_1(cli: Cli, desk: Desk, text: str, missing: str) -> None:
    desk.write("a.sbatch", f"#!/bin/bash\n{HEAD}{text}")
    shown = cli("import", "a.sbatch", "--site", "gpus")
    assert shown.code == 1 and re.search(f"missing .*{missing}", shown.err), shown.err
    assert yaml.safe_load(shown.out)["resources"]["nodes"] == 2
    assert cli("import", "nothing.sbatch", "--site", "gpus").code == 2


@pytest.mark.long
def test_a_launch_that_can_be_read_renders(cli: Cli, desk: Desk) -> None:
    """The fixtures of the rules, which are written like real scripts: those that work."""
    refused = {}
    paths = sorted((FIXTURES / "fine").iterdir())
    for path in paths:
        shown = cli("import", str(path), "--site", "generic")
        if shown.code == 0:
            desk.scripts(shown.out)
        else:
            refused[path.stem] = re.findall(r"^(?:missing|not imported:|slurmddp:) (.*)", shown.err, re.MULTILINE)
    assert set(refused) == {
        "aliases-and-plugins", "array", "array-args", "bigscience", "branch", "container", "deepspeed-hostfile",
        "env-cmd",
        "farm-loop", "farm-standalone", "farm-tasks", "heredoc", "localid-guard", "mpi", "multiprog-bg",
        "rank-lightning-env", "ray", "salloc-no-directives", "ssh-loop", "template", "torchrun-envscript",
        "worker-file", "wrapper-srun-var",
    }, refused  # fmt: skip


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("srun torchrun $LAUNCH train.py", "$LAUNCH  ->  options of torchrun that are known only when the job runs"),
        ("srun torchrun --max_restarts=$R train.py", "--max-restarts=...  ->  option of torchrun"),
        ("accelerate launch --mixed_precision=$P train.py", "--mixed-precision=...  ->  option of accelerate"),
        (
            "accelerate launch --mixed_precision=bf16 --config_file=a.yaml train.py",
            "--mixed-precision=bf16  ->  set mi",
        ),
        ("accelerate launch --config_file=$SLURM_TMPDIR/a.yaml train.py", "--config-file=.../a.yaml  ->  option of"),
        ("srun --export=ALL,A=$A torchrun train.py", "A=...  ->  known only when the job runs"),
        ("srun numactl --membind=0 python -X dev train.py", "-X dev  ->  option of python"),
        ("srun numactl --membind=0 python train.py", "numactl --membind=0  ->  in front of the launch"),
        ("#SBATCH --gpu-bind=closest\nsrun --gpu-bind=none python t.py", "--gpus-per-task, --gpu-bind  ->  each rank"),
        ("srun --gpu-bind=closest shifter python t.py", "shifter  ->  in front of the launch"),
        ("srun shifter -V /a:/b --image=x python t.py", "shifter -V /a:/b --image=x  ->  in front of the launch"),
        ("srun nsys profile -o /x/r -t none python t.py", "nsys profile -o /x/r -t none  ->  in front of"),
        ("bash /a/b.sh; srun torchrun t.py", "bash /a/b.sh"),
        (
            'L="python -m torch.distributed.launch"\nsrun bash -c "$L t.py"',
            "python  ->  gives the program --local_rank",
        ),
        ('srun torchrun --rdzv_id=$SLURM_JOB_ID t.py "$1" "${@:2}"', "arguments: $1 $2  ->  the job file has: "),
        ("srun deepspeed t.py", "deepspeed  ->  gives the program --local_rank"),
        ("timeout 50m srun torchrun t.py", "timeout 50m srun  ->  in front of the launch"),
        ("srun torchrun t.py > out.txt", "standard output: "),
        ("srun torchrun t.py < in.txt", "standard input: "),
        ("srun torchrun t.py 2>&1 | tee log", "standard output: a pipe"),
        ("srun -N 1 torchrun t.py", "nodes: 1  ->  the job file has: 2"),
        ("srun torchrun t.py", "ranks per node: 1 in each of 4 launchers  ->  the job"),
        ("srun python t.py data/*.bin", "argument data/*.bin  ->  bash replaces it"),
        ("srun apptainer run i.sif python t.py", "apptainer run  ->  starts the image's own script"),
        (
            'srun apptainer exec i.sif bash -c "source /v/bin/activate; python t.py"',
            "source /v/bin/activate  ->  the script also starts this",
        ),
        ("srun --gres=gpu:2 python t.py", "srun --gres=gpu:2 python t.py  ->  the step has other GPUs"),
        ("srun -c 3 python t.py", "--cpus-per-task=3  ->  the step has other limits"),
        ("srun --mem=1G python t.py", "--mem=1G  ->  the step has other limits"),
        ("srun -n 3 python t.py", "ranks per node: 3 on 2 nodes  ->  the job file has: 4"),
        ("srun -w $X python t.py", "srun -w $X python t.py  ->  whether it starts so"),
        ("srun $OPTIONS python t.py", "$OPTIONS  ->  options of srun that are known only"),
        ("$LAUNCH torchrun t.py", "$LAUNCH torchrun t.py  ->  whether it starts so is known only when the job runs"),
        ("torchrun t.py", "nodes: 1  ->  the job file has: 2"),
        ("srun torchrun --nproc_per_node=$N t.py", "ranks per node: in each of 4 launchers"),
        ("srun $PYTHON t.py", "$PYTHON  ->  the Python is known only"),
        ("if a; then srun torchrun t.py; fi", "srun torchrun t.py  ->  in a branch"),
        ("for x in 1 2; do srun torchrun t.py; done", "starts of each task: 2  ->  the job file has: 1"),
        ("srun torchrun t.py --a; srun torchrun t.py --b", "arguments: --a  ->  the job file has: --b"),
        ("export CUDA_VISIBLE_DEVICES=0; srun torchrun t.py", "CUDA_VISIBLE_DEVICES  ->  not a variable"),
        ("export A=$(date); srun torchrun t.py", "A=...  ->  known only when the job runs"),
        ("echo 1 > hostfile; srun torchrun t.py", "echo 1 > hostfile  ->  writes a file"),
        ("cd $TMPDIR; srun torchrun t.py", "cd $TMPDIR  ->  a folder that only the job knows"),
        ('cd "$(dirname "$0")"; srun torchrun t.py', 'cd "$(dirname "$0")"  ->  a folder that only the job knows'),
        ("cd ~bob/p; srun torchrun t.py", "cd ~bob/p  ->  a folder that only the job knows"),
        ("cd $1; srun torchrun t.py", "folder: "),
        ("cd p*; srun torchrun t.py", "cd p*  ->  a folder that only the job knows"),
        ("srun accelerate launch --use_fsdp t.py", "--use-fsdp=true  ->  option of accelerate"),
        ("srun torchrun t.py <<EOF\nx\nEOF", "standard input: a pipe"),
    ],
)
def test_what_stands_around_the_program_is_named(cli: Cli, desk: Desk, line: str, left: str) -> None:
    _, comments = imported(cli, desk, f"{HEAD}{line}\n", code=1)
    assert re.search(rf"line [67]: {re.escape(left)}", comments), comments


def test_variables_of_the_launch_are_carried_over(cli: Cli, desk: Desk) -> None:
    desk.environment["EXTRA_DIR"] = "a b"
    lines = "ARGS='--lr 1'\nARGS+=' --x 2'\nA=1 srun python train.py $ARGS $EXTRA_DIR\n"
    found, comments = imported(cli, desk, HEAD + lines)
    assert found["environment"] == {"A": "1"} and found["train"]["args"] == ["--lr", "1", "--x", "2", "a", "b"]
    assert not comments.partition("Not imported")[1]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("job.yaml", "job.yaml: is a job file, not a batch script\n  -> slurmddp check job.yaml"),
        ("x.py", "x.py: is a Python script, not a batch script\n  -> slurmddp init job.yaml --script x.py"),
    ],
)
def test_other_files_are_refused(cli: Cli, desk: Desk, name: str, says: str) -> None:
    desk.write(name, "print(1)\n")
    shown = cli("import", name)
    assert (shown.code, shown.out) == (2, "") and says in shown.err


def test_outside_of_a_cluster(cli: Cli, desk: Desk) -> None:
    desk.write("a.sbatch", f"#!/bin/bash\n{HEAD}srun apptainer exec $FOLDER/t.sif python t.py\n")
    shown = cli("import", "a.sbatch")
    assert shown.code == 0 and yaml.safe_load(shown.out)["site"] == "generic"
    assert "site    generic (no profile matches this host" in shown.err
    assert "`slurmddp import --site NAME` selects another one" in shown.err
    assert (
        "to do   job.yaml:" in shown.err and "variable $FOLDER is not set" in shown.err and "missing" not in shown.err
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("mpirun -np 8 python t.py", "mpirun (line 6)"),
        ("srun composer t.py", "composer (line 6)"),
        ("srun -N 1 ray start --head &\nsleep 9\npython t.py", "Ray (line 6)"),
        ('if [ "$X" ]; then ray start --head & fi\npython t.py', "Ray (line 6)"),
        ("srun -N 1 vllm serve x &\nsrun -N 1 torchrun t.py\nwait", "several programs side by side (line 6)"),
        ("python server.py &\nsrun torchrun t.py", "several programs side by side (line 6)"),
        ("#SBATCH hetjob\n#SBATCH -N 1\nsrun python t.py", "heterogeneous jobs (line 6)"),
        ("srun --het-group=0 python a.py : --het-group=1 python b.py", "heterogeneous jobs (line 6)"),
    ],
)
def test_what_slurmddp_does_not_run_is_refused_by_name_and_line(cli: Cli, desk: Desk, text: str, named: str) -> None:
    desk.write("a.sbatch", f"#!/bin/bash\n{HEAD}{text}\n")
    shown = cli("import", "a.sbatch", "--site", "gpus", "-o", "job.yaml")
    assert (shown.code, shown.out) == (2, "") and f"uses what slurmddp does not run: {named}" in shown.err, shown.err
    assert not (desk.project / "job.yaml").exists()


CASES = ROOT.parent / "shared/cases/scripts"


@pytest.mark.skipif(not CASES.is_dir(), reason="../shared/cases is not beside this checkout")
class TestCases:
    """The small inputs of ../shared/cases/scripts; its README has what is right for each."""

    @pytest.mark.parametrize(
        ("name", "code", "keys"),
        [
            (
                "arith_not_a_command",
                0,
                {"resources.gpus_per_node": 4, "resources.cpus_per_node": 32, "launch.mode": "srun"},
            ),
            ("if1", 1, {"resources.gpus_per_node": 8, "container.image": "/a.sqsh"}),
            ("if2", 0, {"resources.gpus_per_node": 8, "launch.mode": "srun"}),
            ("arr", 1, {"container.image": "/a/b.sqsh", "container.binds": ["/d:/d"]}),
            ("uid", 0, {"train.script": "train.py"}),
            ("cd", 0, {"train.workdir": "/scratch/me/proj", "train.script": "/scratch/me/proj/train.py"}),
            ("venv", 0, {"container.python": "./venv/bin/python3"}),
            ("mr0", 0, {"launch.max_restarts": 0}),
            ("loop", 1, {}),
            ("ds", 1, {}),
            ("dsp", 1, {}),
            ("fsdp", 1, {}),
            ("svc", 2, {}),
            ("sub3", 2, {}),
            ("ray", 2, {}),
            ("seta", 0, {"setup": ["set -a", "source $SLURM_SUBMIT_DIR/.env", "set +a"], "environment": {"FOO": "3"}}),
            ("redir", 1, {}),
            ("tmo", 1, {}),
            ("envc", 0, {"environment": {"FOO": "1", "BAR": "2"}}),
            ("tilde", 0, {"container.image": "~/image.sif"}),
        ],
    )
    def test_the_job_file_is_right_or_says_what_is_not(
        self, cli: Cli, name: str, code: int, keys: dict[str, Any]
    ) -> None:
        shown = cli("import", str(CASES / f"{name}.sbatch"), "--site", "generic")
        assert shown.code == code, shown.err
        assert ("not imported: line" in shown.err) == (code == 1)
        for dotted, expected in keys.items():
            value = yaml.safe_load(shown.out)
            for part in dotted.split("."):
                value = value[part]
            assert value == expected, shown.out
        assert "ranks_per_node" not in shown.out or name in ("loop", "tilde")

    def test_every_case_is_judged(self) -> None:
        judged = next(mark for mark in self.test_the_job_file_is_right_or_says_what_is_not.pytestmark).args[1]  # type: ignore[attr-defined]
        assert {path.stem for path in CASES.iterdir()} == {row[0] for row in judged}
