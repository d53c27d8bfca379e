"""Stragglers: the judgement on figures, and the whole way with real processes that are really slowed down."""

import contextlib
import dataclasses
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from slurmddp.records.rank_events import StragglerBegins
from slurmddp.runtime.measure import links
from slurmddp.runtime.measure.links import probe_links
from slurmddp.runtime.measure.pairs import rounds
from slurmddp.runtime.measure.straggler_detection import Figures, Network, Notice, Persistence, Slow, slow_hosts
from slurmddp.runtime.measure.stragglers import Stragglers
from slurmddp.runtime.measure.timing import StepTimer
from slurmddp.runtime.world import World

from . import timed
from .harness import Ranks
from .test_timing import Hand

BURSTS = """
import os, signal, sys, time
folder, names = sys.argv[1], sys.argv[2:]
while not all(os.path.exists(os.path.join(folder, name)) for name in names):
    time.sleep(0.05)
pid = int(open(os.path.join(folder, names[0])).read())
while os.path.exists(os.path.join(folder, "bursts")):
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.06)
    os.kill(pid, signal.SIGCONT)
    time.sleep(0.04)
"""


def figures(
    *rows: tuple[float, float, float], hosts: int | None = None, samples: tuple[float, ...] = ()
) -> list[Figures]:
    """(data, compute, network) of each rank, in milliseconds; `hosts`: dealt to so many hosts, one each by default."""
    hosts = hosts or len(rows)
    return [
        Figures(f"node{rank * hosts // len(rows)}", rank, data / 1000, compute / 1000, network / 1000,
                (data + compute + network + 1) / 1000, samples[rank] if samples else 1.0)
        for rank, (data, compute, network) in enumerate(rows)
    ]  # fmt: skip


def named(found: list[Slow]) -> list[tuple[str, str]]:
    return [(slow.host, slow.part) for slow in found]


class TestOneWindow:
    def test_names_host_part_factor_and_what_it_costs(self) -> None:
        (slow,) = slow_hosts(figures((0, 10, 12), (0, 10, 12), (0, 20, 2), (0, 11, 11)))
        assert (slow.host, slow.rank, slow.part) == ("node2", 2, "compute")
        assert slow.factor == pytest.approx(2.0)
        assert slow.seconds == pytest.approx(0.010)
        (slow,) = slow_hosts(figures((0.1, 10, 12), (9, 10, 2), (0.1, 10, 12)))
        assert (slow.host, slow.part) == ("node1", "data")

    def test_two_hosts_have_no_deviation_to_speak_of(self) -> None:
        assert named(slow_hosts(figures((0, 20, 2), (0, 10, 12)))) == [("node0", "compute")]
        assert slow_hosts(figures((0, 10, 3), (0, 10.5, 2.5))) == []

    def test_small_differences_are_none(self) -> None:
        assert slow_hosts(figures((0, 10, 3), (0, 12, 1), (0, 10.2, 3))) == []

    def test_hosts_that_differ_anyway_need_more_to_stand_out(self) -> None:
        spread = [(0.0, compute, 40 - compute) for compute in (10.0, 14.0, 18.0, 22.0, 26.0)]
        assert slow_hosts(figures(*spread, (0, 30, 10))) == []
        alike = [(0.0, compute, 40 - compute) for compute in (18.0, 17.8, 18.0, 18.2, 18.0)]
        assert named(slow_hosts(figures(*alike, (0, 30, 10)))) == [("node5", "compute")]

    def test_what_nobody_waits_for_is_no_straggler(self) -> None:
        assert slow_hosts(figures((0, 20, 12), (0, 10, 12), (0, 10, 12))) == []

    def test_one_fast_host_accuses_nobody(self) -> None:
        assert slow_hosts(figures((0, 10, 3), (0, 20, 1), (0, 20, 1), (0, 20, 1))) == []

    def test_the_slowest_rank_speaks_for_its_host(self) -> None:
        ranks = figures((0, 10, 12), (0, 10, 12), (0, 10, 12), (0, 20, 2), hosts=2)
        assert [(slow.host, slow.rank) for slow in slow_hosts(ranks)] == [("node1", 3)]

    def test_on_a_single_host_ranks_are_compared(self) -> None:
        ranks = figures((0, 10, 12), (0, 20, 2), (0, 10, 12), hosts=1)
        assert [(slow.host, slow.rank) for slow in slow_hosts(ranks)] == [("node0", 1)]
        assert slow_hosts(figures((0, 10, 0))) == []

    def test_more_samples_are_no_slowness(self) -> None:
        rows = (0.0, 20.0, 1.0), (0.0, 10.0, 11.0), (0.0, 10.0, 11.0)
        assert named(slow_hosts(figures(*rows))) == [("node0", "compute")]
        assert slow_hosts(figures(*rows, samples=(1.5, 0.75, 0.75))) == []
        # Nor is it slowness that a step has costs which do not depend on its samples.
        assert slow_hosts(figures((0, 14, 1), (0, 12, 3), (0, 12, 3), samples=(1.5, 0.75, 0.75))) == []


