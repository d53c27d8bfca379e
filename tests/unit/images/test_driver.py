"""NVIDIA's rules of which driver runs which CUDA, with their numbers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmddp.assets import asset_folder
from slurmddp.images.driver import ImageCuda, capability_of, check, of_release, without_code
from slurmddp.images.releases import releases
from slurmddp.job.document import read_file
from slurmddp.shared.cuda_driver import FLOORS, Version

RANK = {"impossible": 0, "unknown": 1, "forward": 2, "minor": 3, "native": 4}
NGC_2504 = ImageCuda("12.9.0.036", "575.51.02", True)
NGC_2509 = ImageCuda("13.0.1.012", "580.82.07", True)
BRANCHES = (418, 450, 460, 470, 510, 515, 520, 525, 535, 545, 550, 555, 560, 565, 570, 575, 580, 590, 595, 610, 615)


def kind(image: ImageCuda, driver: str | None, gpu: str | None = "a100") -> str:
    return check(image, driver, gpu=gpu).kind


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("535.54.03", "535.183.01"),
        ("535.183.01", "535.183.06"),
        ("450.80", "450.80.02"),
        ("99.9", "450.80.02"),
        ("12.9.0.036", "13.0"),
        ("12.9", "12.10"),
        ("525.60.9", "525.60.13"),
    ],
)
def test_the_fields_of_versions_count_as_numbers(older: str, newer: str) -> None:
    one, other = Version.parse(older), Version.parse(newer)
    assert one is not None and other is not None
    assert one < other
    assert not other < one


def test_zeros_at_the_end_and_leading_ones_make_no_other_version() -> None:
    assert Version.parse("580") == Version.parse("580.0") == Version.parse(" 580.00\n")
    assert Version.parse("0") == Version.parse("0.0")


@pytest.mark.parametrize(
    "text", [None, "", "~", "N/A", "535.", ".5", "535..1", "-1", "R535", "535.183.01-1", "٥٣٥", "9" * 10]
)
def test_what_is_no_version_is_none(text: str | None) -> None:
    assert Version.parse(text) is None


@given(st.text(max_size=20), st.text("0123456789. ", max_size=20))
@settings(max_examples=50)
def test_any_text_can_be_asked(text: str, numbers: str) -> None:
    for driver in (text, numbers):
        verdict = check(ImageCuda(text, numbers, None), driver, gpu=text)
        assert verdict.kind in RANK
        assert (Version.parse(driver) is not None) or verdict.kind == "unknown"


@pytest.mark.parametrize("driver", ["575.51.02", "575.51.03", "575.57.08", "580.65.06", "1000.1"])
def test_rule_1_a_driver_that_is_not_older_is_native(driver: str) -> None:
    verdict = check(NGC_2504, driver)
    assert verdict.kind == "native"
    assert f"driver {driver} is not older than the image's 575.51.02" in verdict.why
    assert verdict.todo == ""


def test_rule_1_also_where_the_image_s_cuda_is_unknown() -> None:
    assert kind(ImageCuda(None, "575.51.02", None), "575.51.02") == "native"
    assert kind(ImageCuda(None, "575.51.02", None), "575.51.01") == "unknown"


@pytest.mark.parametrize(
    ("cuda", "own", "least", "below"),
    [
        ("11.8.0", "520.61.03", "450.80.02", "450.80.01"),
        ("12.9.0.036", "575.51.02", "525.60.13", "525.60.12"),
        ("13.2.0.046", "595.45.04", "580", "579.99.99"),
        ("13.2.0.046", "595.45.04", "580.65.06", "575.57.08"),
    ],
)
def test_rule_2_within_a_major_release_from_its_least_driver_on(cuda: str, own: str, least: str, below: str) -> None:
    image = ImageCuda(cuda, own, True)
    verdict = check(image, least)
    assert verdict.kind == "minor"
    for number in (
        f"CUDA {cuda[:2]}.x",
        f"driver {FLOORS[int(cuda[:2])]} or newer",
        f"Driver {least} is older",
        own,
    ):
        assert number in verdict.why
    assert "PTX" in verdict.todo
    assert kind(image, below) not in ("minor", "native")


def test_rule_2_needs_no_compat_libraries_and_no_certain_gpu() -> None:
    for compat in (True, False, None):
        for gpu in (None, "rtx3090", "a100"):
            assert check(ImageCuda("12.9", "575.51.02", compat), "535.54.03", gpu=gpu).kind == "minor"


@pytest.mark.parametrize("driver", ["535.54.03", "535.183.01", "570.26", "570.133.20"])
def test_rule_3_across_majors_by_the_compat_libraries(driver: str) -> None:
    verdict = check(NGC_2509, driver, gpu="h100")
    assert verdict.kind == "forward"
    for word in ("CUDA 13.x needs driver 580 or newer", driver, f"branch {driver[:3]}", "h100"):
        assert word in verdict.why


@pytest.mark.parametrize("driver", ["450.51", "450.79", "470.57.02", "510.47.03", "515.65.01"])
def test_rule_3_old_branches_from_the_driver_on_that_is_documented(driver: str) -> None:
    image = ImageCuda("12.1.0", "530.30.02", True)
    assert kind(image, driver) == "forward"
    assert kind(image, driver[:4] + "0") == "unknown"


@pytest.mark.parametrize(
    "gpu", ["a100", "NVIDIA A100-SXM4-40GB", "nvidia_a100_80gb_pcie", "a100_3g.20gb", "Tesla T4", "l40s", "GH200"]
)
def test_rule_3_data_center_gpus_are_known_by_slurm_s_type_and_by_their_name(gpu: str) -> None:
    assert kind(NGC_2509, "535.183.01", gpu) == "forward"


@pytest.mark.parametrize("gpu", [None, "rtx6000", "NVIDIA RTX A6000", "Quadro RTX 5000", "gpu", "a1000", "xa100"])
def test_rule_3_on_other_gpus_it_depends(gpu: str | None) -> None:
    verdict = check(NGC_2509, "535.183.01", gpu=gpu)
    assert verdict.kind == "unknown"
    assert "depends on the GPU" in verdict.why and "certified RTX" in verdict.why
    assert (gpu or "unknown") in verdict.why


@pytest.mark.parametrize(
    "gpu", ["NVIDIA GeForce RTX 3090", "rtx3090", "rtx_2080_ti", "TITAN V", "gtx1080ti", "RTX 5090"]
)
def test_rule_3_is_not_for_geforce(gpu: str) -> None:
    verdict = check(NGC_2509, "535.183.01", gpu=gpu)
    assert verdict.kind == "impossible"
    assert gpu in verdict.why


def test_rule_3_without_compat_libraries_it_is_impossible() -> None:
    verdict = check(ImageCuda("13.0.1", "580.82.07", False), "570.133.20", gpu="a100")
    assert verdict.kind == "impossible"
    assert (
        verdict.why
        == "CUDA 13.x needs driver 580 or newer, the nodes have 570.133.20; the image has no compat libraries"
    )
    assert "NGC 25.06" in verdict.todo and "driver 580 or newer" in verdict.todo
    assert kind(ImageCuda("13.0.1", "580.82.07", None), "570.133.20") == "unknown"


@pytest.mark.parametrize(
    ("cuda", "driver"), [("12.6.3", "450.248.02"), ("12.8.0", "520.61.05"), ("12.0.1", "460.106.00")]
)
def test_rule_3_branches_that_nvidia_refuses_are_impossible(cuda: str, driver: str) -> None:
    verdict = check(ImageCuda(cuda, "599.1", True), driver, gpu="a100")
    assert verdict.kind == "impossible"
    assert f"cuda-compat of CUDA {cuda} does not support driver branch {driver[:3]}" in verdict.why


@pytest.mark.parametrize(
    ("image", "driver"),
    [
        (NGC_2509, "565.57.01"),  # a new feature branch: no supported target
        (NGC_2509, "550.54.15"),  # at the end of its life
        (NGC_2504, "470.82.01"),  # documented for 12.8, not for 12.9
        (ImageCuda("13.9", "999.1", True), "535.54.03"),
    ],
)
def test_rule_3_what_the_table_does_not_list_is_unknown(image: ImageCuda, driver: str) -> None:
    verdict = check(image, driver, gpu="a100")
    assert verdict.kind == "unknown"
    assert f"does not list driver branch {driver[:3]}" in verdict.why


def test_rule_4_error_803_is_why_the_compat_libraries_stay_off_with_a_newer_driver() -> None:
    assert "803" in check(NGC_2504, "580.82.07").why


def test_a_release_is_what_the_table_says_and_has_compat_libraries() -> None:
    assert of_release("25.04") == NGC_2504
    assert of_release("25.08") == ImageCuda("13.0.0.044", None, True)
    assert of_release("25.07") == ImageCuda(None, None, True), "not in the table, but NVIDIA's"


@pytest.mark.parametrize(
    ("image", "driver", "missing"),
    [
        (NGC_2504, None, "the driver of the nodes is unknown"),
        (NGC_2504, "latest", "'latest' is not a driver's version"),
        (of_release("24.01"), "535.54.03", "the image's CUDA is unknown"),
        (ImageCuda("14.0", "700.1", True), "580.65.06", "the minimum driver for CUDA 14.x is unknown"),
        (ImageCuda("10.2.89", "440.33", True), "418.67", "the minimum driver for CUDA 10.x is unknown"),
    ],
)
def test_unknown_stays_unknown_and_says_what_is(image: ImageCuda, driver: str | None, missing: str) -> None:
    verdict = check(image, driver, gpu="v100")
    assert verdict.kind == "unknown"
    assert missing in verdict.why


def test_an_image_whose_driver_is_unknown_runs_from_its_major_s_least_one_on() -> None:
    image = ImageCuda("12.4.1", None, True)
    assert kind(image, "525.60.13") == "minor"
    assert "the image's driver is unknown" in check(image, "579.1").why
    assert kind(image, "580") == "native"
    assert kind(image, "470.57.02") == "forward"


@pytest.mark.parametrize(
    ("gpu", "cuda", "expected"),
    [
        ("V100-SXM2-32GB", "13.0.1", "13 needs 7.5 or newer"),
        ("p100", "13.3.0", "has no code for p100 (compute capability 6.0)"),
        ("k80", "12.1", "12 needs 5.0 or newer"),
        ("b200", "12.3.2", "needs CUDA 12.8 or newer: at most what the image has as PTX"),
        ("NVIDIA GeForce RTX 5090", "12.6", "needs CUDA 12.8 or newer"),
        ("h100", "11.4", "needs CUDA 11.8 or newer"),
    ],
)
def test_a_cuda_without_code_for_the_gpu_is_not_native(gpu: str, cuda: str, expected: str) -> None:
    """Whatever the driver: a newer one than any image's, or one that nobody knows."""
    for driver in ("999.1", "580.82.07", None):
        verdict = check(ImageCuda(cuda, "580.1", True), driver, gpu=gpu)
        assert verdict.kind == ("impossible" if "13" in expected or "12 n" in expected or gpu == "p100" else "unknown")
        assert expected in verdict.why and "CUDA" in verdict.todo
    assert check(ImageCuda("13.0", "580.1", True), "999.1", gpu="v100").todo == "use an image with CUDA 12"
    assert "needs driver" in check(ImageCuda("12.3", "545.1", False), "470.1", gpu="b200").why, "neither helps"


