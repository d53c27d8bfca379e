"""slurmddp import never starts another training: what its job file starts is what bash starts, or it exits with 1."""

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.helpers import Desk, Result
from tests.unit.scripts import needs_namespaces

pytestmark = needs_namespaces
Cli = Callable[..., Result]
HEAD = "#!/bin/bash\n#SBATCH -N 2\n#SBATCH --ntasks-per-node=4\n#SBATCH --gpus-per-node=4\n#SBATCH -t 60\n"
#: (lines of the script, arguments that bash passes, other keys of a right job file). None: it must not be imported.
SCRIPTS: list[tuple[str, list[str] | None, dict[str, Any]]] = [
    ("srun python t.py --a 1", ["--a", "1"], {}),
    ('A="--lr 1"\neval "srun python t.py $A --x 2"', ["--lr", "1", "--x", "2"], {}),
    ('set -- --lr 1\nsrun python t.py "$@"', ["--lr", "1"], {}),
    ('run() { srun python "$@"; }\nrun t.py --a 1', ["--a", "1"], {}),
    ("IFS=,\nA=a,b\nsrun python t.py $A", ["a", "b"], {}),
    ('C=(python t.py)\nC+=(--b 2)\nsrun "${C[@]}"', ["--b", "2"], {}),
    ("printf -v LR %s 0.1\nsrun python t.py --lr $LR", ["--lr", "0.1"], {}),
    ('A=""\nwhile read -r l; do A+=" $l"; done <<<"--q 1"\nsrun python t.py $A', ["--q", "1"], {}),
    ("case $SLURM_NNODES in 2) A=two ;; *) A=more ;; esac\nsrun python t.py $A", ["two"], {}),
    ("X=abc\nsrun python t.py ${X^^} ${X/a/b} ${#X} ${X:1:2}", ["ABC", "bbc", "3", "bc"], {}),
    ("cat >run.sh <<'EOF'\npython t.py --here 1\nEOF\nsrun bash run.sh", ["--here", "1"], {}),
    ("srun python t.py --n $(seq -s, 3) {1..2}", ["--n", "1,2,3", "1", "2"], {}),
    ("for l in 1 2; do A=\"$A --l $l\"; done\nsrun python t.py $A", ["--l", "1", "--l", "2"], {}),
    ("[ $SLURM_NNODES -gt 1 ] && A=--many\nsrun python t.py $A", ["--many"], {}),
    ("srun python t.py --data $(dirname /a/b/c)/d", ["--data", "/a/b/d"], {}),
    ("N=$((2 * 3))\nlet N+=1\nsrun python t.py $N", ["7"], {}),
    ("A=1\nA=2 true\nsrun python t.py $A", ["1"], {}),
    ('A="x y"\nsrun python t.py "$A" $A', ["x y", "x", "y"], {}),
    ("srun bash -c 'python t.py --w 1'", ["--w", "1"], {}),
    ("export A=1\nA=2\nsrun python t.py", [], {"environment": {"A": "2"}}),
    ("export A=1\nexport -n A\nsrun python t.py", [], {}),
    ("cd\nsrun python t.py", [], {"workdir": "~/"}),
    ("export LD_LIBRARY_PATH=$LD_LIBRARY_PATH:/x", None, {}),
    ("source env.sh\nexport A=${B:-3}\nsrun python t.py", [],
     {"setup": ["source $SLURM_SUBMIT_DIR/env.sh", "export A=${B:-3}"]}),
    ("if nvidia-smi | grep -q A100; then A=64; else A=32; fi\nsrun python t.py $A", None, {}),
    ("nvidia-smi | grep -q A100 && A=64\nsrun python t.py $A", None, {}),
    ("if [ -d /x ]; then\n  prepare\nfi\nsrun python t.py", None, {}),
    ("echo a > hosts\nsrun python t.py", None, {}),
    ("cp /a /b\nsrun python t.py", None, {}),
    ("srun python t.py || srun python t.py --resume", None, {}),
    ("srun --pty /bin/bash\nsrun python t.py", None, {}),
    ("until srun python t.py; do sleep 1; done", None, {}),
    ("export A=1\nsrun --export=NONE python t.py", None, {}),
    ("srun --gpus=2 python t.py", None, {}),
    ("srun python t.py --name $SLURM_JOB_NAME", None, {}),
    ("srun python t.py --n $(echo $SLURM_JOB_NODELIST | awk -F'[' '{print NF}')", None, {}),
    ("#SBATCH --export=ALL,FOO=bar\nsrun python t.py $FOO", ["bar"], {"environment": {"FOO": "bar"}}),
    ("srun python t.py '~/y'", ["~/y"], {}),
    ('mkdir -p /s/$USER "/s/$USER/a b"\nsrun python t.py', [],
     {"setup": ["mkdir -p /s/$USER '/s/'$USER'/a b'"]}),
    ("export A='~/y'\nsrun python t.py", [], {"setup": ["export A='~/y'"]}),
    ("srun -t 10 python t.py", None, {}),
    ("srun apptainer run prepare.sif\nsrun python t.py", None, {}),
    ("srun --output=%t.log python t.py", [], {}),
    ("srun --container-image=/i.sqsh --ntasks-per-node=1 torchrun --nproc_per_node=4 /t.py", None, {}),
    ("export A=1\nunset A\nsrun python t.py", [], {}),
    ("ulimit -n 65536\nsrun python t.py", [], {"setup": ["ulimit -n 65536"]}),
    ("export A=${B:-3}\nsrun python t.py", [], {"environment": {"A": "3"}}),
    ("f() { export A=5; }\nf\nsrun python t.py", [], {"environment": {"A": "5"}}),
    ("srun env A=4 python t.py", [], {"environment": {"A": "4"}}),
    ("cd /data\nsrun python t.py", [], {"workdir": "/data"}),
    ("pushd /data\nsrun python t.py", [], {"workdir": "/data"}),
    ("cd /a\ncd ../b\nsrun python t.py", [], {"workdir": "/b"}),
    ("go() { cd /c; }\ngo\nsrun python t.py", [], {"workdir": "/c"}),
    ("(cd /d)\nsrun python t.py", [], {}),
    # What only the job knows, or slurmddp does not do.
    ("srun python t.py --seed $RANDOM", None, {}),
    ("if [ -f resume ]; then A=--resume; fi\nsrun python t.py $A", None, {}),
    ("if [[ -d /ckpt ]]; then srun python t.py --resume; else srun python t.py; fi", None, {}),
    ("srun python prepare.py\nsrun python t.py", None, {}),
    ("for s in 1 2; do srun python t.py --seed $s; done", None, {}),
    ("srun -n 3 python t.py", None, {}),
    ("srun -N 1 python t.py", None, {}),
    ("srun python t.py </data/in", None, {}),
    ("exec >log.txt\nsrun python t.py", None, {}),
    ("srun numactl -N 0 python t.py", None, {}),
    ("srun python t.py & srun python other.py & wait", None, {}),
    ("srun bash -c 'python t.py --rank $SLURM_PROCID'", None, {}),
    ("srun bash -c 'A=$SLURM_PROCID python t.py'", None, {}),
    ("trap 'python clean.py' EXIT\nsrun python t.py", None, {}),
    ("srun python t.py --day $(date +%F)", None, {}),
    ("srun python t.py $MY_TOKEN_OPTIONS", None, {}),
    ("srun my_wrapper python t.py", None, {}),
    ("while :; do :; done\nsrun python t.py", None, {}),
    ("exit 0\nsrun python t.py", None, {}),
    ("mpirun -np 8 python t.py", None, {}),
    ("L=composer\nsrun $L t.py", None, {}),
    ("R=ray\n$R start --head\npython t.py", None, {}),
    # What files hold, and how many there are; when it is; what a node is.
    ("srun python t.py $(ls -t c/*.pt | head -1)", None, {}),
    ("srun python t.py --n $(ls c | wc -l)", None, {}),
    ("C=$(find c -name '*.pt' | tail -1)\nsrun python t.py $C", None, {}),
    ("srun python t.py $(readlink last)", None, {}),
    ("srun python t.py $(sed -n 's/^lr: //p' c.yaml)", None, {}),
    ("srun python t.py $(awk '/lr/{print $2}' c.yaml)", None, {}),
    ("srun python t.py $(cat c.yaml | grep lr | cut -d: -f2)", None, {}),
    ("srun python t.py $(wc -l <hosts)", None, {}),
    ("srun python t.py $(grep -c ^processor /proc/cpuinfo)", None, {}),
    ("F=(d/*.bin)\nsrun python t.py ${#F[@]}", None, {}),
    ("export $(grep -v '#' .env | xargs)\nsrun python t.py", None, {}),
    ("source conf.sh\nsrun python t.py --lr $LR", None, {}),
    ("srun python t.py $SECONDS", None, {}),
    ("srun python t.py $EPOCHSECONDS", None, {}),
    ("srun python t.py $(printf '%(%F)T' -1)", None, {}),
    ("if [ $(date +%H) -lt 8 ]; then A=1; fi\nsrun python t.py $A", None, {}),
    ("if test -e c.pt; then A=--resume; fi\nsrun python t.py $A", None, {}),
    ('if [ -z "$(ls c)" ]; then A=--init; fi\nsrun python t.py $A', None, {}),
    ("[ ${SLURM_RESTART_COUNT:-0} -gt 0 ] && A=--resume\nsrun python t.py $A", None, {}),
    ("case $SLURM_JOB_PARTITION in a) A=8 ;; *) A=4 ;; esac\nsrun python t.py $A", None, {}),
    ("if [[ $(nvidia-smi --query-gpu=name) == *A100* ]]; then A=8\nelse A=4; fi\nsrun python t.py $A", None, {}),
    ("G=$(nvidia-smi --query-gpu=memory.total | head -1)\n((G > 9)) && A=8 || A=4\nsrun python t.py $A", None, {}),
    ("for i in 1 2 3; do srun python t.py && break; done", None, {}),
    ("sed -i 's/a/b/' c.yaml\nsrun python t.py", None, {}),
    ("echo 1 | tee c.json\nsrun python t.py", None, {}),
    ("export SLURM_EXPORT_ENV=NONE\nsrun python t.py", None, {}),
    ("setsid -f redis-server\nsrun python t.py", None, {}),
    ("srun --kill-on-bad-exit=0 python t.py", None, {}),
    ("export SRUN_CPUS_PER_TASK=3\nsrun python t.py", None, {}),
    ("cd ..\nsource setup.sh\nsrun python t.py", [],
     {"workdir": "..", "setup": ["source $SLURM_SUBMIT_DIR/../setup.sh"]}),
    ("source $CODE_HOME/env.sh\nsrun python t.py", [], {"setup": ['source "$CODE_HOME"/env.sh']}),
    ("#SBATCH --gpus-per-task=1 --gpu-bind=none\nsrun python t.py", [], {}),
    ("#SBATCH --comment=books\nsrun --comment=books python t.py", [], {}),
    ("srun --ntasks-per-node=1 torchrun --nproc_per_node=4 --tee 3 --role=a t.py", [], {}),
    ("srun python -um t", [], {"module": "t"}),
    ("srun python -Bum t $SLURM_JOB_ID", [], {"module": "run.sh"}),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "args", "keys"), SCRIPTS, ids=[lines for lines, _, _ in SCRIPTS])
