"""Cores and memory that neither the user nor the profile names: the share of a node, from what Slurm prints."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import Desk, Result

Cli = Callable[..., Result]
SAMPLES = Path(__file__).parents[1] / "cluster" / "samples"
#: Nodes as Slurm 20.02 to 25.05 prints them. Jobs can have 120 CPUs, 500000 MiB and 4 A100 of gpu1, 288 and 4 of gh1.
NODES = (SAMPLES / "scontrol-nodes-versions.txt").read_text() + (SAMPLES / "real-scontrol-nodes.txt").read_text()
PARTITIONS = """\
PartitionName=gpu AllowQos=ALL Default=YES MaxCPUsPerNode=UNLIMITED MaxMemPerNode=UNLIMITED State=UP
PartitionName=capped AllowQos=ALL Default=NO MaxCPUsPerNode=100 MaxMemPerNode=400000 State=UP
PartitionName=grace AllowQos=ALL Default=NO MaxCPUsPerNode=UNLIMITED State=UP
PartitionName=main AllowQos=ALL Default=NO State=UP
PartitionName=cores AllowQos=ALL Default=NO State=UP
"""
SCONTROL = """\
#!/bin/bash
case "$*" in
  *"show node"*) cat "$HOME/nodes" ;;
  *"show partition"*) cat "$HOME/partitions" ;;
  *"show config"*) echo "MaxMemPerNode = UNLIMITED" ;;
  *) exit 1 ;;
esac
"""


@pytest.fixture
def ready(desk: Desk) -> Desk:
    desk.write(
        "job.yaml",
        "site: generic\nname: x\ntrain: {script: train.py}\nresources: {time: 1h}\ncontainer: {runtime: none}\n",
    )
    desk.write("train.py")
    desk.program("scontrol", SCONTROL)
    both = NODES.replace("Partitions=gpu,preempt ", "Partitions=gpu,capped ")
    (desk.home / "nodes").write_text(both)
    (desk.home / "partitions").write_text(PARTITIONS)
    return desk


def asked(done: Result) -> dict[str, str]:
    """Return the #SBATCH lines for cores and memory."""
    lines = [line.removeprefix("#SBATCH ").split("=") for line in done.out.splitlines() if line.startswith("#SBATCH ")]
    return {line[0]: line[1] for line in lines if line[0] in ("--cpus-per-task", "--mem")}


def dry(cli: Cli, *options: str) -> Result:
    return cli("submit", "job.yaml", "--dry-run", *[f"--set=resources.{option}" for option in options])


@pytest.mark.parametrize(
    ("options", "cores", "mem"),
    [
        (("gpus_per_node=1",), "30", "125000M"),  # of gpu1 in the default partition: specialised cores are no job's
        (("gpus_per_node=4",), "120", "500000M"),
        (("gpus_per_node=1", "exclusive=true"), "120", "500000M"),
        (("gpus_per_node=4", "partition=capped"), "100", "400000M"),
        (("gpus_per_node=2", "partition=grace"), "144", "428500M"),
        (("gpus_per_node=1", "partition=main"), "2", "3000M"),  # node1 gives 2 of 4 per GPU, node3 all 4
        (("gpus_per_node=1", "partition=main,grace"), "2", "3000M"),
        (("gpus_per_node=2", "gpu_type=A100"), "60", "250000M"),
        (("gpus_per_node=2", "cpus_per_node=7"), "7", None),
        (("gpus_per_node=2", "mem_per_node=9G"), "60", "9216M"),
        (("gpus_per_node=1", "sbatch_extra=[--cpus-per-gpu=8]"), None, None),
        (("gpus_per_node=0",), None, None),
    ],
)
def test_the_share_of_the_gpus(
    ready: Desk, cli: Cli, options: tuple[str, ...], cores: str | None, mem: str | None
) -> None:
    done = dry(cli, *options)
    wanted = {"--cpus-per-task": cores, "--mem": mem}
    assert asked(done) == {flag: value for flag, value in wanted.items() if value}, done.err


def test_what_was_taken_is_said_and_explained(ready: Desk, cli: Cli) -> None:
    done = dry(cli, "gpus_per_node=1")
    told = "note: asks for 30 cores and 125000M of memory per node: 1 of 4 GPUs of gpu1 (scontrol show node)"
    assert told in done.err and "Slurm may give only one" not in done.err
    assert "OMP_NUM_THREADS=30" in done.out
    done = cli("submit", "job.yaml", "--gpus-per-node", "1", "--explain", "resources.cpus_per_node")
    assert done.out == "resources.cpus_per_node = 30\n  Slurm: scontrol show node: 1 of 4 GPUs of gpu1\n"


def test_the_next_submission_asks_again(ready: Desk, cli: Cli) -> None:
    ready.program("sbatch", "#!/bin/sh\necho 17\n")
    ready.program("srun", "#!/bin/sh\n")
    done = cli("submit", "job.yaml", "--gpus-per-node", "1", "--set", "paths.runs=$HOME/runs")
    (folder,) = (ready.home / "runs").glob("x-*")
    assert "--cpus-per-task=30" in (folder / "job.sh").read_text(), done.err
    assert "cpus_per_node: null" in (folder / "job.yaml").read_text()
    again = cli("submit", str(folder / "job.yaml"), "--gpus-per-node", "2", "--dry-run")
    assert asked(again) == {"--cpus-per-task": "60", "--mem": "250000M"}, "not what one GPU got"


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        (None, "warning: Slurm did not say what a node has (scontrol: it is not on this machine)"),
        ("NodeName=n1 CPUs=4\n", "warning: Slurm shows no node with 1 such GPUs that this job could get"),
        ("something else\n", "warning: Slurm shows no node with 1 such GPUs that this job could get"),
        (
            NODES.replace("CPUEfctv=120 CPUTot=128", "CPUEfctv=many CPUTot=128"),
            "warning: Slurm shows no node with 1 such",
        ),
    ],
)
def test_where_slurm_does_not_say(ready: Desk, cli: Cli, nodes: str | None, text: str) -> None:
    if nodes is None:
        (ready.bin / "scontrol").unlink()
    else:
        (ready.home / "nodes").write_text(nodes)
    done = dry(cli, "gpus_per_node=1")
    assert text in done.err and "so Slurm may give only one: set resources.cpus_per_node" in done.err
    assert asked(done) == {} and "OMP_NUM_THREADS=1" in done.out


def test_nobody_is_asked_for_what_the_profile_knows(desk: Desk, cli: Cli) -> None:
    desk.write(
        "job.yaml",
        "site: gpus\nname: x\ntrain: {script: train.py}\nresources: {time: 1h}\ncontainer: {runtime: none}\n",
    )
    desk.write("train.py")
    desk.program("scontrol", '#!/bin/sh\ntouch "$HOME/asked-$3"\nexit 1\n')
    assert asked(dry(cli)) == {"--cpus-per-task": "64", "--mem": "491520M"}
    assert not (desk.home / "asked-node").exists()
