"""The measurement of the network: real processes with gloo on the loopback, one per node."""

import contextlib
import datetime
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from slurmddp.records.job_events import Measured
from slurmddp.records.network import Verdict
from slurmddp.records.network import read as read_verdict
from slurmddp.run.create import write_key
from slurmddp.runtime.network.groups import trouble
from slurmddp.runtime.network.settings import Settings, read

from .harness import PATIENCE, ROOT, free_port

NAMES = ("n0", "n1", "n2")


@dataclass
class Nodes:
    """Three nodes; those of them that are started share a folder for the results."""

    folder: Path
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        write_key(self.folder / "rendezvous.key")

    def measure(self, *options: str, absent: str = "", program: str = "") -> tuple[Verdict, list[str]]:
        """Return the verdict, and what the nodes wrote to stderr. program: instead of the module."""
        started = [self._start(number, options, program) for number, name in enumerate(NAMES) if name != absent]
        errors = [process.communicate(timeout=PATIENCE)[1] for process in started]
        return read_verdict(json.loads((self.folder / "verdict.json").read_text())), errors

    def _start(self, number: int, options: tuple[str, ...], program: str) -> subprocess.Popen[str]:
        places = {
            "node": NAMES[number], "nodes": " ".join(NAMES), "number": number, "head": "127.0.0.1", "port": self.port,
            "logs": self.folder, "scratch": self.folder, "run": self.folder,
        }  # fmt: skip
        words = [f"--{name}={value}" for name, value in places.items()]
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
        return subprocess.Popen(
            [sys.executable, *(("-c", program) if program else ("-m", "slurmddp.runtime.network")), *words, *options],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )


def test_a_network_below_the_floor_is_measured_in_pairs(tmp_path: Path) -> None:
    """All pairs are slow, so nobody is named. The site's promise is about NCCL."""
    found, errors = Nodes(tmp_path).measure("--min-bandwidth=1000", "--fabric=infiniband")
    facts = found.measured
    assert found.text.startswith("gloo over TCP lo, bus ") and (facts.result, found.bad) == ("low", {}), errors
    assert found.text.endswith("below network.min_bandwidth (1e+03 GB/s); not isolated: no pair of nodes is fast")
    assert next(iter(facts.speeds)) == "65536" and max(facts.speeds.values()) == facts.bus_gb_s


def test_a_node_that_does_not_start_is_named(tmp_path: Path) -> None:
    found, _ = Nodes(tmp_path).measure("--wait=8", absent="n1")
    assert found == Verdict("not measured: n1 did not start within 8 s", Measured("none"))


#: The measurement with less patience. On node n1, a call for the further groups does harm instead of its work.
TROUBLED = """
import os, sys, time
import torch.distributed as dist
from slurmddp.runtime.network import __main__, groups, rank
rank._GROUPS = 3.0
if "--node=n1" in sys.argv:
    {function} = lambda *args, **options: {harm}
__main__.leave(__main__.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("function", "harm", "text"),
    [
        ("groups.use", "time.sleep(600)", " (no answer within 3 s): n1 did not come"),
        pytest.param(
            *("dist.new_group", "time.sleep(600)", " (no answer within 3 s): no result on any node"),
            marks=pytest.mark.long,
        ),
        pytest.param("dist.new_group", "os._exit(9)", ": no result on any node", marks=pytest.mark.long),
    ],
)
def test_a_node_that_does_not_join_a_further_group(tmp_path: Path, function: str, harm: str, text: str) -> None:
    """The first group works, so the network was measured."""
    found, errors = Nodes(tmp_path).measure(program=TROUBLED.format(function=function, harm=harm))
    facts = found.measured
    assert found.text.startswith("gloo over TCP lo, bus ") and text in found.text, (found, errors)
    assert "a further process group of all ranks does not work (" in found.text
    assert found.text.endswith(
        " - DDP alone has one group; FSDP, tensor and pipeline parallelism have more, and would hang"
    )
    assert (facts.result, facts.backend) == ("groups", "gloo") and facts.bus_gb_s
    assert list(found.bad) == (["n1"] if "did not come" in text else []), found


@contextlib.contextmanager
def intruder(port: int, values: dict[str, str]) -> Iterator[None]:
    """Somebody on the network who writes these values into the nodes' store, again and again."""
    done = threading.Event()

    def write() -> None:
        store = None
        while not done.wait(0.01):
            with contextlib.suppress(RuntimeError):  # there is no store yet, or no more
                store = store or TCPStore("127.0.0.1", port, timeout=datetime.timedelta(seconds=1))
                for name, value in values.items():
                    store.set(name, value)

    thread = threading.Thread(target=write)
    thread.start()
    yield
    done.set()
    thread.join()


def test_forged_speeds_blame_no_node(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    pairs = itertools.permutations(NAMES, 2)
    forged = {f"speed/{number}/{a}/{b}": "0" if "n2" in (a, b) else "5000" for a, b in pairs for number in range(4)}
    with intruder(nodes.port, forged):
        found, errors = nodes.measure("--min-bandwidth=1000")
    assert "somebody else wrote speed/" in found.text and "not measured" in found.text, errors
    assert not found.bad


def place(nodes: int, ranks: int, folder: Path) -> Settings:
    names = [f"n{number}" for number in range(nodes)]
    write_key(folder / "rendezvous.key")
    words = {
        "run": folder,
        "node": "n0",
        "nodes": " ".join(names),
        "number": 0,
        "head": "n0",
        "port": 1,
        "ranks": ranks,
    }
    return read([f"--{name}={value}" for name, value in (words | {"logs": folder, "scratch": folder}).items()])


@pytest.mark.parametrize(
    ("nodes", "ranks", "missing", "text"),
    [
        (2, 1, (), ""),
        (2, 4, (), ""),
        (
            2,
            4,
            ("begun/some ranks/5", "done/some ranks/0", "done/some ranks/4"),
            "of some ranks does not work (why): n1 did not come",
        ),
        (4, 2, ("done/all ranks/5", "done/all ranks/4"), "of all ranks does not work (why): no result on n2"),
        (3, 1, ("done/some ranks/2",), "of some ranks does not work (why): no result on n2"),
        (3, 1, ("done/some ranks/1",), ""),  # it has no part in that group
        (3, 1, ("done/all ranks/0", "done/all ranks/1", "done/all ranks/2"), "no result on any node"),
    ],
)
def test_which_node_a_group_lacks(tmp_path: Path, nodes: int, ranks: int, missing: tuple[str, ...], text: str) -> None:
    found, named = trouble(place(nodes, ranks, tmp_path), lambda key: key not in missing, "why")
    assert found.endswith(text) and bool(found) == bool(text)
    assert list(named) == (["n1"] if "did not come" in text else [])