@pytest.mark.parametrize(
    ("gpu", "cuda"),
    [("v100", "12.9"), ("t4", "13.3"), ("l40s", "11.4"), ("b300", "12.8"), ("b200", "12.8"), ("rtx_4090", "13.0"),
     ("a100_3g.20gb", "13.0"), ("gh200", "11.8"), ("k80", "11.8")],
)  # fmt: skip
def test_code_for_an_older_gpu_of_the_same_major_runs(gpu: str, cuda: str) -> None:
    assert without_code(ImageCuda(cuda, None, None), gpu) is None
    verdict = check(ImageCuda(cuda, "500.1", None), "999.1", gpu=gpu)
    assert verdict.kind == "native" and "Unknown" not in verdict.why


@pytest.mark.parametrize("gpu", [None, "gpu", "rtx6000", "NVIDIA RTX 6000 Ada Generation", "mi250", "x100"])
def test_whether_an_unknown_gpu_has_code_is_unknown_and_said(gpu: str | None) -> None:
    assert capability_of(gpu) is None
    for driver in ("999.1", "580"):
        why = check(NGC_2509, driver, gpu=gpu).why
        assert f"Unknown: whether CUDA 13.0.1.012 has code for {gpu or 'the GPU, whose type is unknown'}" in why


drivers = st.tuples(st.sampled_from(BRANCHES), st.integers(0, 250), st.integers(0, 99))
images = st.sampled_from(
    [ImageCuda(one.cuda, one.driver, compat) for one in releases().values() for compat in (True, False, None)]
)


