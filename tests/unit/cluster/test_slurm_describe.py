"""What Slurm says of the cluster: settings, partitions and nodes of several versions, on texts in samples/."""

from pathlib import Path

from slurmddp.cluster.describe import gpus_of, nodes, records, settings

SAMPLES = Path(__file__).parent / "samples"


def sample(name: str) -> str:
    return (SAMPLES / f"{name}.txt").read_text(encoding="utf-8")


def test_settings() -> None:
    found = settings(sample("real-scontrol-config"))
    assert (found["ClusterName"], found["SLURM_VERSION"]) == ("testcluster", "24.11.5")
    assert found["SelectType"] == "select/cons_tres" and found["MaxMemPerNode"] == "UNLIMITED"
    assert found["JobSubmitPlugins"] == "", "(null) is no value"
    assert found["KillWait"] == "5 sec" and found["PriorityFlags"] == ""


def test_partitions() -> None:
    rows = records(sample("real-scontrol-partitions"), "PartitionName")
    assert [row["PartitionName"] for row in rows] == ["main", "debug", "low", "low-warned", "low-cancelled", "high"]
    assert rows[0]["Default"] == "YES" and rows[1]["MaxTime"] == "00:05:00" and rows[0]["QoS"] == "N/A"


def test_nodes_of_a_real_cluster() -> None:
    found = nodes(sample("real-scontrol-nodes"))
    assert [(node.name, node.gpus) for node in found] == [("node1", {"": 2}), ("node2", {"": 2}), ("node3", {"": 1})]
    node = found[0]
    assert (node.architecture, node.cpus, node.memory, node.threads_per_core) == ("x86_64", 4, 6000, 1)
    assert node.partitions[:2] == ("main", "debug") and node.features == () and node.usable


def test_nodes_of_several_versions() -> None:
    """CPUEfctv since 22.05, specialised cores and memory, sockets in Gres, and an administrator's free text."""
    old, typed, drained, silent = nodes(sample("scontrol-nodes-versions"))
    assert (old.cpus, old.memory, old.gpus, old.usable) == (60, 224256, {}, True)
    assert (typed.cpus, typed.threads_per_core, typed.memory) == (120, 2, 500000)
    assert typed.gpus == {"a100": 4} and typed.features == ("a100", "ib", "nvlink")
    assert typed.gres == "gpu:a100:4,nvme:1" and typed.partitions == ("gpu", "preempt")
    assert (drained.cpus, drained.partitions, drained.usable) == (120, ("gpu",), False), "the reason is no field"
    assert drained.features == typed.features
    assert (silent.architecture, silent.memory, silent.usable) == ("aarch64", 857000, False)


def test_gpus() -> None:
    assert gpus_of("(null)") == gpus_of("") == gpus_of("craynetwork:4,nvme") == {}
    assert gpus_of("gpu") == {"": 1} and gpus_of("gpu:8(S:0-1)") == {"": 8}
    assert gpus_of("gpu:a100:2(S:0),gpu:1g.10gb:14(IDX:2-3),gpu:a100:2") == {"a100": 4, "1g.10gb": 14}
