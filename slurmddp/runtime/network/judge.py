"""From what was measured to what it means for the run. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from slurmddp.records import job_events as events
from slurmddp.records.network import GROUPS, LOW, OK, TCP, Verdict
from slurmddp.records.preflight import plain
from slurmddp.runtime.measure.pairs import Pair, isolate
from slurmddp.runtime.network.nccl_log import Transport, merge
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
        return merge(list(self.transports.values()))

    @property
    def text(self) -> str:
        """`NCCL over IB mlx5_0..3, bus 187 GB/s`."""
        over = (
            f"NCCL over {self.transport.text}" if self.backend == "nccl" else f"gloo over TCP {self.interface}".strip()
        )
        return f"{over}, bus {self.bus:.3g} GB/s"


def explain(speeds: Mapping[Pair, float], floor: float) -> tuple[dict[str, str], str]:
    """Return the slow nodes, each with what was seen of it, and one sentence on what the pairs tell.

    speeds: GB/s by pair of nodes, of `pairs.rounds`.
    """
    if len(speeds) < 2:
        return {}, "not isolated: with two nodes, either can be the slow one"
    slow = {pair: speed for pair, speed in speeds.items() if speed < floor}
    if not slow:
        return (
            {},
            f"not isolated: each pair of nodes alone reaches {floor:.3g} GB/s (a switch, or a link between groups?)",
        )
    nodes, links = isolate(speeds, slow)
    if nodes:
        reasons = {}
        for node in nodes:
            seen = ((pair[1] if pair[0] == node else pair[0], speed) for pair, speed in slow.items() if node in pair)
            reasons[node] = "slow network: " + " and ".join(f"{speed:.3g} GB/s with {other}" for other, speed in seen)
        return reasons, f"slow: {', '.join(nodes)}"
    shown = [f"{first}-{second} ({slow[first, second]:.3g} GB/s)" for first, second in links or slow]
    if links:
        return {}, f"slow link: {', '.join(shown)}; these nodes are fast with others"
    if len(slow) == len(speeds):
        return {}, "not isolated: no pair of nodes is fast"
    return {}, f"not isolated: slow pairs {', '.join(shown[:3])}"


def verdict(
    measured: Measured, wish: Wish, faulty: Mapping[str, str] | None = None, pairs: str = "", groups: str = ""
) -> Verdict:
    """Return what a measurement means for the run.

    faulty: nodes; pairs: what `explain` said; groups: what `groups.trouble` said.
    """
    text, result, bad = measured.text, OK, dict(faulty or {})
    on_tcp = [node for node, transport in measured.transports.items() if transport.is_tcp]
    promised = wish.fabric in _TODO and not wish.allow_socket
    if on_tcp and promised:
        result = TCP
        tcp = merge([measured.transports[node] for node in on_tcp])
        why = f" ({'; '.join(tcp.reasons)})" if tcp.reasons else ""
        text = (
            f"NCCL uses TCP ({tcp.text}) on {listed(on_tcp, 3)}, but this site's network is {wish.fabric}{why} - "
            f"{_TODO[wish.fabric]}; or set network.allow_socket: true"
        )
        if 2 * len(on_tcp) < len(measured.transports):
            bad = dict.fromkeys(on_tcp, f"NCCL uses TCP there{why}") | bad
    elif groups:
        result = GROUPS
        text += f"; {groups} - {_MORE_GROUPS}"
    elif wish.is_low(measured.bus):
        result = LOW
        text += f", below network.min_bandwidth ({wish.floor:.3g} GB/s)" + (f"; {pairs}" if pairs else "")
    facts = events.Measured(
        result=result,
        backend=measured.backend,
        transport=measured.transport.name if measured.backend == "nccl" else "TCP",
        devices=tuple(measured.transport.devices) or ((measured.interface,) if measured.interface else ()),
        bus_gb_s=round(measured.bus, 3),
        speeds={str(size): round(speed, 3) for size, speed in measured.speeds.items()},
        nccl=measured.transport.version,
        measure_seconds=round(measured.seconds, 1),
    )
    return Verdict(plain(text), facts, {node: plain(why) for node, why in bad.items()})
