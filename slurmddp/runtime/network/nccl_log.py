"""The network that NCCL chose, read from its own log (NCCL_DEBUG=INFO): versions 2.4 to 2.27, and RCCL. Pure."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

#: What plugins for libfabric call themselves.
_LIBFABRIC = ("AWS Libfabric", "Libfabric", "OFI")
_TCP = ("Socket", "FastSocket")
_TCP_PROVIDERS = ("tcp", "sockets", "udp", "net")
#: Lines that say why a faster network is not used, with the words for people.
_REASONS = (
    (r"NET/IB : No device found", "NCCL found no InfiniBand or RoCE device"),
    (r"(?:Failed to|Could not) open libibverbs", "libibverbs is missing"),
    (r"(NCCL_IB_DISABLE set by environment to [1-9]\d*)", r"\1"),
    (r"(NCCL_NET set by environment to Socket)", r"\1"),
    (r"NET/OFI .*(?:No eligible providers|[Cc]ouldn't find any optimal provider)", "libfabric found no fast network"),
    (r"NET/OFI .*(?:initialization failed|Initializing plugin failed)", "the plugin aws-ofi-nccl failed to start"),
    (r"NET/Plugin ?:.*(?:No plugin found|Could not find: |cannot open shared object)", "NCCL found no network plugin"),
)
_DEVICE = re.compile(r"([A-Za-z][\w.+-]*):(?:uverbs\d+:)?\d+/(IB|RoCE)")
_VIA = re.compile(r"via NET/([^/\n]+?)/(\d+)(?:\(\d+\))?((?:/[^/\s]+)*)")


@dataclass(frozen=True)
class Transport:
    """The network that NCCL uses between nodes.

    name:     IB, OFI, Socket, or as a plugin calls itself; empty if the log does not tell.
    devices:  adapters or interfaces that carry data; all that NCCL found, if the log does not tell which.
    link:     IB or RoCE, for adapters.         provider: of libfabric, such as efa, cxi, tcp.
    gpudirect: whether GPUDirect RDMA is used; None: unknown.
    version:  of NCCL.                          reasons: why a faster network is not used, as far as the log tells.
    """

    name: str = ""
    devices: tuple[str, ...] = ()
    link: str = ""
    provider: str = ""
    gpudirect: bool | None = None
    version: str = ""
    reasons: tuple[str, ...] = ()

    @property
    def is_tcp(self) -> bool:
        return self.name in _TCP or (self.name == "OFI" and self.provider.split(";")[0] in _TCP_PROVIDERS)

    @property
    def text(self) -> str:
        """Few words: `IB mlx5_0..3`, `OFI efa`, `Socket eth0`."""
        kind = f"{self.name} (RoCE)" if self.link == "RoCE" else self.name or "an unknown network"
        parts = [kind, self.provider, short(self.devices)]
        if self.gpudirect is False and self.name and not self.is_tcp:
            parts.append("without GPUDirect RDMA")
        return " ".join(part for part in parts if part)


def from_json(value: Any) -> Transport:
    """Return the Transport whose `asdict` went through JSON. Raises AttributeError, TypeError."""
    fields: dict[str, Any] = {name: tuple(item) if isinstance(item, list) else item for name, item in value.items()}
    return Transport(**fields)


def read(lines: Iterable[str]) -> Transport:
    """Return the network of one rank, or of several that write into one log."""
    chosen = provider = version = ""
    found: dict[str, dict[int, list[tuple[str, str]]]] = {}
    used: dict[str, set[int]] = {}
    direct: bool | None = None
    reasons: dict[str, None] = {}
    for line in lines:
        if match := re.search(r"[NR]CCL version (\d+(?:\.\d+)+)", line):
            version = version or match[1]
        elif match := _VIA.search(line):
            used.setdefault(match[1], set()).add(int(match[2]))
            direct = direct or "GDRDMA" in match[3]
        elif match := re.search(r"NCCL INFO (?:Using network|Assigned NET plugin) (.+?)(?: to comm)?\s*$", line):
            chosen = match[1]
        elif match := re.search(r"NET/(\w+) ?: Using (\[\d.*)", line):
            found[match[1]] = _devices(match[2])
        elif match := re.search(r"NET/OFI Selected [Pp]rovider is ([^\s,(]+)", line):
            provider = match[1]
        for pattern, words in _REASONS:
            if match := re.search(pattern, line):
                reasons[match.expand(words)] = None
    name = max(used, key=lambda kind: len(used[kind])) if used else chosen or _only(found)
    ports = _of(name, found)
    at = [number for number in sorted(used.get(name, ())) if number in ports] or sorted(ports)
    carried = [port for number in at for port in ports[number]]
    ours = "OFI" if name in _LIBFABRIC else name
    return Transport(
        name=ours,
        devices=tuple(dict.fromkeys(device for device, _ in carried)),
        link=next((link for _, link in carried if link), ""),
        provider=provider if ours == "OFI" else "",
        gpudirect=direct,
        version=version,
        reasons=tuple(reasons),
    )


def _devices(text: str) -> dict[int, list[tuple[str, str]]]:
    """Return number -> (device, link), from `[0]mlx5_0:1/IB [1]={[2] mlx5_1:1/IB, [3] mlx5_2:1/IB} [RO]; OOB ...`."""
    text = re.split(r" ?; ?OOB", text)[0]
    merged = re.findall(r"\[(\d+)\]=\{([^}]*)\}", text)
    single = re.findall(r"\[(\d+)\] ?([^\s\[\]{},]+)", re.sub(r"\[\d+\]=\{[^}]*\}", "", text))
    devices: dict[int, list[tuple[str, str]]] = {}
    for number, part in (*merged, *single):
        named = [(match[1], match[2]) for match in _DEVICE.finditer(part)]
        devices[int(number)] = named or [(part.split(":")[0], "")]
    return devices


def _only(found: dict[str, dict[int, list[tuple[str, str]]]]) -> str:
    """NCCL 2.4 and older do not say `Using network`; they look for sockets in any case, and for InfiniBand first."""
    return next((name for name in ("IB", *found) if name in found), "")


def _of(name: str, found: dict[str, dict[int, list[tuple[str, str]]]]) -> dict[int, list[tuple[str, str]]]:
    """The devices of a network. Plugins that replace NET/IB (IBext, `NCCL RDMA Plugin`) list theirs as NET/IB."""
    if name not in found and (name.startswith("IB") or "RDMA" in name):
        name = "IB"
    return found.get(name, {})


def merge(parts: Sequence[Transport]) -> Transport:
    """Return the network of several ranks: the name of the slowest kind, the devices of all that use it."""
    known = [part for part in parts if part.name]
    if not known:
        return parts[0] if parts else Transport()
    first = next((part for part in known if part.is_tcp), known[0])
    same = [part for part in known if part.name == first.name]
    direct = [part.gpudirect for part in same if part.gpudirect is not None]
    return Transport(
        name=first.name,
        devices=tuple(sorted({device for part in same for device in part.devices}, key=_natural)),
        link=next((part.link for part in same if part.link), ""),
        provider=first.provider,
        gpudirect=any(direct) if direct else None,
        version=next((part.version for part in parts if part.version), ""),
        reasons=tuple(dict.fromkeys(reason for part in same for reason in part.reasons)),
    )


def short(devices: Sequence[str]) -> str:
    """Return names in few characters: `mlx5_0..3`, `mlx5_0,4,5`, `eth0`."""
    split = [re.fullmatch(r"(.*?)(\d*)", device) for device in sorted(devices, key=_natural)]
    numbers: dict[str, list[str]] = {}
    for match in split:
        assert match is not None
        numbers.setdefault(match[1], []).append(match[2])
    return " ".join(stem + _range(found) for stem, found in numbers.items())


def _range(numbers: Sequence[str]) -> str:
    values = [int(number) for number in numbers if number]
    if len(values) > 2 and values == list(range(values[0], values[-1] + 1)):
        return f"{values[0]}..{values[-1]}"
    return ",".join(numbers)


def _natural(name: str) -> tuple[str, int]:
    match = re.fullmatch(r"(.*?)(\d*)", name)
    assert match is not None
    return match[1], int(match[2] or -1)
