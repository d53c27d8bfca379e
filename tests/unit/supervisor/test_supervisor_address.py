"""Which node of its step this is, and the address that the others reach it by, with stand-ins for ip and scontrol."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmddp.records.refusal import Refused
from slurmddp.supervisor.node import Place, find_place

IP = """\
#!/bin/sh
case "$*" in
*"addr show"*)
  echo '1: lo    inet 127.0.0.1/8 scope host lo'
  echo '2: ib0    inet 10.0.0.7/24 brd 10.0.0.255 scope global ib0'
  echo '3: ib01    inet 10.1.0.7/16 brd 10.1.255.255 scope global ib01' ;;
*"route get 10.0.0.9") exit 2 ;;
*) echo "$5 dev ib0 src 10.0.0.7 uid 0" ;;
esac
"""
GETENT = """\
#!/bin/sh
case $2 in n1 | n7 | n9) echo "10.0.0.${2#n} STREAM $2" ;; *) exit 2 ;; esac
"""


@pytest.fixture
def step(tmp_path: Path) -> dict[str, str]:
    """The variables of node n7, the second of its step."""
    for name, text in (("ip", IP), ("getent", GETENT), ("scontrol", '#!/bin/sh\nprintf "%s\\n" $3\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_STEP_NODELIST": "n1 n7", "SLURM_NODEID": "1"}


def test_the_address_is_that_of_the_way_to_the_head(step: dict[str, str]) -> None:
    assert find_place("n7", "", False, step) == Place(1, "n1", "ib0", "10.0.0.7", "10.0.0.7/24")


def test_the_heads_is_that_of_the_way_to_the_second_node(step: dict[str, str]) -> None:
    step |= {"SLURM_STEP_NODELIST": "n7 n1", "SLURM_NODEID": "0"}
    assert find_place("n7", "", False, step) == Place(0, "n7", "ib0", "10.0.0.7", "10.0.0.7/24")
    step["SLURM_STEP_NODELIST"] = "n7 n9"
    with pytest.raises(Refused, match=r"has no route to n9 \(10\.0\.0\.9\)"):
        find_place("n7", "", False, step)


@pytest.mark.parametrize(
    ("wanted", "exact", "interface", "network"),
    [
        ("ib", False, "ib0", "10.0.0.7/24"),
        ("ib01", True, "ib01", "10.1.0.7/16"),
        ("ib01", False, "ib01", "10.1.0.7/16"),
    ],
)
def test_an_interface_of_this_name(
    step: dict[str, str], wanted: str, exact: bool, interface: str, network: str
) -> None:
    assert find_place("n7", wanted, exact, step) == Place(1, "n1", interface, network.partition("/")[0], network)


def test_what_is_not_there_is_said(step: dict[str, str]) -> None:
    with pytest.raises(Refused, match="has no interface ib with an IPv4 address; it has: lo ib0 ib01"):
        find_place("n7", "ib", True, step)
    with pytest.raises(Refused, match="cannot resolve the name of the head node, n2"):
        find_place("n7", "", False, {**step, "SLURM_STEP_NODELIST": "n2 n7"})
    with pytest.raises(Refused, match="scontrol does not name the nodes of this step"):
        find_place("n7", "", False, {**step, "SLURM_STEP_NODELIST": ""})
    with pytest.raises(Refused, match="cannot run scontrol: "):
        find_place("n7", "", False, {**step, "PATH": "/nowhere"})


def test_beside_the_ranks_it_is_one_of_the_attempts_nodes(step: dict[str, str]) -> None:
    step |= {"SLURMDDP_STEP": "attach", "SLURMDDP_ATTACH_NODES": "n1 n3 n7", "SLURM_NODEID": "0"}
    assert find_place("n7", "", False, step).node_rank == 2
    with pytest.raises(Refused, match="is not one of the attempt's nodes: n1 n3 n7"):
        find_place("n8", "", False, step)
