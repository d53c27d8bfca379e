"""The table of NGC releases."""

import re

from slurmddp.images.registry.image import RegistryImage
from slurmddp.images.registry.reference import parse_reference
from slurmddp.images.releases import Release, of_reference, releases, reported, tag_of


def test_a_release_has_what_the_table_says() -> None:
    assert releases()["25.04"] == Release(
        tag="25.04",
        cuda="12.9.0.036",
        torch="2.7.0a0+79aa17489c",
        driver="575.51.02",
        nccl="2.26.3",
        python="3.12",
    )
    assert releases()["25.04"].reference == "nvcr.io/nvidia/pytorch:25.04-py3"


def test_unknown_values_stay_unknown_and_weak_ones_are_marked() -> None:
    assert releases()["24.01"] == Release("24.01", None, "2.2.0a0+81ea7a4", None, None, None)
    assert releases()["25.02"].triton == ("cuda", "driver", "nccl")
    assert releases()["25.08"].weak == ("cuda",)
    assert releases()["25.08"].driver is None


def test_what_a_registry_reports_is_marked_as_its() -> None:
    digest = "sha256:" + "0" * 64
    said = {"CUDA_VERSION": "14.0.1", "CUDA_DRIVER_VERSION": "650.1", "NCCL_VERSION": "2.31.1-1"}
    image = RegistryImage(parse_reference("nvcr.io/nvidia/pytorch:26.12-py3"), digest, digest, "amd64", "linux", said)
    found = reported("26.12", image)
    assert found == Release("26.12", "14.0.1", None, "650.1", "2.31.1", None, source="its registry")


def test_a_registry_name_is_recognised() -> None:
    assert of_reference("nvcr.io/nvidia/pytorch:25.04-py3") == releases()["25.04"]
    assert of_reference(f"nvcr.io/nvidia/pytorch:25.04-py3@sha256:{'0' * 64}") == releases()["25.04"]
    assert of_reference("nvcr.io/nvidia/pytorch:25.07-py3") is None
    assert tag_of("nvcr.io/nvidia/pytorch:25.07-py3") == "25.07", "NVIDIA's all the same"
    assert tag_of("nvcr.io/nvidia/pytorch:25.04-py3-igpu") is None
    assert of_reference("docker.io/library/debian:12") is None


def test_the_whole_table_has_the_form_that_its_readers_expect() -> None:
    fields = ("cuda", "torch", "driver", "nccl", "python")
    for tag, one in releases().items():
        assert re.fullmatch(r"2\d\.(0[1-9]|1[0-2])", tag)
        for field in fields:
            value = getattr(one, field)
            assert value is None or re.fullmatch(r"\d+\.\d+[\w.+]*", value), (tag, field)
        assert all(getattr(one, field) is not None for field in one.triton + one.weak), tag
    assert list(releases()) == sorted(releases())
