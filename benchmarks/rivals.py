"""The same training under the same faults, by slurmddp and by four other ways that people use on Slurm.

`python -m benchmarks.recovery --rivals FILE` plays them on the test cluster. FILE gets a JSON line per run; runs that
are in it already count, so that a measurement may be interrupted. What each way is given stands in RIVALS.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.environments import CHECKOUT
from tests.cluster.build import cache_folder
from tests.cluster.cluster import TORCH_IMAGE_ROOT, Cluster
from tests.cluster.frameworks import HOME as ENVIRONMENTS
from tests.cluster.frameworks import make_environment
from tests.cluster.host import LOGIN
from tests.cluster.images import make_torch_image
from tests.cluster.roots import python_with_pip
from tests.cluster.runs import Alice

HOME = "/home/alice/rivals"
#: Its newest wheel is for Python 3.12 and glibc 2.39. The image has 3.11 and 2.36: pip would take 0.4.1. The launcher
#: is Python alone and runs on 3.11 too, so the wheel is unpacked; only its CUPTI module, for GPUs, does not load.
NVRX = ("nvidia-resiliency-ext==0.7.0", "3.12", "manylinux_2_39_x86_64")
NVRX_NEEDS = ("httpx", "grpcio", "grpcio-tools", "nvidia-ml-py", "psutil", "pyyaml", "defusedxml", "setproctitle")
PACKAGES = ("lightning", *NVRX_NEEDS, "pydantic", "pydantic-settings")
#: Lightning calls scontrol inside the container, which has none: the host's own, with the host's libraries.
SCONTROL = """\
#!/bin/sh
libraries=/host/usr/lib/x86_64-linux-gnu
exec /host/lib64/ld-linux-x86-64.so.2 --library-path $libraries:$libraries/slurm-wlm /host/usr/bin/scontrol "$@"
"""
#: Seconds after which a fault counts as not survived.
PATIENCE = 300
EVERY = 5  # as in the program
MEANING = f"""\
All train the same small model on two nodes with one rank each: plain DDP over gloo, or the same arithmetic in Lightning
(benchmarks/rival_program.py). They save every {EVERY} steps and load the newest save when they start. Collectives time
out after 60 s. A third node is a spare. A cell: how many runs reached the last step; seconds from the fault (time
limit: from the last step before it) to the first step of the next start; steps done again. Median, with the range. The
weights at the end equal those of an undisturbed run unless the cell says otherwise. A run without a new step
for {PATIENCE} s has not survived; "-" was not measured.
ft_launcher is that of nvidia-resiliency-ext 0.7.0, which runs without GPUs.
Lightning runs in the image as a folder: its signal also ends the process by which Apptainer mounts an image file."""


@dataclass(frozen=True)
class Rival:
    """A way to run the program: its batch script, or the options of `slurmddp submit` if it has none.

    nodes:       how many it gets, a spare among them.
    generations: how often the script is submitted; the next one starts when the last is over.
    unpacked:    it runs in the image as a folder, not as a file.
    """

    title: str
    nodes: int
    batch: str
    command: str
    arguments: str = ""
    generations: int = 1
    unpacked: bool = False


SLURMDDP = "--nodes 2+1 --set train.observe=restart --set timeouts.hang=10s --set timeouts.stop=30s"
EVERYTHING = " ".join(f"--set recovery.{key}=true" for key in ("fork", "spares_warm", "heartbeats", "standby"))
TORCHRUN = "-m torch.distributed.run --nproc-per-node=1 --max-restarts=3 --rdzv-backend=c10d"
ENDPOINT = "--rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=$(scontrol show hostnames | head -n 1):29500"
REQUEUE = "#SBATCH --requeue --signal=B:USR1@30\ntrap 'scontrol requeue $SLURM_JOB_ID' USR1\n"
RIVALS = (
    Rival("slurmddp", 3, "", SLURMDDP),
    Rival("slurmddp with all of recovery on", 3, "", f"{SLURMDDP} {EVERYTHING}"),
    Rival(
        "torchrun",
        2,
        "#SBATCH --no-requeue --no-kill\n",
        f"srun --no-kill {{python}} {TORCHRUN} --nnodes=1:2 {ENDPOINT}",
    ),
    Rival("torchrun in a requeueing script", 2, REQUEUE, f"srun {{python}} {TORCHRUN} --nnodes=2 {ENDPOINT}"),
    Rival(
        "Lightning's SLURM plugin",
        2,
        "#SBATCH --requeue --signal=SIGUSR1@30\n",
        "srun {python}",
        "lightning",
        unpacked=True,  # its signal also ends the process by which Apptainer mounts an image file
    ),
    Rival(
        "ft_launcher",
        3,
        # As its manual deploys it: an array of single nodes, so that a lost one ends nobody else. The next array waits.
        "#SBATCH --array=0-2 --dependency=singleton --no-requeue\n"
        "host={folder}/host-$SLURM_ARRAY_JOB_ID; [ $SLURM_ARRAY_TASK_ID = 0 ] && hostname > $host\n"
        "until [ -s $host ]; do sleep 0.5; done\n",
        "srun {python} -m nvidia_resiliency_ext.fault_tolerance.launcher --nnodes=2:3 --nproc-per-node=1"
        " --max-restarts=3 --rdzv-backend=c10d --rdzv-id=$SLURM_ARRAY_JOB_ID --rdzv-endpoint=$(cat $host):29500"
        " --ft-initial-rank-heartbeat-timeout=60 --ft-rank-heartbeat-timeout=10",
        generations=2,
    ),
)


@dataclass(frozen=True)
class Result:
    """One run. seconds: from the fault to the first step of a new start; None if there was none in PATIENCE.

    load: of the machine at the end, in processes that want to run.
    """

    rival: str
    fault: str
    seconds: float | None
    lost: int
    ends: str
    load: float | None = None


class Job:
    """A submitted run of the program, seen through the files that the program writes."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name = cluster, name
        self.folder = cluster.machine_path(f"{HOME}/{name}")
        cluster.write(f"{HOME}/{name}/began", "")
        self.id = ""

    def submit(self, rival: Rival, image: str, environment: str) -> None:
        program = f"{HOME}/program.py"
        if not rival.batch:
            small = ["ranks_per_node=1", "cpus_per_node=1", "mem_per_node=1500M"]
            options = [*rival.command.split(), *(word for each in small for word in ("--set", f"resources.{each}"))]
            options += [
                "--site",
                "testcluster",
                "--image",
                image,
                "--time",
                "10m",
                "--set",
                f"container.binds=[{HOME}]",
            ]
            words = (program, *options, "--", f"{HOME}/{self.name}")
            self.id = Alice(self.cluster, image).submit(*words).job_id
            return
        image = TORCH_IMAGE_ROOT if rival.unpacked else image
        nodes = 1 if "--array" in rival.batch else rival.nodes
        binds = "/home/alice,/:/host,/etc/slurm,/etc/passwd,/run/munge,/usr/lib/x86_64-linux-gnu/slurm-wlm"
        python = f"apptainer exec --bind {binds} {image} {environment}/bin/python"
        text = (
            f"#!/bin/bash\n#SBATCH --job-name={self.name} --nodes={nodes} --ntasks-per-node=1 --exclusive --mem=1500M\n"
            f"#SBATCH --time=10 --output={HOME}/{self.name}/job.log --open-mode=append\n{rival.batch}"
            f"export APPTAINERENV_PREPEND_PATH={environment}/bin\n"
            f"{rival.command} {program} {{folder}} {rival.arguments} &\nwait $!; code=$?\n"
            "[ $code -gt 128 ] && {{ wait $!; code=$?; }}  # a trap has run\nexit $code\n"
        ).format(python=python, folder=f"{HOME}/{self.name}")
        self.cluster.write(f"{HOME}/{self.name}/job.sh", text)
        for _ in range(rival.generations):
            told = self.cluster.run(LOGIN, ["sbatch", "--parsable", f"{HOME}/{self.name}/job.sh"]).stdout.strip()
            self.id = self.id or (f"{told}_0" if "--array" in rival.batch else told)

    def rows(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for_step(self, step: int) -> None:
        reached = lambda: any(row["step"] >= step for row in self.rows("steps.jsonl"))  # noqa: E731
        self.cluster.wait_for(reached, f"step {step}\n{self.log()}", PATIENCE, every=0.05)

    def log(self) -> str:
        path = self.folder / "job.log"
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""

    def over(self) -> bool:
        return not self.cluster.run(LOGIN, ["squeue", "--noheader"], check=False).stdout.strip()

    def requeued(self) -> bool:
        done = self.cluster.run(LOGIN, ["scontrol", "show", "job", self.id], check=False)
        return "Restarts=" in done.stdout and "Restarts=0" not in done.stdout

    def slow(self, wanted: bool) -> None:
        path = f"{HOME}/{self.name}/slow"
        self.cluster.write(path, "") if wanted else self.cluster.machine_path(path).unlink(missing_ok=True)


def signal_rank(name: str) -> Callable[[Job, random.Random], None]:
    def fault(job: Job, chance: random.Random) -> None:
        row = chance.choice(job.rows("starts.jsonl"))
        job.cluster.run(row["node"], ["kill", f"-{name}", str(row["pid"])], user="root")

    return fault


def lose(rank: int) -> Callable[[Job, random.Random], None]:
    """Cut the power of a rank's node. Rank 0 need not be on the batch host: 0 stands for that host."""

    def fault(job: Job, chance: random.Random) -> None:
        host = job.cluster.job(job.id)["BatchHost"]
        others = [row["node"] for row in job.rows("starts.jsonl") if row["node"] != host]
        job.cluster.kill_host(others[0] if rank else host)

    return fault


def time_limit(job: Job, chance: random.Random) -> None:
    """Lower the limit, so that Slurm warns the job in half a minute to one and a half; steps are slow until then."""
    job.slow(True)
    hours, minutes, _ = job.cluster.job(job.id)["RunTime"].split(":")
    limit = 60 * int(hours) + int(minutes) + 2
    job.cluster.run(LOGIN, ["scontrol", "update", f"JobId={job.id.partition('_')[0]}", f"TimeLimit={limit}"])


FAULTS = {
    "SIGKILL of a rank": signal_rank("KILL"),
    "SIGSTOP of a rank": signal_rank("STOP"),
    "node lost": lose(1),
    "batch host lost": lose(0),
    "time limit": time_limit,
}


def play(
    job: Job, image: str, environment: str, rival: Rival, fault: str, chance: random.Random, expected: Path
) -> Result:
    """Submit, break, and watch until the program has ended or nothing comes any more."""
    job.submit(rival, image, environment)
    job.wait_for_step(chance.randint(10, 40))
    began = time.time()
    FAULTS[fault](job, chance)
    first, limited, over = job.rows("steps.jsonl")[0]["start"], fault == "time limit", 0
    while True:
        rows = job.rows("steps.jsonl")
        again = [row for row in rows if row["start"] != first]
        over = over + 1 if not again and job.over() else 0
        waited = time.time() - (rows[-1]["time"] if limited else began)
        if again or over > 2 or waited > PATIENCE:
            break
        if limited and not over and job.requeued():
            update = ["scontrol", "update", f"JobId={job.id}", "TimeLimit=10"]
            job.cluster.run(LOGIN, update, user="root", check=False)
        time.sleep(0.5)
    job.slow(False)
    if not again:
        print(job.log(), file=sys.stderr)
        return Result(rival.title, fault, None, 0, "the job ended" if over else f"nothing in {PATIENCE} s")
    before = [row for row in rows if row["start"] == first]
    seconds = again[0]["time"] - (before[-1]["time"] if limited else began)
    lost = max(row["step"] for row in before) + 1 - again[0]["step"]
    weights = job.folder / "weights.pt"
    end = time.monotonic() + PATIENCE
    while not weights.exists() and time.monotonic() < end and not job.over():
        time.sleep(1)
    return Result(
        rival.title, fault, seconds, lost, _judge(weights, expected) if weights.exists() else "did not finish"
    )


def _judge(weights: Path, expected: Path) -> str:
    """Compare with the weights that two undisturbed ranks have."""
    import torch

    found, wanted = torch.load(weights), torch.load(expected)
    same = all(torch.allclose(found[name], wanted[name], rtol=1e-3, atol=1e-5) for name in wanted)
    return "same weights" if same else "other weights"


def make_rivals_environment(cluster: Cluster, image: str) -> str:
    """Make the venv of Lightning and nvidia-resiliency-ext, once for all clusters; its folder on the hosts."""
    version, python, platform = NVRX
    folder = f"{ENVIRONMENTS}/{PACKAGES[0]}"
    place, kept = cluster.machine_path(folder), cache_folder() / f"rivals-{version}"
    if not kept.is_dir():
        make_environment(cluster, image, PACKAGES)
        pip = [python_with_pip(), "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", version]
        with tempfile.TemporaryDirectory() as wheels:
            subprocess.run([*pip, "--python-version", python, "--platform", platform, "--dest", wheels], check=True)
            with zipfile.ZipFile(next(Path(wheels).iterdir())) as wheel:
                wheel.extractall(place / "lib/python3.11/site-packages")
        cluster.write(f"{folder}/bin/scontrol", SCONTROL, mode=0o755)
        subprocess.run(["cp", "-a", place, kept], check=True)
    elif not place.exists():
        cluster.write(f"{ENVIRONMENTS}/began", "")
        subprocess.run(["cp", "-a", kept, place], check=True)
    return folder


def measure(cluster: Cluster, results: Path, runs: int, only: str, seed: int) -> list[Result]:
    """Play each fault with each rival until `results` has so many runs of it; all that it has then."""
    image = make_torch_image(cluster)
    environment = make_rivals_environment(cluster, image)
    program = CHECKOUT / "benchmarks/rival_program.py"
    cluster.write(f"{HOME}/program.py", program.read_text())
    cluster.write(f"{HOME}/undisturbed/began", "")
    expected = cluster.machine_path(f"{HOME}/undisturbed")
    subprocess.run([sys.executable, program, expected, "undisturbed"], check=True)
    for number in range(runs):
        for rival, fault in itertools.product(RIVALS, FAULTS):
            done = [each for each in read(results) if (each.rival, each.fault) == (rival.title, fault)]
            if not re.search(only, f"{rival.title}: {fault}") or len(done) > number:
                continue
            cluster.reset()
            name = re.sub("[^a-z]+", "-", f"{rival.title} {fault}".lower()) + f"-{len(done)}"
            chance = random.Random(f"{seed} {name}")
            result = play(Job(cluster, name), image, environment, rival, fault, chance, expected / "weights.pt")
            result = replace(result, load=os.getloadavg()[0])
            print(result, file=sys.stderr, flush=True)
            with results.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
    return read(results)


def read(results: Path) -> list[Result]:
    lines = results.read_text().splitlines() if results.exists() else []
    return [Result(**json.loads(line)) for line in lines]


def text(results: Sequence[Result]) -> str:
    """A row per rival, a column per fault, and what each rival was given."""
    lines = [["", *FAULTS], ["---"] * (1 + len(FAULTS))]
    for rival in RIVALS:
        runs = [[each for each in results if (each.rival, each.fault) == (rival.title, fault)] for fault in FAULTS]
        lines.append([rival.title, *map(_cell, runs)])
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    loads = [each.load for each in results if each.load is not None]
    load = f", which other work gave a load of {min(loads):.0f} to {max(loads):.0f}" if loads else ""
    where = f"On {os.cpu_count()} cores{load}, {time.strftime('%Y-%m-%d')}."
    given = "".join(f"- {rival.title}, {rival.nodes} nodes: {_given(rival)}.\n" for rival in RIVALS)
    return f"{where} {MEANING}\n\n{table}\n{given}"


def _given(rival: Rival) -> str:
    command = rival.command.replace("{python}", "python").replace("{folder}/", "")
    script = [line for line in rival.batch.replace("{folder}/", "").splitlines() if line]
    return ", ".join(f"`{line}`" for line in [*script, command if script else f"slurmddp submit {command}"])


def _cell(runs: Sequence[Result]) -> str:
    """`31 s (30 to 35), 3 steps, 3 of 3`; behind it each end that is not the undisturbed run's."""
    if not runs:
        return "-"
    seconds = [each.seconds for each in runs if each.seconds is not None]
    ends = sorted({each.ends for each in runs} - {"same weights"})
    survived = sum(each.ends in ("same weights", "other weights") for each in runs)
    parts = [f"{survived} of {len(runs)}"]
    if seconds:
        lost = statistics.median(each.lost for each in runs if each.seconds is not None)
        spread = f" ({min(seconds):.0f} to {max(seconds):.0f})" if len(seconds) > 1 else ""
        parts += [f"{statistics.median(seconds):.0f} s{spread}", f"{lost:g} steps"]
    return ", ".join([*parts, *ends])
