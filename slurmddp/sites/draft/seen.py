"""What a probe job saw on a node: the lines of templates/sbatch/site_probe.sh, read."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from slurmddp.container import SIF_PROGRAMS
from slurmddp.sites.draft.live import NodeType

_PREFIX = "slurmddp-probe "
#: Interfaces of containers and virtual machines, which lead to no other node.
_VIRTUAL = re.compile(r"lo|docker|virbr|veth|cni|flannel|podman|br-|ifb|bond_slave|dummy")


class Port(NamedTuple):
    """A port of an RDMA device, as /sys/class/infiniband shows it."""

    device: str
    number: str
    state: str
    rate: str
    link: str
    driver: str

    @property
    def active(self) -> bool:
        return "ACTIVE" in self.state


class Seen(NamedTuple):
    """A node type and what its probe saw. why: why it saw nothing, else empty; job: its id, if there was one."""

    kind: NodeType
    partition: str
    job: str
    facts: Mapping[str, Sequence[str]]
    why: str = ""

    def first(self, key: str) -> str:
        """Return the first line of a key, or an empty text."""
        return next(iter(self.facts.get(key, ())), "")

    @property
    def node(self) -> str:
        return self.first("node")

    @property
    def vendor(self) -> str | None:
        """Return nvidia, amd or none; None where what is there says neither."""
        devices = self.facts.get("device", ())
        names = {"nvidia"} if self.gpus_nvidia or any(device.startswith("/dev/nvidia") for device in devices) else set()
        names |= {"amd"} if self.facts.get("amd") or "/dev/kfd" in devices else set()
        if len(names) == 1:
            return names.pop()
        return None if names or (self.kind.node.gpus and devices) else "none"

    @property
    def gpus_nvidia(self) -> list[tuple[str, str, str]]:
        """Return name, memory and driver of each GPU that nvidia-smi lists."""
        rows = [tuple(cell.strip() for cell in line.split(",")) for line in self.facts.get("nvidia", ())]
        return [(row[0], row[1], row[2]) for row in rows if len(row) == 3 and re.fullmatch(r"[0-9.]+", row[2])]

    @property
    def gpus_amd(self) -> list[str]:
        """Return the name of each GPU that rocm-smi lists."""
        rows = [line.split(",") for line in self.facts.get("amd", ()) if line.count(",")]
        head = [cell.strip().lower() for cell in rows[0]] if rows else []
        column = head.index("card series") if "card series" in head else None
        return [row[column].strip() for row in rows[1:] if column is not None and len(row) > column]

    @property
    def gpus(self) -> list[str]:
        return [name for name, _, _ in self.gpus_nvidia] or self.gpus_amd

    @property
    def driver(self) -> str | None:
        """Return NVIDIA's driver; None without one."""
        drivers = {driver for _, _, driver in self.gpus_nvidia}
        return drivers.pop() if len(drivers) == 1 else None

    @property
    def ports(self) -> list[Port]:
        rows = (line.split("|") for line in self.facts.get("port", ()))
        return [Port(*row) for row in rows if len(row) == len(Port._fields)]

    @property
    def fabric(self) -> str | None:
        """Return the network that the devices prove; None for all that they leave open, such as RoCE or Ethernet."""
        if self.facts.get("slingshot"):
            return "slingshot11"
        active = [port for port in self.ports if port.active]
        if any(port.driver == "efa" for port in active):
            return "efa"
        return "infiniband" if any(port.link == "InfiniBand" for port in active) else None

    @property
    def interfaces(self) -> dict[str, str]:
        """Return address/bits of each interface that may lead to other nodes."""
        states = dict(line.split("|", 1) for line in self.facts.get("interface", ()) if "|" in line)
        lines = "\n".join(self.facts.get("address", ()))
        pairs = re.findall(r"^\d+:\s+(\S+)\s+inet (\S+)", lines, re.MULTILINE)
        return {
            name: address for name, address in pairs if not _VIRTUAL.match(name) and states.get(name, "up") != "down"
        }

    @property
    def memory_mib(self) -> int | None:
        """Return the memory that the job could use: the node's, or the limit of its cgroup if that is lower."""
        total = self.first("memory_kb")
        limits = [int(text) // 2**20 for text in self.facts.get("memory_limit", ()) if text.isdecimal()]
        return min([int(total) // 1024, *limits]) if total.isdecimal() else None

    def size_of(self, key: str) -> str:
        """Return the size of a folder's file system from the output of df, such as 12G."""
        rows = [line.split() for line in self.facts.get(key, ())][1:]
        return f"{int(rows[0][1]) / 2**20:.1f}G" if rows and len(rows[0]) > 1 and rows[0][1].isdecimal() else "unknown"

    def notes(self) -> list[str]:
        """Return what it saw, for people."""
        memory = f"{self.memory_mib}M" if self.memory_mib else "unknown"
        lines = [
            f"CPUs {self.first('cpus')}, memory {memory} (Slurm: {self.kind.node.cpus}, {self.kind.node.memory}M)",
            f"/dev/shm {self.size_of('shm')}; TMPDIR {self.first('tmpdir') or '(not set)'}, {self.size_of('tmp')}; "
            f"memlock {self.first('memlock')}; open files {self.first('open_files')}",
        ]
        models = [f"{self.gpus.count(name)} x {name}" for name in dict.fromkeys(self.gpus)]
        lines.append(f"GPUs: {', '.join(models) or 'none seen'}{f', driver {self.driver}' if self.driver else ''}")
        lines += [f"  {line.rstrip()}" for line in self.facts.get("topology", ()) if line.strip()]
        lines += [
            f"{port.device} port {port.number}: {port.state}, {port.rate}, {port.link}, driver {port.driver}"
            for port in self.ports
        ]
        lines += [f"Slingshot {name}" for name in self.facts.get("slingshot", ())]
        lines.append("interfaces: " + (", ".join(map(" ".join, self.interfaces.items())) or "none with an address"))
        route = self.first("default_route")
        lines.append(f"default route: {route or 'none, so the node may have no internet'}")
        programs = [line for name in (*SIF_PROGRAMS, "enroot") for line in self.facts.get(name, ())[:1]]
        lines.append("programs: " + ", ".join(dict.fromkeys([*programs, *self.facts.get("program", ())])))
        lines += [f"module: {name}" for name in self.facts.get("module", ())[:8]]
        if "scontrol" not in self.facts.get("program", ()):
            lines.append("scontrol is not on this node")
        if "supervisor" not in self.facts:
            lines.append("no Python 3.6 or newer in /usr: jobs need the one that slurmddp runs with on this node, too")
        return lines


def read_log(text: str) -> dict[str, list[str]] | None:
    """Return key -> lines; None where the probe did not reach its end. Lines of a prolog are skipped."""
    facts: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith(_PREFIX):
            key, _, value = line.removeprefix(_PREFIX).partition(" ")
            facts.setdefault(key, []).append(value)
    return facts if "end" in facts else None
