"""What the preflight makes of the driver's words, the kernel's log and measured speeds. No GPU has proven any of it."""

import json
import sys
import xml.etree.ElementTree as xml
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slurmddp.runtime.preflight import gpu_speed, matmul
from slurmddp.runtime.preflight.checks import gpu_health, kernel_log
from slurmddp.runtime.preflight.gpu_speed import Measurement, Speed, compare
from slurmddp.runtime.preflight.judge import Report, judge

SAMPLES = Path(__file__).parent / "nvidia_smi"
T4 = (SAMPLES / "t4-515.xml").read_text()
A100 = (SAMPLES / "a100-535.xml").read_text()
REMAPPED = "<remapped_rows><remapped_row_corr>0</remapped_row_corr><remapped_row_unc>1</remapped_row_unc>"


def settings(gpus: int = 1, vendor: str = "nvidia") -> Any:
    return SimpleNamespace(gpus=gpus, vendor=vendor, nodes=("n1", "n2"))


def judged(text: str, *changes: tuple[str, str]) -> list[tuple[str, str]]:
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    (gpu,) = xml.fromstring(text).iter("gpu")
    return [(finding.level, finding.reason) for finding in gpu_health.judge("GPU 0", gpu)]


@pytest.mark.parametrize("text", [T4, A100])
def test_a_healthy_gpu(text: str) -> None:
    assert judged(text) == []


def test_uncorrected_errors_since_the_driver_was_loaded() -> None:
    errors = "GPU 0 has {} uncorrected memory errors since its driver was loaded"
    two = ("<dram_uncorrectable>0<", "<dram_uncorrectable>2<")
    assert judged(A100, two) == [("bad", errors.format(2))]
    old = "<volatile><double_bit><device_memory>1</device_memory><total>1</total></double_bit></volatile>"
    before = T4[T4.index("<volatile>") : T4.index("</volatile>") + len("</volatile>")]
    assert judged(T4, (before, old)) == [("bad", errors.format(1))]
    kinds = {"parity": 1, "secded": 2}
    by_kind = "".join(f"<sram_uncorrectable_{kind}>{n}</sram_uncorrectable_{kind}>" for kind, n in kinds.items())
    one = "<sram_uncorrectable>0</sram_uncorrectable>\n                <dram"
    assert judged(A100, (one, f"{by_kind}<dram")) == [("bad", errors.format(3))]
    contained = ("<gpu_reset_status>", "<gpu_recovery_action>None</gpu_recovery_action><gpu_reset_status>")
    assert judged(A100, two, contained) == [("warn", errors.format(2))]
    assert judged(A100, ("<sram_uncorrectable>0<", "<sram_uncorrectable>N/A<")) == []
    older = T4[T4.index("<aggregate>") : T4.index("</aggregate>")]
    assert judged(T4, (older, older.replace(">0<", ">7<"))) == [], "those of its whole life"


def test_what_the_driver_asks_for() -> None:
    known = "<gpu_recovery_action>{}</gpu_recovery_action><gpu_reset_status>"
    asked = judged(A100, ("<gpu_reset_status>", known.format("Reset")))
    assert asked == [("bad", "GPU 0 failed, and the driver asks for: Reset")]
    assert judged(A100, ("<reset_required>No", "<reset_required>Yes")) == [
        ("bad", "GPU 0 failed, and the driver asks for a reset")
    ]
    deprecated = "Requested functionality has been deprecated"
    assert judged(A100, ("<reset_required>No", f"<reset_required>{deprecated}")) == []
    assert judged(A100, ("<gpu_reset_status>", known.format(deprecated))) == []


def test_memory_that_waits_for_a_reset_and_memory_that_is_used_up() -> None:
    broken = [("warn", "GPU 0 must be reset before it stops using broken memory")]
    assert judged(T4, ("<pending_retirement>No", "<pending_retirement>Yes")) == broken
    rows = f"{REMAPPED}<remapped_row_pending>%s</remapped_row_pending><remapped_row_failure>%s</remapped_row_failure>"
    nothing = "<remapped_rows>N/A"
    assert judged(A100, (nothing, rows % ("Yes", "No"))) == broken
    assert judged(A100, (nothing, rows % ("No", "Yes"))) == [("warn", "GPU 0 has no spare memory left for broken rows")]
    assert judged(A100, (nothing, rows % ("No", "No"))) == []


