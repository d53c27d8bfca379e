"""Samples this node's GPUs while torchrun runs: use, memory, power, clocks, and why the driver lowers the clocks.

The library is NVIDIA's pynvml (package nvidia-ml-py), which NVIDIA's PyTorch images have. AMD's GPUs are not sampled.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmddp.runtime.environment import own_gpus, own_node
from slurmddp.runtime.watch.process_exit import say
from slurmddp.shared.journal import JsonLines
from slurmddp.shared.run_folder import RunFolder

#: Seconds between two samples; 0: none are taken.
SECONDS = "SLURMDDP_GPU_SECONDS"
_DEFAULT = "5"
#: Samples that one line stands for: a line per minute. The first line has fewer, so that `status` soon has figures.
_PER_LINE, _FIRST = 12, 2
#: Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h) that mean less speed than the GPU could have.
_REASONS = {
    0x04: "power cap",
    0x08: "hw slowdown",
    0x20: "sw thermal slowdown",
    0x40: "hw thermal slowdown",
    0x80: "power brake",
}
#: What a device file of NVIDIA's driver proves: pynvml would have something to say.
_DRIVER = Path("/dev/nvidiactl")


def start(folder: RunFolder, attempt: int) -> None:
    """Sample from now on, in a thread that ends with the process; nothing where there is nothing to sample."""
    try:
        seconds = float(os.environ.get(SECONDS, _DEFAULT))
    except ValueError:
        say(f"slurmddp: warning: {SECONDS} is not a number: GPUs are not sampled\n")
        return
    if not 0 < seconds < float("inf"):
        return
    try:
        import pynvml
    except ImportError:
        if _DRIVER.exists():
            say("slurmddp: GPUs are not sampled: no pynvml in the container (pip install nvidia-ml-py)\n")
        return
    path = folder.gpu_samples(attempt, own_node())
    threading.Thread(target=_sample, args=(pynvml, path, seconds), name="slurmddp gpus", daemon=True).start()


def _sample(nvml: Any, path: Path, seconds: float) -> None:
    """Take samples for ever. A failure ends the sampling, not the job."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return  # no driver on this node
    try:
        every = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in every]
        gpus = {index: every[index] for index in own_gpus(uuids, os.environ)}
        if not gpus:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with JsonLines(path) as lines:
            wanted = _FIRST
            while True:
                taken: list[dict[int, dict[str, Any]]] = []
                while len(taken) < wanted:
                    time.sleep(seconds)
                    taken.append({index: _look(nvml, handle) for index, handle in gpus.items()})
                told = [{"gpu": index, **_condensed([sample[index] for sample in taken])} for index in gpus]
                lines.write({"time": round(time.time(), 3), "gpus": told})
                wanted = _PER_LINE
    except Exception as error:  # noqa: BLE001 - whatever a driver or a file system does
        say(f"slurmddp: warning: GPUs are no longer sampled: {type(error).__name__}: {error}\n")


def _look(nvml: Any, handle: Any) -> dict[str, Any]:
    """One sample. None: this GPU or driver does not tell."""

    def ask(what: Callable[[], Any]) -> Any:
        try:
            return what()
        except (nvml.NVMLError, AttributeError):  # AttributeError: an older pynvml
            return None

    memory = ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    watts = ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    return {
        "use": ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        "memory": None if memory is None else memory.used / 2**30,
        "total": None if memory is None else memory.total / 2**30,
        "watts": None if watts is None else watts / 1000,
        "mhz": ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        "celsius": ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        "reasons": ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
    }


def _condensed(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one record for several samples: means of use and power, the most memory and heat, the lowest clock."""

    def of(name: str, how: Callable[[list[float]], float]) -> float | None:
        values = [float(sample[name]) for sample in samples if sample[name] is not None]
        return round(how(values), 1) if values else None

    bits = 0
    for sample in samples:
        bits |= sample["reasons"] or 0
    return {
        "use": of("use", lambda values: sum(values) / len(values)),
        "memory_gib": of("memory", max),
        "total_gib": of("total", max),
        "watts": of("watts", lambda values: sum(values) / len(values)),
        "mhz": of("mhz", min),
        "celsius": of("celsius", max),
        "slowed": [text for bit, text in _REASONS.items() if bits & bit],
    }


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name  # bytes: an older pynvml
