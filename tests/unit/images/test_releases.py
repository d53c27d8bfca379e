"""The table of NGC releases."""

import re

import pytest

from slurmddp.errors import UserError
from slurmddp.images.releases import Release, of_reference, release, releases, tag_of


def test_a_release_has_what_the_table_says() -> None:
    assert release("25.04") == Release(
        tag="25.04",
        cuda="12.9.0.036",
        torch="2.7.0a0+79aa17489c",
        driver="575.51.02",
        nccl="2.26.3",
        python="3.12",
    )
    assert release("25.04-py3").reference == "nvcr.io/nvidia/pytorch:25.04-py3"


def test_unknown_values_stay_unknown_and_weak_ones_are_marked() -> None:
    assert release("24.01") == Release("24.01", None, "2.2.0a0+81ea7a4", None, None, None)
    assert release("25.02").triton == ("cuda", "driver", "nccl")
    assert release("25.08").weak == ("cuda",)
    assert release("25.08").driver is None


@pytest.mark.parametrize(
    ("tag", "near"),
    [("25.07", "25.06, 25.08"), ("26.12", "26.04, 26.05, 26.06"), ("19.01", "24.01, 24.02, 24.03")],
)
def test_an_unknown_release_names_the_nearest(tag: str, near: str) -> None:
    with pytest.raises(UserError) as caught:
        release(tag)
    assert near in caught.value.what
    assert f"docker://nvcr.io/nvidia/pytorch:{tag}-py3" in str(caught.value.todo)


@pytest.mark.parametrize("text", ["25", "latest", "25.4", "25.04-py2", "", "25.04\n"])
def test_what_is_no_tag_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is not an NGC release"):
        release(text)


def test_a_registry_name_is_recognised() -> None:
    assert of_reference("nvcr.io/nvidia/pytorch:25.04-py3") == release("25.04")
    assert of_reference(f"nvcr.io/nvidia/pytorch:25.04-py3@sha256:{'0' * 64}") == release("25.04")
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
