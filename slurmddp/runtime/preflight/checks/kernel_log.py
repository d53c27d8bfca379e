"""Xid errors of the job's GPUs in the kernel's log, where users may read it (kernel.dmesg_restrict=0)."""

import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator

from slurmddp.records.preflight import Finding, warn

_LOG = "/dev/kmsg"
_RECORDS, _SECONDS, _LONGEST = 100_000, 1.0, 8192
_RECENT = 24 * 3600
#: Those of NVIDIA's catalog (docs.nvidia.com/deploy/xid-errors) that tell of hardware, not of a program's error.
_XIDS = {
    48: "uncorrectable memory error",
    64: "broken memory could not be retired",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "the GPU's own processor does not answer",
    120: "error of the GPU's own processor",
}
_LINE = re.compile(r"\d+,\d+,(?P<microseconds>\d+),[^;]*;NVRM: Xid \(PCI:(?P<bus>[0-9a-fA-F:.]+)\): (?P<xid>\d+)")


def check(buses: set[str]) -> Iterator[Finding]:
    """buses: of the job's GPUs, as nvidia-smi writes them."""
    yield from judge(records(), buses, time.clock_gettime(time.CLOCK_BOOTTIME))


def records(path: str = _LOG) -> Iterator[str]:
    """Yield the kernel's log, as far as one second and permissions go."""
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    until = time.monotonic() + _SECONDS
    try:
        for _ in range(_RECORDS):
            try:
                record = os.read(log, _LONGEST)
            except BrokenPipeError:  # records were overwritten meanwhile: the next read is behind them
                continue
            if not record or time.monotonic() > until:
                return
            yield record.decode(errors="replace")
    except OSError:  # BlockingIOError: that was the newest one
        return
    finally:
        os.close(log)


def judge(lines: Iterable[str], buses: set[str], now: float) -> Iterator[Finding]:
    """Yield one warning per GPU and Xid of the last day. now: seconds since the node was booted."""
    known = {_short(bus) for bus in buses}
    found = Counter[tuple[str, int]]()
    for line in lines:
        if match := _LINE.match(line):
            xid, bus = int(match["xid"]), _short(match["bus"])
            if xid in _XIDS and bus in known and now - int(match["microseconds"]) / 1e6 < _RECENT:
                found[bus, xid] += 1
    for (bus, xid), count in sorted(found.items()):
        times = f"{count} times " if count > 1 else ""
        reason = f"GPU {bus} had Xid {xid} ({_XIDS[xid]}) {times}in the last day, says the kernel's log"
        yield warn(reason, "if runs fail there, ask the site's support to check the GPU")


def _short(bus: str) -> str:
    """0000:3b:00 for 00000000:3B:00.0: the driver and nvidia-smi differ."""
    return bus.lower().partition(".")[0][-10:]
