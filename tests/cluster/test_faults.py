"""Each fault once, at a moment of chance, on a real Slurm with real Apptainer; see proof.py for what has to hold.

SLURMDDP_FAULTS_SEED=N repeats the moments of an earlier session, which printed N.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from .cluster import Cluster
from .proof import SCENARIOS, Bench, Outcome, Scenario, play

pytestmark = pytest.mark.cluster

SEED = int(os.environ.get("SLURMDDP_FAULTS_SEED") or random.SystemRandom().randrange(10**6))
#: Runs at a time: as many as find room on the three nodes.
AT_A_TIME = 4


@pytest.fixture(scope="module")
def bench(cluster: Cluster, torch_image: str) -> Iterator[Bench]:
    cluster.reset()
    bench = Bench.on(cluster, torch_image)
    yield bench
    bench.close()


class Player:
    """Plays a scenario when it is asked for; those that do not disturb each other, from then on, side by side."""

    def __init__(self, bench: Bench, chosen: list[Scenario]) -> None:
        self._bench = bench
        self.before = files_of_alice(bench.alice.cluster)  # of other tests
        self.hit: set[str | None] = set()  # nodes with a fault
        self._pool = ThreadPoolExecutor(AT_A_TIME)
        self._together = [scenario for scenario in chosen if not scenario.alone]
        for same in {scenario.undisturbed: scenario for scenario in chosen}.values():
            self._pool.submit(bench.reference, same)  # what goes wrong there, whoever needs it is told
        self._started: dict[str, Future[Outcome]] = {}

    def outcome(self, scenario: Scenario) -> Outcome:
        if scenario.alone:
            for future in self._started.values():
                future.exception()  # waits
            self._bench.alice.cluster.reset()
            return self._play(scenario)
        for each in self._together:
            if each.name not in self._started:
                self._started[each.name] = self._pool.submit(self._play, each)
        try:
            return self._started[scenario.name].result()
        except BaseException:
            del self._started[scenario.name]  # asked for again, it is played again
            raise

    def _play(self, scenario: Scenario) -> Outcome:
        outcome = play(self._bench, scenario, random.Random(f"{SEED} {scenario.name}"))
        self.hit.add(outcome.injected.node)
        return outcome

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def player(bench: Bench, request: pytest.FixtureRequest) -> Iterator[Player]:
    chosen = [item.callspec.params["scenario"] for item in request.session.items if hasattr(item, "callspec")
              and isinstance(item.callspec.params.get("scenario"), Scenario)]  # fmt: skip
    player = Player(bench, chosen)
    yield player
    player.close()
    bench.alice.cluster.reset()


def parameter(scenario: Scenario) -> Any:
    return pytest.param(scenario, id=scenario.name.replace(" ", "-"), marks=[pytest.mark.long] if scenario.long else [])


@pytest.mark.parametrize("scenario", [parameter(scenario) for scenario in SCENARIOS])
def test_a_run_survives(player: Player, scenario: Scenario) -> None:
    print(f"SLURMDDP_FAULTS_SEED={SEED}")
    outcome = player.outcome(scenario)
    print(outcome.injected, outcome.cost)


def files_of_alice(cluster: Cluster) -> set[tuple[str, str]]:
    """(node, path) of what is hers in the nodes' shared memory and /tmp, without the caches that compilers keep."""
    caches = (
        "-path '/tmp/slurmddp-1000/*' -regex '.*/\\(triton\\|inductor\\|miopen\\)' -prune -o -path /tmp/slurmddp-1000"
    )
    find = f"find /dev/shm /tmp -mindepth 1 -user alice \\( {caches} -o -print \\)"
    return {(node, path) for node in cluster.nodes for path in cluster.sh(node, find, user="root").stdout.splitlines()}


def test_nothing_of_the_user_is_left_on_the_nodes(player: Player, cluster: Cluster) -> None:
    """Once all runs are over: no process, no shared memory, no scratch folder. Only a node that a job has lost keeps
    our code, until the next attempt on it."""
    cluster.reset()  # the last fault may have left a host down
    assert [cluster.processes(node) for node in cluster.nodes] == [[]] * len(cluster.nodes)
    left = files_of_alice(cluster) - player.before
    code = {(node, path) for node, path in left if path.startswith("/tmp/slurmddp-1000/")}
    assert not left - code and {node for node, _ in code} <= player.hit, left