def test_clocks_that_are_held_down() -> None:
    for text, word in ((T4, "throttle"), (A100, "event")):
        tag = f"<clocks_{word}_reason_hw_thermal_slowdown>"
        assert judged(text, (f"{tag}Not Active", f"{tag}Active")) == [
            ("warn", "GPU 0 lowers its clocks: hw thermal slowdown")
        ]
        idle = f"<clocks_{word}_reason_gpu_idle>"
        assert judged(text, (f"{idle}Not Active", f"{idle}Active")) == []
    own = "<applications_clocks>\n            <graphics_clock>"
    assert judged(A100, (f"{own}1275", f"{own}900")) == [("warn", "GPU 0 is set to 900 MHz; its default is 1275 MHz")]
    assert judged(A100, (f"{own}1275 MHz", f"{own}Requested functionality has been deprecated")) == []


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("", [0, 1, 2]), ("1", [1]), ("0,2", [0, 2]), ("GPU-b", [1]), ("MIG-7", [0, 1, 2]), ("0,1,2", [0, 1, 2])],
)
def test_only_the_job_s_own_gpus_are_judged(visible: str, expected: list[int]) -> None:
    listed = [xml.fromstring(f"<gpu><uuid>GPU-{name}</uuid></gpu>") for name in "abc"]
    assert list(gpu_health.ours(listed, {"CUDA_VISIBLE_DEVICES": visible})) == expected


def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "nvidia-smi").write_text(text)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def test_the_program_that_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(kernel_log, "_LOG", str(tmp_path / "none"))
    (tmp_path / "answer.xml").write_text(A100.replace("<dram_uncorrectable>0", "<dram_uncorrectable>1", 1))
    answer = f'#!/bin/sh\n[ "$*" = "-q -x" ] && cat {tmp_path}/answer.xml\n'
    program(tmp_path, monkeypatch, answer)
    (found,) = gpu_health.check(settings())
    assert found.level == "bad"
    assert found.text == (
        "GPU 0 (NVIDIA A100-SXM4-80GB) has 1 uncorrected memory errors since its driver was loaded - "
        "ask the site's support to reset the GPU, or to drain the node"
    )
    assert list(gpu_health.check(settings(gpus=0))) == list(gpu_health.check(settings(vendor="amd"))) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#!/bin/sh\necho 'Unable to determine the device handle for GPU 3'\nexit 15\n", "Unable to determine the"),
        ("#!/bin/sh\nexit 9\n", "exit code 9"),
        ("#!/bin/sh\nexec sleep 60\n", "did not answer within 1 s"),
        (None, "has no nvidia-smi in the container"),
    ],
)
def test_a_program_that_fails_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, expected: str
) -> None:
    program(tmp_path, monkeypatch, text or "")
    monkeypatch.setattr(gpu_health, "_SECONDS", 1.0)
    if text is None:
        monkeypatch.setenv("PATH", str(SAMPLES))
    (found,) = gpu_health.check(settings())
    assert found.level == "warn" and expected in found.reason
    assert found.reason.endswith("its GPUs' memory errors and clocks are not checked")


# --- the kernel's log

XID = "4,812,{},-;NVRM: Xid (PCI:{}): {}, pid=1122, name=python3, some more"


def test_xids_of_the_job_s_gpus() -> None:
    now, recent = 100_000.0, 99_000_000_000
    lines = [
        XID.format(recent, "0000:3b:00", 79),
        XID.format(recent, "0000:3b:00", 79),
        XID.format(1_000_000, "0000:3b:00", 48) + " two days ago",
        XID.format(recent, "0000:3b:00", 31) + " of a program that reads where it may not",
        XID.format(recent, "0000:af:00", 95) + " of another job's GPU",
        "6,813,99000000000,-;eth0: link up",
    ]
    (found,) = kernel_log.judge(lines, {"00000000:3B:00.0"}, now)
    assert found.level == "warn"
    assert found.reason == (
        "GPU 0000:3b:00 had Xid 79 (GPU has fallen off the bus) 2 times in the last day, says the kernel's log"
    )


