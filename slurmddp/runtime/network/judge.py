"""From what was measured to what it means for the run. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slurmddp.runtime.network.nccl_log import Transport, merge
from slurmddp.runtime.preflight.findings import plain
from slurmddp.shared.units import listed

_PLUGIN = "put the plugin aws-ofi-nccl into the image, or load its module in setup"
_DEVICES = "the image needs libibverbs, and the container /dev/infiniband; NCCL_IB_DISABLE and NCCL_NET must not be set"
_TODO = {
    "infiniband": _DEVICES,
    "roce": _DEVICES,
    "efa": _PLUGIN,
    "slingshot11": _PLUGIN,
    "gpudirect-tcp": "source the script of Google's plugin in setup, and bind its folder",
}

_MORE_GROUPS = "DDP alone has one group; FSDP, tensor and pipeline parallelism have more, and would hang"


@dataclass(frozen=True)
class Wish:
    """What the site promises and the job wants. fabric: the site's; floor: GB/s, None: nothing to compare with."""

    fabric: str = ""
    floor: float | None = None
    allow_socket: bool = False

    def is_low(self, bus: float) -> bool:
        return self.floor is not None and bus < self.floor


@dataclass(frozen=True)
class Measured:
    """What the ranks saw. transports: by node, empty without NCCL; bus: GB/s; speeds: bytes -> GB/s."""

    backend: str
    transports: Mapping[str, Transport]
    interface: str
    bus: float
    speeds: Mapping[int, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def transport(self) -> Transport:
        """All nodes' transports as one."""
        return merge(list(self.transports.values()))

    @property
    def text(self) -> str:
        """`NCCL over IB mlx5_0..3, bus 187 GB/s`."""
        over = (
            f"NCCL over {self.transport.text}" if self.backend == "nccl" else f"gloo over TCP {self.interface}".strip()
        )
        return f"{over}, bus {self.bus:.3g} GB/s"


def verdict(
    measured: Measured, wish: Wish, faulty: Mapping[str, str] | None = None, pairs: str = "", groups: str = ""
) -> list[str]:
    """Return the lines of the verdict, which job.sh reads.

    The first line is `ok TEXT`, `low TEXT` (below the floor), `groups TEXT` (only the first process group works) or
    `tcp TEXT` (the run must not start); then `facts JSON`, and `bad NODE TEXT` for each node that should be replaced.
    faulty: nodes; pairs: what `pairs.explain` said; groups: what `groups.trouble` said.
    """
    text, word, bad = measured.text, "ok", dict(faulty or {})
    on_tcp = [node for node, transport in measured.transports.items() if transport.is_tcp]
    promised = wish.fabric in _TODO and not wish.allow_socket
    if on_tcp and promised:
        word = "tcp"
        tcp = merge([measured.transports[node] for node in on_tcp])
        why = f" ({'; '.join(tcp.reasons)})" if tcp.reasons else ""
        text = (
            f"NCCL uses TCP ({tcp.text}) on {listed(on_tcp, 3)}, but this site's network is {wish.fabric}{why} - "
            f"{_TODO[wish.fabric]}; or set network.allow_socket: true"
        )
        if 2 * len(on_tcp) < len(measured.transports):
            bad = dict.fromkeys(on_tcp, f"NCCL uses TCP there{why}") | bad
    elif groups:
        word = "groups"
        text += f"; {groups} - {_MORE_GROUPS}"
    elif wish.is_low(measured.bus):
        word = "low"
        text += f", below network.min_bandwidth ({wish.floor:.3g} GB/s)" + (f"; {pairs}" if pairs else "")
    facts: dict[str, Any] = {
        "result": word,
        "backend": measured.backend,
        "transport": measured.transport.name if measured.backend == "nccl" else "TCP",
        "devices": list(measured.transport.devices) or ([measured.interface] if measured.interface else []),
        "bus_gb_s": round(measured.bus, 3),
        "speeds": {str(size): round(speed, 3) for size, speed in measured.speeds.items()},
        "nccl": measured.transport.version,
        "measure_seconds": round(measured.seconds, 1),
    }
    return [f"{word} {plain(text)}", _facts(facts), *_bad(bad)]


def not_measured(why: str) -> list[str]:
    """Return the lines of a verdict without a measurement: the run continues."""
    return [f"none {plain(f'not measured: {why}')}", _facts({"result": "none"})]


def _facts(facts: Mapping[str, Any]) -> str:
    return f"facts {json.dumps(facts)}"


def _bad(nodes: Mapping[str, str]) -> list[str]:
    return [f"bad {node} {plain(text)}" for node, text in nodes.items()]