@given(images, drivers, drivers, st.sampled_from([None, "a100", "rtx3090", "rtx6000"]))
@settings(max_examples=300)
def test_a_newer_driver_never_makes_it_worse(
    image: ImageCuda, one: tuple[int, int, int], other: tuple[int, int, int], gpu: str | None
) -> None:
    """Forward compatibility goes by branch (535 has it, the newer 545 is not listed); all else by age."""
    older, newer = sorted([one, other])
    ranks = [RANK[check(image, ".".join(map(str, driver)), gpu=gpu).kind] for driver in (older, newer)]
    if older[0] != newer[0]:
        ranks = [max(rank, RANK["forward"]) for rank in ranks]
    assert ranks[0] <= ranks[1]


def test_the_table_has_the_form_that_its_readers_expect() -> None:
    tree = read_file(asset_folder("containers") / "tables" / "cuda-compat.yaml", "drivers").tree
    assert set(tree) == {"sources", "forward", "gpus", "code"}
    assert all(Version.parse(text) for key in ("first", "least") for text in tree["code"][key].values())
    assert {number.split(".")[0] for number in tree["gpus"]["capability"]} <= {*tree["code"]["first"], "3", "5", "6"}
    assert all(capability_of(word) for word in tree["gpus"]["data_center"] if word != "tesla")
    assert all(tree["sources"])
    floors = [Version.parse(least) for _, least in sorted(FLOORS.items())]
    assert floors == sorted(floors)  # type: ignore[type-var]
    for cuda, row in tree["forward"].items():
        drivers = [Version.parse(text) for text in row["drivers"]]
        assert Version.parse(cuda) and drivers and None not in drivers, cuda
        assert not {str(one.major) for one in drivers if one} & set(row["refused"]), cuda
    assert all(word == word.lower() and word.isalnum() for word in tree["gpus"]["data_center"])
