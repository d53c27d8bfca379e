"""The cluster as pytest fixtures. Where it cannot run, the tests that use it are skipped, with the reason.

SLURMDDP_REQUIRE_CLUSTER=1    no cluster is a failure, not a skip (for CI)
SLURMDDP_CLUSTER_NAME=NAME    use the running instance NAME (that of `make cluster-up` is "default")
"""

import os
from collections.abc import Generator, Iterator

import pytest

from .cluster import Cluster
from .errors import ClusterError
from .images import make_torch_image
from .runs import story, submitted

#: The files that take longest, longest first: one that starts last would keep one worker busy when the others are done.
LONGEST = ("others", "recovery", "images", "faults", "runs", "training", "preflight")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the longest files: with `--dist loadfile --no-loadscope-reorder`, workers take files in this order."""
    first = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: first.get(item.path.name, len(first)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What fails once in a hundred runs has to be understood from this one report."""
    report = yield
    if report.failed and submitted:
        try:
            told = story(submitted[-1])
        except Exception as error:  # noqa: BLE001 - a cluster that is down, say; raised here, it would end this worker
            told = f"could not be read: {error!r}"
        report.sections.append((f"the newest run, {submitted[-1].id}", told))
    return report


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A cluster of this session's own, started at its first use and brought down at its end."""
    running = os.environ.get("SLURMDDP_CLUSTER_NAME")
    cluster = Cluster(running or f"pytest-{os.getpid()}")
    try:
        if running:
            if not cluster.is_up():
                raise ClusterError(f"the cluster {running} is not up")
        else:
            cluster.up(owned=True)
    except ClusterError as error:
        reason = f"no test cluster: {error}"
        if os.environ.get("SLURMDDP_REQUIRE_CLUSTER") == "1":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    yield cluster
    if not running:
        cluster.down()


@pytest.fixture
def fresh_cluster(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with hosts up, cables in, no jobs, all nodes idle: for a test that breaks things, and after it."""
    cluster.reset()
    yield cluster
    cluster.reset()


@pytest.fixture(scope="session")
def torch_image(cluster: Cluster) -> str:
    """A finished image with torch, as a path on the hosts; from the cache, or built there once (15 s)."""
    return make_torch_image(cluster)


@pytest.fixture(scope="session")
def base_image_root(cluster: Cluster) -> str:
    """The folder with torch for `Bootstrap: localimage` / `From:`, as a path on the hosts."""
    return cluster.torch_image_root


@pytest.fixture(scope="session")
def plain_image_root(cluster: Cluster) -> str:
    """The same without torch: 200 MB, where an image with Python is enough."""
    return cluster.plain_image_root