def test_an_import_is_the_same_training_or_refused(
    cli: Cli, desk: Desk, lines: str, args: list[str] | None, keys: dict[str, Any]
) -> None:
    desk.environment["MY_TOKEN_OPTIONS"] = "--secret 1"
    desk.write("t.py")
    desk.write("a.sbatch", f"{HEAD}{lines}\n")
    shown = cli("import", "a.sbatch", "--site", "gpus")
    assert shown.code in (0, 1, 2) and "Traceback" not in shown.err
    if args is None:
        assert shown.code != 0, shown.out
    elif shown.code == 0:
        job = yaml.safe_load(shown.out)
        train = job["train"]
        program = train.get("module") or train["script"].rpartition("/")[2]
        assert (program, train.get("args", [])) == (keys.get("module", "t.py"), args)
        assert job.get("environment", {}) == keys.get("environment", {})
        assert train.get("workdir", "") == keys.get("workdir", "")
        assert job.get("setup", []) in (keys.get("setup", []), ["unset A"])


@pytest.mark.parametrize(
    ("options", "sets", "environment"),
    [
        ("exec", "export A=1", {"A": "1"}),
        ("exec --cleanenv", "export A=1", {}),
        ("exec -e", "export A=1; export APPTAINERENV_B=2", {"B": "2"}),
        ("exec --containall", "export A=1", {}),
        ("exec -ce --env C=3,D=4", "export A=1", {"C": "3", "D": "4"}),
    ],
)
def test_the_variables_that_a_container_lets_through(
    cli: Cli, desk: Desk, options: str, sets: str, environment: dict[str, str]
) -> None:
    desk.write("t.py")
    desk.write("a.sbatch", f"{HEAD}{sets}\nsrun apptainer {options.replace('-ce', '-c -e')} i.sif python t.py\n")
    shown = cli("import", "a.sbatch", "--site", "generic")
    assert shown.code == 0, shown.err
    job = yaml.safe_load(shown.out)
    assert job.get("environment", {}) == environment
    clean = options != "exec"
    assert bool(set(job["container"].get("options", [])) & {"--cleanenv", "--containall"}) == clean


