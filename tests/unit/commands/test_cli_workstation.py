"""`run` and `submit --site local` on a machine without Slurm: which site, which GPUs, how many ranks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from slurmddp.launch.this_machine import count_gpus
from tests.helpers import Desk, Result

Cli = Callable[..., Result]

SMI = '#!/bin/bash\nfor i in $(seq 0 $(({count} - 1))); do echo "GPU $i: NVIDIA RTX (UUID: x)"; done\n'


@pytest.fixture
def workstation(desk: Desk) -> Desk:
    """A machine that no profile matches, with two GPUs and a script."""
    for name in ("gpus", "cores", "here"):
        (desk.config / "sites" / f"{name}.yaml").unlink()
    desk.write("train.py")
    desk.program("nvidia-smi", SMI.format(count=2))
    return desk


@pytest.mark.parametrize(
    ("options", "gpus", "ranks"),
    [
        ((), 2, 2),
        (("--gpus-per-node", "1"), 1, 1),
        (("--gpus-per-node", "0"), 0, 1),
        (("--set", "resources.ranks_per_node=1"), 1, 1),
        (("--set", "resources.ranks_per_node=3"), 0, 3),
    ],
)
def test_the_gpus_of_this_machine(workstation: Desk, cli: Cli, options: tuple[str, ...], gpus: int, ranks: int) -> None:
    assert cli("check", "train.py", "--site", "local", "--write", "rendered", *options).code == 0
    node = (workstation.project / "rendered" / "node.sh").read_text()
    assert f"\nranks={ranks} " in node and f" gpus_per_node={gpus} " in node
    # torch takes the GPUs that it sees
    assert ('export CUDA_VISIBLE_DEVICES=""' in node or "export CUDA_VISIBLE_DEVICES=''" in node) == (gpus == 0)


def test_a_job_of_this_machine_takes_its_gpus(workstation: Desk, cli: Cli) -> None:
    assert cli("init", "lm.yaml", "--site", "local", "--task", "lm").code == 0
    assert cli("check", "lm.yaml", "--write", "rendered").code == 0
    assert " gpus_per_node=2 " in (workstation.project / "rendered" / "node.sh").read_text()


def test_more_gpus_than_there_are(workstation: Desk, cli: Cli) -> None:
    done = cli("submit", "train.py", "--site", "local", "--gpus-per-node", "3")
    assert done.code == 2 and "3 GPUs per node are more than the 2 of this machine" in done.err
    workstation.program("nvidia-smi", "#!/bin/bash\nexit 9\n")
    done = cli("submit", "train.py", "--site", "local", "--gpus-per-node", "1", CUDA_VISIBLE_DEVICES="")
    assert done.code == 2 and "no GPU was found on this machine" in done.err


def test_run_inside_a_slurm_job_says_so(workstation: Desk, cli: Cli) -> None:
    done = cli("run", "train.py", SLURM_JOB_ID="77")
    assert done.code == 2 and "this shell is in Slurm job 77" in done.err and "--site generic" in done.err


def test_gpus_are_counted_without_nvidia_smi(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    nothing = {"PATH": str(tmp_path)}
    assert count_gpus(nothing, tmp_path) == 2
    assert count_gpus({**nothing, "CUDA_VISIBLE_DEVICES": "3,5,7"}, tmp_path) == 3
    assert count_gpus({**nothing, "CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
