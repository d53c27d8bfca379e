"""container.runtime: pyxis. Only the text is checked: there is no pyxis to run it with."""

from pathlib import Path

import pytest

from slurmddp.errors import UserError
from slurmddp.launch.problems import _image
from slurmddp.render.per_node import node_commands
from tests.helpers import LM_JOB, Desk, check_bash

JOB = (
    LM_JOB
    + """\
container: {runtime: pyxis, image: /i/t.sqsh, options: [--no-container-mount-home], binds: ["/a b:/c:ro"]}
resources: {nodes: 2, time: 1h}
paths: {cache: /cache}
environment: {WORDS: "two words"}
"""
)


def test_srun_makes_the_container_in_a_step_of_its_own(desk: Desk, tmp_path: Path) -> None:
    _, node = desk.scripts(JOB)
    check_bash(node, "node.sh", tmp_path)
    assert "srun --overlap --nodes=1 --ntasks=1" in node
    assert '--container-image="$image" --container-workdir="$workdir" --no-container-mount-home' in node
    mounts = """"$run:$run:rw,$cache:$cache:rw,$scratch:$scratch:rw"',/a b:/c:ro',/data/books:/data/books:ro"""
    assert f"mounts={mounts}\n" in node
    assert "--nv" not in node, "enroot brings the GPUs"
    assert node.rstrip().endswith('exec "${container[@]}" "${torchrun[@]}" "${program[@]}"')


def test_variables_win_over_those_of_the_image(desk: Desk) -> None:
    _, node = desk.scripts(JOB, "network.interface=ib0")
    (line,) = [line for line in node.splitlines() if line.startswith("container+=(")]
    assert 'NCCL_SOCKET_IFNAME="$NCCL_SOCKET_IFNAME"' in line and 'WORDS="$WORDS"' in line
    assert 'env PYTHONPATH="$code"\n' in node
    assert node.index("export WORDS=") < node.index("container+=(")


def test_it_says_that_it_was_never_run(desk: Desk) -> None:
    assert any("pyxis was never run" in note.text for note in desk.plan(JOB).notes if note.level == "warning")


def test_without_slurm_nothing_can_start_it(desk: Desk) -> None:
    with pytest.raises(UserError, match=r"pyxis needs Slurm's srun"):
        node_commands(desk.plan(JOB), "head", 29500)


def test_its_image_is_no_sif(desk: Desk) -> None:
    path = desk.write("t.sqsh", "hsqs")
    found = desk.resolve(JOB, f"container.image={path}")
    plan = desk.plan(JOB, f"container.image={path}")
    assert list(_image(plan, found.site, "", "")) == []
    (error,) = _image(desk.plan(JOB, "container.image=/no.sqsh"), found.site, "", "")
    assert "does not exist" in str(error)
