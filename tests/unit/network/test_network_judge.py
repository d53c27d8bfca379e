"""What a measurement means for the run, and which pairs of nodes tell who is slow."""

import itertools
import json

import pytest

from slurmddp.records.events import keys_of
from slurmddp.records.job_events import Measured as JobMeasured
from slurmddp.records.network import Verdict, not_measured, read
from slurmddp.runtime.measure.pairs import rounds
from slurmddp.runtime.network.judge import Measured, Wish, explain, verdict
from slurmddp.runtime.network.nccl_log import Transport

IB = Transport("IB", ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"), "IB", gpudirect=True, version="2.21.5")
TCP = Transport("Socket", ("ib0",), reasons=("libibverbs is missing",))


def nccl(bus: float, *transports: Transport) -> Measured:
    named = {f"node{number}": transport for number, transport in enumerate(transports, 1)}
    return Measured("nccl", named, "ib0", bus, {1 << 30: bus}, 7.04)


def test_a_fast_network_is_reported() -> None:
    found = verdict(nccl(187.4, IB, IB), Wish("infiniband", 150))
    assert found.lines() == ["ok NCCL over IB mlx5_0..3, bus 187 GB/s"]
    assert keys_of(found.measured) == {
        "result": "ok", "backend": "nccl", "transport": "IB", "devices": ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"),
        "bus_gb_s": 187.4, "speeds": {"1073741824": 187.4}, "nccl": "2.21.5", "measure_seconds": 7.0,
    }  # fmt: skip


def test_gloo_is_reported_with_its_interface() -> None:
    measured = Measured("gloo", {}, "eth0", 0.9)
    lines = verdict(measured, Wish("infiniband")).lines()
    assert lines == ["ok gloo over TCP eth0, bus 0.9 GB/s"], "gloo has TCP only"


@pytest.mark.parametrize(
    ("fabric", "todo"),
    [
        ("infiniband", "libibverbs, and the container /dev/infiniband"),
        ("roce", "libibverbs"),
        ("slingshot11", "aws-ofi-nccl"),
        ("efa", "aws-ofi-nccl"),
        ("gpudirect-tcp", "Google's plugin"),
    ],
)
def test_tcp_on_a_faster_network_fails_the_run_and_says_what_to_do(fabric: str, todo: str) -> None:
    first, *_ = verdict(nccl(2.0, TCP, TCP, TCP, TCP), Wish(fabric)).lines()
    nodes = "node1, node2, node3 and 1 more"
    why = f"this site's network is {fabric} (libibverbs is missing) - "
    assert first.startswith(f"tcp NCCL uses TCP (Socket ib0) on {nodes}, but {why}")
    assert todo in first and first.endswith("; or set network.allow_socket: true")


@pytest.mark.parametrize("wish", [Wish("infiniband", allow_socket=True), Wish("ethernet"), Wish("")])
def test_tcp_is_fine_where_nothing_better_is_promised_or_it_is_allowed(wish: Wish) -> None:
    assert verdict(nccl(2.0, TCP, TCP), wish).lines()[0] == "ok NCCL over Socket ib0, bus 2 GB/s"


def test_few_nodes_on_tcp_are_named_for_exclusion() -> None:
    lines = verdict(nccl(2.0, IB, TCP, IB), Wish("infiniband")).lines()
    assert lines[0].startswith("tcp NCCL uses TCP (Socket ib0) on node2,")
    assert lines[1:] == ["bad node2 NCCL uses TCP there (libibverbs is missing)"]


def test_a_slow_network_is_reported_with_what_the_pairs_told() -> None:
    lines = verdict(nccl(12, IB, IB), Wish("infiniband", 150), {"node2": "slow network"}, "slow: node2").lines()
    assert lines[0] == "low NCCL over IB mlx5_0..3, bus 12 GB/s, below network.min_bandwidth (150 GB/s); slow: node2"
    assert lines[1:] == ["bad node2 slow network"]


def test_no_measurement_is_no_failure() -> None:
    assert not_measured('node3: "x"').lines() == ['none not measured: node3: "x"']


def test_a_verdict_is_read_as_it_was_written() -> None:
    found = verdict(nccl(12, IB, IB), Wish("infiniband", 150), {"node2": "slow network"}, "slow: node2")
    assert read(json.loads(json.dumps(found.write()))) == found
    assert read({"text": "x", "measured": {"result": "ok", "speeds": 3}}) == Verdict("x", JobMeasured("ok"))
    for damaged in (None, [], {}, {"text": 3}):
        with pytest.raises(ValueError, match="no verdict"):
            read(damaged)


def play(nodes: list[str], slow_nodes: set[str], slow_links: set[frozenset[str]]) -> tuple[dict[str, str], str]:
    """All rounds, on a network with these faults."""
    tested = [pair for pairs in rounds(nodes) for pair in pairs]
    ill = {pair for pair in tested if slow_nodes & set(pair) or frozenset(pair) in slow_links}
    return explain({pair: 5.0 if pair in ill else 120.0 for pair in tested}, 100)


@pytest.mark.parametrize("count", [3, 4, 5, 6, 7, 64, 301])
def test_any_one_slow_node_is_named(count: int) -> None:
    nodes = [f"n{number}" for number in range(count)]
    for node in {*nodes[:8], *nodes[-2:]}:
        named, told = play(nodes, {node}, set())
        assert list(named) == [node] and told == f"slow: {node}", (node, named, told)
        assert named[node].startswith("slow network: 5 GB/s with ") and " and 5 GB/s with " in named[node]


@pytest.mark.parametrize("count", [4, 6, 64])
def test_two_slow_nodes_are_named_or_nobody_is(count: int) -> None:
    nodes = [f"n{number}" for number in range(count)]
    for pair in itertools.combinations(nodes[:6], 2):
        named, told = play(nodes, set(pair), set())
        assert set(named) <= set(pair) and (named or "not isolated" in told), (pair, named, told)


def test_a_slow_link_is_named_only_if_it_was_tested() -> None:
    nodes = ["n0", "n1", "n2", "n3"]
    for first, second in (("n0", "n1"), ("n1", "n2"), ("n3", "n0")):
        message = f"slow link: {first}-{second} (5 GB/s); these nodes are fast with others"
        assert play(nodes, set(), {frozenset({first, second})}) == ({}, message)
    named, told = play(nodes, set(), {frozenset({"n0", "n2"})})
    assert not named and told.startswith("not isolated: each pair of nodes alone reaches 100 GB/s")


def test_two_nodes_and_a_slow_switch_are_not_isolated() -> None:
    assert play(["n0", "n1"], {"n1"}, set())[1].startswith("not isolated: with two nodes")
    assert play(["n0", "n1", "n2", "n3"], {"n0", "n1", "n2", "n3"}, set()) == (
        {},
        "not isolated: no pair of nodes is fast",
    )