def test_a_log_that_cannot_be_read(tmp_path: Path) -> None:
    assert list(kernel_log.records(str(tmp_path / "none"))) == []
    (tmp_path / "log").write_text("one\n")
    assert list(kernel_log.records(str(tmp_path / "log"))) == ["one\n"]


# --- speed


def node(*tflops: float, name: str = "NVIDIA A100-SXM4-80GB", sheet: float | None = 312) -> list[Speed]:
    return [Speed(index, name, value, sheet) for index, value in enumerate(tflops)]


def found(speeds: dict[str, list[Speed]]) -> list[tuple[str, str, str]]:
    return [(name, finding.level, finding.reason) for name, finding in compare(speeds)]


def test_equal_gpus() -> None:
    assert found({"n1": node(250, 255), "n2": node(245, 251)}) == []
    assert found({"n1": node(250), "n2": node(700, name="NVIDIA H100", sheet=989)}) == [], "other cards"
    assert found({}) == found({"n1": []}) == []


def test_a_slow_gpu_is_named() -> None:
    told = found({"n1": node(250, 250, 250, 250), "n2": node(250, 120, 205, 250)})
    part = "of the median of 8 such GPUs"
    assert told == [
        ("n2", "bad", f"GPU 1 (NVIDIA A100-SXM4-80GB) computes 120 TFLOP/s, 48% {part}"),
        ("n2", "warn", f"GPU 2 (NVIDIA A100-SXM4-80GB) computes 205 TFLOP/s, 82% {part}"),
    ]
    assert [level for _, level, _ in found({"n1": node(250, sheet=None), "n2": node(0)})] == ["bad"], (
        "it cannot compute at all"
    )


def test_where_all_are_slow_the_data_sheet_tells() -> None:
    told = found({"n1": node(100, 100), "n2": node(100, 100)})
    assert told == [
        ("n1", "warn", "the 4 GPUs (NVIDIA A100-SXM4-80GB) compute 100 TFLOP/s; the data sheet says 312"),
    ]
    assert found({"n1": node(100, sheet=None)}) == []


def test_the_judge_hears_of_it() -> None:
    reports = {name: Report(speeds=node(250, 250)) for name in ("n1", "n2")}
    reports["n2"].speeds = node(250, 100)
    verdict = judge(["n1", "n2"], reports, "silent")
    assert [finding.level for finding in verdict["n2"]] == ["bad"] and verdict["n1"] == []


def measured(program: str, seconds: float = 60, gpus: int = 1) -> tuple[list[Speed], list[str]]:
    speeds, findings = Measurement(settings(gpus), (sys.executable, "-c", program), seconds).result()
    assert all(finding.level == "warn" for finding in findings)
    return speeds, [finding.reason for finding in findings]


def test_the_program_that_measures() -> None:
    items = [[0, "A100", 250.5, 312], [1, "odd", 0, None]]
    assert measured(f"print({json.dumps(json.dumps(items))})") == (
        [Speed(0, "A100", 250.5, 312.0), Speed(1, "odd", 0.0, None)],
        [],
    )
    assert measured("raise SystemExit('CUDA error: out of memory')") == (
        [],
        ["the speed of its GPUs is not known: CUDA error: out of memory"],
    )
    assert measured("import time; time.sleep(60)", 0.5) == (
        [],
        ["the speed of its GPUs is not known: no result within 0 s"],
    )
    assert measured("print(1)")[1] == ["the speed of its GPUs is not known: exit code 0"]
    assert measured("raise SystemExit('not started')", gpus=0) == ([], [])


def test_what_it_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, which stands for a card."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(matmul, "_PRECISION", torch.float32)
    (only,) = gpu_speed.from_json(json.loads(json.dumps(matmul.speeds([torch.device("cpu")]))))
    assert only.tflops > 0 and only.sheet is not None
    assert matmul.speeds([]) == []