def test_it_has_to_persist_and_ends_once() -> None:
    slow, persistence = Slow("node1", 1, "compute", 2.0, 0.01), Persistence()
    told: list[list[tuple[bool, str, str]]] = [
        timed.texts(persistence.add([slow] if hit else [])) for hit in (1, 0, 1, 1, 1, 0, 1, 0, 0, 0, 0, 1, 0, 0, 1)
    ]
    assert told[3] == [(True, "node1", "compute")]
    assert told[9] == [(False, "node1", "compute")]
    assert [index for index, notices in enumerate(told) if notices] == [3, 9]


def test_a_notice_says_what_is_slow_and_by_how_much() -> None:
    notice = Notice("node1", 3, "data", 4.2, 0.12)
    assert notice.text() == "node1 is slow in data: 4.2 times the others, 120.0 ms more per step (rank 3)"
    assert notice.event() == StragglerBegins("node1", 3, "data", 4.2, 0.12)


class TestNetwork:
    well, ill = figures((0, 10, 2), (0, 10, 2), (0, 10, 2)), figures((0, 10, 9), (0, 10, 9), (0, 10, 9))

    def test_asks_for_a_probe_when_all_wait_longer_than_usual(self) -> None:
        network = Network()
        assert not any(network.add(self.well, []) for _ in range(20))
        assert [network.add(self.ill, []) for _ in range(6)] == [False, False, True, False, False, False]

    def test_the_others_waits_for_a_straggler_are_not_the_network(self) -> None:
        network = Network()
        for _ in range(10):
            network.add(self.well, [])
        straggler = figures((0, 10, 20), (0, 10, 20), (0, 28, 2))
        assert not any(network.add(straggler, []) for _ in range(10))
        assert not any(network.add(self.ill, [Slow("node1", 1, "data", 2.0, 0.1)]) for _ in range(10))

    def test_slow_from_the_start_is_found_too_and_not_asked_about_for_ever(self) -> None:
        network, ill = Network(), figures((0, 10, 30), (0, 10, 30))
        asked = [number for number in range(100) if network.add(ill, [])]
        assert asked[0] == 2
        assert 3 <= len(asked) <= 5


@pytest.mark.parametrize("count", [3, 4, 5, 8, 513, 1024])
def test_each_host_meets_two_others_in_rounds_that_do_not_grow(count: int) -> None:
    plan = rounds([f"node{number}" for number in range(count)])
    assert len(plan) == 2 + count % 2
    for pairs in plan:
        hosts = [host for pair in pairs for host in pair]
        assert len(hosts) == len(set(hosts))
    met: dict[str, set[str]] = {}
    for one, other in (pair for pairs in plan for pair in pairs):
        met.setdefault(one, set()).add(other)
        met.setdefault(other, set()).add(one)
    assert len(met) == count and all(len(others) == 2 for others in met.values())


def ring(count: int) -> list[tuple[str, str]]:
    return [pair for pairs in rounds([f"node{number}" for number in range(count)]) for pair in pairs]


@pytest.mark.parametrize("count", [3, 4, 5, 8])
def test_the_host_with_slow_links_is_named(count: int) -> None:
    for ill in (f"node{number}" for number in range(count)):
        seconds = {pair: 0.05 if ill in pair else 0.001 + 0.0001 * number for number, pair in enumerate(ring(count))}
        report = links.judge(seconds)
        assert report.host == ill
        assert report.factor > 20


def test_a_single_slow_link_accuses_no_host() -> None:
    report = links.judge({pair: 0.05 if pair == ("node1", "node2") else 0.001 for pair in ring(6)})
    assert report.host is None
    assert report.text() == "the link between node1 and node2 is 50.0 times as slow as the others"
    alike = links.judge(dict.fromkeys(ring(6), 0.001))
    assert (alike.host, alike.factor) == (None, 1.0)
    two = links.judge({("node0", "node1"): 0.05})
    assert (two.host, "node0 and node1" in two.text()) == (None, True)
    assert links.judge({}).host is None