def test_gpus_of_two_types_are_no_number(cli: Cli, desk: Desk) -> None:
    desk.write("t.py")
    head = HEAD.replace("--gpus-per-node=4", "--gres=gpu:a100:2,gpu:v100:2")
    desk.write("a.sbatch", f"{head}srun python t.py\n")
    shown = cli("import", "a.sbatch", "--site", "gpus")
    assert shown.code == 1 and "--gres=gpu:a100:2,gpu:v100:2 -> set resources.nodes" in shown.err, shown.err


def test_a_script_that_asks_slurm_where_it_is(cli: Cli, desk: Desk) -> None:
    desk.write("sub/t.py")
    where = "$(dirname $(scontrol show job $SLURM_JOB_ID | awk -F= '/Command=/{print $2}'))"
    desk.write("sub/a.sbatch", f"{HEAD}cd {where}\nsrun python t.py\n")
    shown = cli("import", "sub/a.sbatch", "--site", "gpus")
    assert shown.code == 0, shown.err
    assert yaml.safe_load(shown.out)["train"] == {"workdir": "sub", "script": "sub/t.py"}


@pytest.mark.long  # each of them is imported above
def test_most_of_them_are_imported(cli: Cli, desk: Desk) -> None:
    """A program that refuses everything is never wrong."""
    desk.write("t.py")
    codes = []
    for lines, args, _ in SCRIPTS:
        if args is not None:
            desk.write("a.sbatch", f"{HEAD}{lines}\n")
            codes.append(cli("import", "a.sbatch", "--site", "gpus").code)
    assert codes.count(0) >= len(codes) / 2, codes


