"""Whether NCCL will find InfiniBand in the container: on folders in place of /sys, /dev and the library's."""

import shutil
from pathlib import Path

import pytest

from slurmddp.runtime.preflight.checks import rdma


class Node:
    """A root folder with adapters, device files and the drivers of libibverbs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lib = root / "lib"
        (self.lib / "libibverbs").mkdir(parents=True)
        (root / "dev").mkdir()

    def adapter(self, name: str, driver: str) -> None:
        device = self.root / "sys/class/infiniband" / name / "device"
        device.mkdir(parents=True)
        (self.root / "sys/drivers" / driver).mkdir(parents=True, exist_ok=True)
        (device / "driver").symlink_to(self.root / "sys/drivers" / driver)

    def devices(self, *names: str) -> None:
        for name in names:
            path = self.root / "dev/infiniband" / name
            path.parent.mkdir(exist_ok=True)
            path.touch()

    def providers(self, *names: str) -> None:
        for name in names:
            (self.lib / name).touch()

    def look(self) -> list[str]:
        found = list(rdma.look(self.root, lambda: self.lib))
        assert all(finding.level == "warn" for finding in found)
        return [finding.text for finding in found]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = Node(tmp_path)
    node.adapter("mlx5_0", "mlx5_core")
    node.devices("rdma_cm", "umad0", "uverbs0")
    node.providers("libibverbs/libmlx5-rdmav34.so")
    return node


def test_all_is_there(node: Node) -> None:
    assert node.look() == []


def test_a_node_without_adapters_is_not_looked_at(tmp_path: Path) -> None:
    assert list(rdma.look(tmp_path, lambda: None)) == []


def test_a_contained_container_without_the_devices(node: Node) -> None:
    shutil.rmtree(node.root / "dev/infiniband")
    assert [text.split(" - ")[0] for text in node.look()] == [
        "has mlx5_0, but sees no /dev/infiniband/uverbs*: NCCL falls back to TCP"
    ]


def test_devices_that_nobody_can_open(node: Node) -> None:
    (node.root / "dev/infiniband/uverbs0").unlink()
    (node.root / "dev/infiniband/uverbs0").mkdir()
    (text,) = node.look()
    assert "cannot open" in text and "(Is a directory): NCCL falls back to TCP - remove /dev/infiniband" in text
    node.devices("uverbs1")  # another job's are no matter, as long as one is ours
    assert node.look() == []


def test_an_image_without_the_library(node: Node) -> None:
    (text,) = (finding.text for finding in rdma.look(node.root, lambda: None))
    assert text.startswith(
        "has mlx5_0, but cannot load libibverbs.so.1: NCCL falls back to TCP - the image needs rdma-core"
    )


def test_where_the_loader_finds_a_library() -> None:
    folder = rdma.folder_of("libm.so.6")
    assert folder is not None and (folder / "libm.so.6").exists()
    assert rdma.folder_of("libnothere.so.1") is None


@pytest.mark.parametrize(
    ("driver", "there", "lacking"),
    [
        ("mlx5_core", [], "mlx5"),
        ("mlx5_core", ["libibverbs/libmlx4-rdmav34.so", "libibverbs/libmlx5.so"], "mlx5"),
        ("mlx5_core", ["libmlx5-rdmav2.so"], None),
        ("bnxt_en", ["libibverbs/libbnxt_re-rdmav34.so"], None),
        ("of_tomorrow", ["libibverbs/libmlx5-rdmav34.so"], None),
        ("of_tomorrow", [], "any adapter"),
    ],
)
def test_the_adapter_s_own_driver_is_wanted(tmp_path: Path, driver: str, there: list[str], lacking: str | None) -> None:
    node = Node(tmp_path)
    node.adapter("ibp12s0", driver)
    node.devices("uverbs0")
    node.providers(*there)
    wanted = f"has ibp12s0, but no libibverbs driver for {lacking} in {node.lib}: NCCL falls back to TCP"
    assert [text.split(" - ")[0] for text in node.look()] == ([] if lacking is None else [wanted])


def test_adapters_without_a_driver_link(tmp_path: Path) -> None:
    (tmp_path / "hfi1_0").mkdir()
    assert rdma.drivers(tmp_path) == {"hfi1_0": ""}
    (tmp_path / "file").touch()
    assert rdma.drivers(tmp_path / "file") == {}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"NCCL_IB_DISABLE": "0", "NCCL_NET": "IB"}, False),
        ({"NCCL_IB_DISABLE": "1"}, True),
        ({"NCCL_NET": "Socket"}, True),
        ({"NCCL_NET": "AWS Libfabric"}, True),
        ({"NCCL_NET_PLUGIN": "ofi"}, True),
    ],
)
def test_where_nccl_is_told_to_go_another_way(variables: dict[str, str], expected: bool) -> None:
    assert rdma.refused(variables) is expected