def _probe(world: World, slow_rank: int | None, nodes: list[str] | None) -> links.LinkReport:
    if nodes is not None:
        world = dataclasses.replace(world, node=nodes[world.rank])
    return probe_links(world, None if slow_rank is None else functools.partial(_late, world.rank == slow_rank))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("slow", [0, 1, 2])
def test_probing_finds_the_slow_peer(ranks: Ranks, slow: int) -> None:
    reports = ranks(3, _probe, slow, None)
    assert [report.host for report in reports] == [f"node{slow}"] * 3
    assert len(reports[0].seconds) == 3


@pytest.mark.ranks(3)
def test_probing_goes_by_hosts(ranks: Ranks) -> None:
    (report, *_) = ranks(3, _probe, None, ["left", "right", "right"])
    assert list(report.seconds) == [("left", "right")] and report.seconds["left", "right"] > 0
    assert ranks(3, _probe, None, ["same"] * 3)[0].seconds == {}


@pytest.mark.ranks(3)
def test_slow_links_are_asked_for_found_and_end(ranks: Ranks) -> None:
    results = ranks(3, _watched_links)
    assert timed.texts(results[0]["notices"]) == [(True, "node2", "network"), (False, "node2", "network")]
    assert [result["notices"] for result in results[1:]] == [[], []]
    probes = [result["probes"] for result in results]
    assert probes == [probes[0]] * 3
    assert len(probes[0]) == 1
    # Ten steps unwatched, then windows of ten, then of twenty: all ranks agree, by figures that all have.
    assert [result["lengths"] for result in results] == [[10, 20]] * 3


def _watched_links(world: World) -> dict[str, object]:
    """Steps by a clock that the test moves: 5 ms each, 4 of them waiting for the network, until that is mended."""
    clock = Hand()
    timer = StepTimer(clock=clock)
    watch = Stragglers(world, timer, seconds=0.1)
    notices, probes, lengths, ill, real = [], [], [], True, links._exchange
    links._exchange = functools.partial(_late, world.rank == 2)
    try:
        for step in range(1, 400):
            timer.begin()
            clock.now += 0.001
            timer.mark("forward")
            clock.now += 0.004 if ill else 0.0005
            timer.mark("network")
            timer.end()
            notices += watch.step()
            if watch._length not in lengths:
                lengths.append(watch._length)
            wish = torch.tensor(float(watch.wants_probe))
            dist.all_reduce(wish)
            if wish > 0:
                probes.append(step)
                notices += watch.probe()[1]
            if probes and step > probes[0] + 60:
                ill = False
    finally:
        links._exchange = real
    watch.close()
    return {"notices": notices, "probes": probes, "lengths": lengths[:2]}


def _late(slow: bool, group: dist.ProcessGroup, other: int) -> float:
    content, buffer = (torch.zeros(1, dtype=torch.uint8) for _ in range(2))
    links.both_ways(content, buffer, group, other)
    began = time.perf_counter()
    if slow:
        time.sleep(0.5)
    links.both_ways(content, buffer, group, other)
    return time.perf_counter() - began


@pytest.mark.ranks(3)
def test_a_slow_dataset_is_noticed_and_its_end_too(ranks: Ranks, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.touch()
    results = ranks(3, _watched, tmp_path, slow)
    # A busy machine may also slow a rank's computing down.
    notices = [notice for notice in results[0]["notices"] if notice.part == "data"]
    assert timed.texts(notices) == [(True, "node1", "data"), (False, "node1", "data")]
    assert notices[0].seconds == pytest.approx(0.03, rel=0.5)
    assert [result["notices"] for result in results[1:]] == [[], []]
    assert results[0]["means"]["network"] > 0


@pytest.mark.ranks(3)
def test_stop_bursts_are_noticed_and_their_end_too(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "bursts").touch()
    others = [f"pid-{rank}" for rank in (1, 0, 2)]
    with subprocess.Popen([sys.executable, "-c", BURSTS, str(tmp_path), *others]) as stopper:
        try:
            notices = ranks(3, _watched, tmp_path, None)[0]["notices"]
        finally:
            stopper.kill()
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGCONT)
    assert {notice.host for notice in notices} == {"node1"}
    assert (True, "node1", "compute") in timed.texts(notices)
    assert (False, "node1", "compute") in timed.texts(notices)


def _watched(world: World, folder: Path, slow: Path | None) -> dict[str, object]:
    return timed.train(world, folder, seconds=120, window=0.4, slow=slow)
