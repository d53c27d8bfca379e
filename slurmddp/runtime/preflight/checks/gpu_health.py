"""What the NVIDIA driver says of this job's GPUs: memory errors, rows to remap, and clocks that are held down."""

import os
import subprocess
import xml.etree.ElementTree as xml
from collections.abc import Iterator, Mapping

from slurmddp.records.preflight import Finding, bad, warn
from slurmddp.runtime.environment import own_gpus
from slurmddp.runtime.preflight.checks import devices, kernel_log
from slurmddp.runtime.preflight.node_settings import NodeSettings

#: All details at once, since drivers differ in what may be asked for alone.
_COMMAND = ("nvidia-smi", "-q", "-x")
_SECONDS = 10.0
_UNASKED = "its GPUs' memory errors and clocks are not checked"
#: Each of them lowers the clocks by much, and an idle GPU has no reason for it.
_SLOWDOWNS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
#: Part of the card's own default clock.
_LOWERED = 0.9
_RESET = "ask the site's support to reset the GPU, or to drain the node"
_COOLING = "ask the site's support to check the node's cooling and power"


def check(settings: NodeSettings) -> Iterator[Finding]:
    if settings.gpus <= 0 or (settings.vendor or devices.driver()) != "nvidia":
        return
    try:
        done = subprocess.run(_COMMAND, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=False)
        listed = list(xml.fromstring(done.stdout).iter("gpu"))
    except FileNotFoundError:
        yield warn(f"has no nvidia-smi in the container: {_UNASKED}", "add --nv to container.options, or install it")
        return
    except subprocess.TimeoutExpired:
        yield warn(f"nvidia-smi did not answer within {_SECONDS:.0f} s: {_UNASKED}", _RESET)
        return
    except xml.ParseError:
        said = (done.stdout + done.stderr).decode(errors="replace").strip().partition("\n")[0]
        yield warn(f"nvidia-smi failed: {said or f'exit code {done.returncode}'}: {_UNASKED}", "run it on the node")
        return
    chosen = ours(listed, os.environ)
    for index, gpu in chosen.items():
        yield from judge(f"GPU {index} ({_text(gpu, 'product_name')})", gpu)
    yield from kernel_log.check({gpu.get("id", "") for gpu in chosen.values()})


def ours(listed: list[xml.Element], environ: Mapping[str, str]) -> dict[int, xml.Element]:
    """Return the GPUs of this job by index: where Slurm hides none, the node shows those of other jobs, too."""
    return {index: listed[index] for index in own_gpus([_text(gpu, "uuid") for gpu in listed], environ)}


def judge(name: str, gpu: xml.Element) -> Iterator[Finding]:
    """Yield the driver's findings for one GPU. A value that is `N/A` or missing counts as unknown, not as bad."""
    action = _text(gpu, "gpu_recovery_action")
    errors = _uncorrected(gpu)
    if action.startswith(("Reset", "Reboot", "Drain")):
        yield bad(f"{name} failed, and the driver asks for: {action}", _RESET)
    elif _text(gpu, "gpu_reset_status/reset_required") == "Yes":
        yield bad(f"{name} failed, and the driver asks for a reset", _RESET)
    elif errors:
        # A driver that knows what to do and asks for nothing has contained the error.
        level = warn if action == "None" else bad
        yield level(f"{name} has {errors} uncorrected memory errors since its driver was loaded", _RESET)
    if "Yes" in (_text(gpu, "retired_pages/pending_retirement"), _text(gpu, "remapped_rows/remapped_row_pending")):
        yield warn(f"{name} must be reset before it stops using broken memory", _RESET)
    if _text(gpu, "remapped_rows/remapped_row_failure") == "Yes":
        yield warn(f"{name} has no spare memory left for broken rows", "ask the site's support to replace it")
    yield from _clocks(name, gpu)


def _clocks(name: str, gpu: xml.Element) -> Iterator[Finding]:
    reasons = [*gpu.findall("clocks_event_reasons/*"), *gpu.findall("clocks_throttle_reasons/*")]
    active = [each.tag.partition("_reason_")[2] for each in reasons if each.text == "Active"]
    slowed = [reason.replace("_", " ") for reason in active if reason in _SLOWDOWNS]
    if slowed:
        yield warn(f"{name} lowers its clocks: {', '.join(slowed)}", _COOLING)
    now, usual = (_number(_text(gpu, f"{kind}applications_clocks/graphics_clock")) for kind in ("", "default_"))
    if usual and 0 < now < _LOWERED * usual:
        todo = "ask the site's support to reset its clocks (nvidia-smi -rac)"
        yield warn(f"{name} is set to {now} MHz; its default is {usual} MHz", todo)


def _uncorrected(gpu: xml.Element) -> int:
    """Errors since the driver was loaded. Old drivers count them as double bit errors, newer ones by kind of memory."""
    volatile = gpu.find("ecc_errors/volatile")
    if volatile is None:
        return 0
    counts = [each for each in volatile if "uncorrectable" in each.tag] or volatile.findall("double_bit/total")
    return sum(_number(each.text or "") for each in counts)


def _text(gpu: xml.Element, path: str) -> str:
    return (gpu.findtext(path) or "").strip()


def _number(text: str) -> int:
    """Return the number of `1275 MHz`; 0 for N/A and what else is none."""
    first = text.partition(" ")[0]
    return int(first) if first.isdecimal() else 0