def _run_sh(cli: Cli, desk: Desk, lines: str, *options: str) -> tuple[Result, str]:
    desk.write("t.py")
    desk.write("a.sbatch", f"{HEAD}{lines}\n")
    shown = cli("import", "a.sbatch", "--site", "gpus", *options)
    written = desk.project / "run.sh"
    return shown, written.read_text(encoding="utf-8") if written.exists() else ""


def test_run_sh_has_what_only_the_job_knows_in_the_script_s_own_words(cli: Cli, desk: Desk) -> None:
    tail = 't.py --out "$O" --id $((SLURM_JOB_ID % 7))'
    lines = f'module load x\nN=run-$SLURM_JOB_ID\nO="$N/out dir"\nsrun /v/bin/python {tail}'
    shown, text = _run_sh(cli, desk, lines, "-o", "job.yaml")
    assert shown.code == 0, shown.err
    assert text.splitlines()[2:] == [
        "N=run-$SLURM_JOB_ID", 'O="$N/out dir"', "exec /v/bin/python \\", f"    {tail}",
    ]  # fmt: skip
    job = yaml.safe_load((desk.project / "job.yaml").read_text(encoding="utf-8"))
    assert job["train"] == {"script": "run.sh"} and job["setup"] == ["module load x"]
    assert "bash" in desk.scripts((desk.project / "job.yaml").read_text(encoding="utf-8"))[1]


def test_run_sh_needs_a_job_file_to_stand_beside(cli: Cli, desk: Desk) -> None:
    shown, text = _run_sh(cli, desk, "srun python t.py --id $SLURM_JOB_ID")
    assert (shown.code, text) == (1, "") and "missing run.sh" in shown.err


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("A=$SLURM_PROCID\nsrun python t.py $SLURM_JOB_ID $A", "run.sh would not start the same in each task"),
        ("MASTER_PORT=$((SLURM_JOB_ID % 9))\nsrun python t.py $MASTER_PORT", "argument $MASTER_PORT  ->  known only"),
        ("A=$(date)\nsrun python t.py $A", "argument $A  ->  known only"),
        ("srun python t.py $SLURM_JOB_ID --token $MY", "argument --token [redacted]  ->  a secret"),
        ("KEY=hf_aaaaaaaaaabbbbbbbbbbccccccccccdddd\nsrun python t.py $KEY$SLURM_JOB_ID", "would hold a secret"),
    ],
)
def test_run_sh_is_the_same_on_every_rank_or_refused(cli: Cli, desk: Desk, lines: str, why: str) -> None:
    shown, _ = _run_sh(cli, desk, lines, "-o", "job.yaml")
    assert shown.code == 1 and why in (desk.project / "job.yaml").read_text(encoding="utf-8"), shown.err
    assert "hf_aaaa" not in shown.err + "".join(path.read_text() for path in desk.project.glob("*.yaml"))
