"""Stands for NVIDIA's pynvml on a node with three GPUs. The names and units are those of nvidia-ml-py 13.615."""

import itertools
import os
from types import SimpleNamespace

NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0
_use = itertools.count(80, 2)


class NVMLError(Exception):
    """Of the driver."""


def nvmlInit() -> None:
    if os.environ.get("NO_DRIVER"):
        raise NVMLError("NVML Shared Library Not Found")


def nvmlDeviceGetCount() -> int:
    return 3


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetUUID(handle: int) -> str:
    return f"GPU-{handle}{handle}-abc"


def nvmlDeviceGetUtilizationRates(handle: int) -> SimpleNamespace:
    return SimpleNamespace(gpu=next(_use), memory=10)


def nvmlDeviceGetMemoryInfo(handle: int) -> SimpleNamespace:
    return SimpleNamespace(used=61 * 2**30, total=80 * 2**30, free=19 * 2**30)


def nvmlDeviceGetPowerUsage(handle: int) -> int:
    return 412_000  # milliwatts


def nvmlDeviceGetClockInfo(handle: int, clock: int) -> int:
    assert clock == NVML_CLOCK_SM
    return 1410


def nvmlDeviceGetTemperature(handle: int, sensor: int) -> int:
    raise NVMLError("Not Supported")


def nvmlDeviceGetCurrentClocksThrottleReasons(handle: int) -> int:
    return 0x44 if handle == 2 else 0x01
