"""The draft of a site profile: what was found, with its source; what was not found, with how to find it."""

from collections.abc import Callable, Collection, Mapping, Sequence

from slurmddp.container import SIF_PROGRAMS
from slurmddp.job.types import slurm_time
from slurmddp.launch.job_check.cluster import limit
from slurmddp.sites.draft.live import PARTITION, Live, NodeType
from slurmddp.sites.draft.page import Page
from slurmddp.sites.draft.seen import Seen

_CONFIG, _NODE = "scontrol show config", "scontrol show node"
_PROBE = "or run `slurmddp site init --probe`"


def draft(live: Live, name: str, seen: Sequence[Seen] = ()) -> str:
    """Return the text of the profile `name`. seen: what the probes of the node types saw, if there were any."""
    return _Draft(live, seen).text(name)


class _Draft:
    def __init__(self, live: Live, seen: Sequence[Seen]) -> None:
        self.live, self.page = live, Page(live.date)
        self.all = seen
        self.seen = [each for each in seen if each.facts]
        self.source = f"probe of {', '.join(each.node for each in self.seen)}"

    def text(self, name: str) -> str:
        page, live, cluster = self.page, self.live, self.live.config.get("ClusterName", "")
        command = "slurmddp site init --probe" if self.all else "slurmddp site init"
        page.comment(
            f"Site profile of Slurm cluster {cluster or '(no name)'}, drafted by `{command}` on {live.login.host}."
        )
        page.comment("A comment on each value names its source. The end of the file lists what was not found.")
        page.comment("Before you use it: slurmddp site validate FILE. All keys: docs/sites.md.")
        page.value("name", name)
        page.value("title", f"Slurm cluster {cluster}" if cluster else name, note="write the name that people use")
        if self.seen:
            page.value("level", "probed", note=f"{len(self.seen)} of {len(self.all)} node types; see the end")
        else:
            page.value("level", "documented", note="no probe job has inspected the nodes")
        page.missing("documentation", "the address of the site's own pages")
        self.fabric()
        if cluster:
            page.comment()
            page.value("detect.cluster_names", [cluster], _CONFIG)
        page.comment()
        self.architecture()
        self.gpus()
        page.comment()
        for partition, row in live.partitions.items():
            self.partition(partition, row)
        for partition, reason in live.left_out.items():
            page.comment(f"{partition} is left out: {reason}", 1)
        self.job()
        self.not_told()
        return page.text(self.node_types())

    def agreed(self, of: Callable[[Seen], str | None], *, gpus: bool = False) -> str | None:
        """Return what all probes saw alike; None where they differ. gpus: of nodes with GPUs only, if there are any."""
        having = [each for each in self.seen if each.vendor != "none"] if gpus else []
        values = {of(each) for each in having or self.seen}
        return values.pop() if len(values) == 1 else None

    @property
    def vendor(self) -> str | None:
        """Return the vendor of all nodes that have GPUs; none only if no node has any."""
        vendors = {each.vendor for each in self.seen}
        if len(vendors - {"none"}) == 1:
            return (vendors - {"none"}).pop()
        return "none" if vendors == {"none"} and self.sure else None

    @property
    def sure(self) -> bool:
        """Return whether every node type was probed."""
        return len(self.seen) == len(self.all) > 0

    def fabric(self) -> None:
        if fabric := self.agreed(lambda each: each.fabric, gpus=True):
            self.page.value("bases", [fabric], self.source, "devices below /sys/class", sure=self.sure)
            return
        hint = "infiniband, slingshot11, efa, roce, ...: `srun ls /sys/class/infiniband`, " + _PROBE
        if self.seen:
            each = "; ".join(f"{each.node}: {self._devices(each)}" for each in self.seen)
            hint = f"a base: infiniband, slingshot11, efa, roce, ethernet, ...; the probe saw {each}"
        self.page.missing("bases", hint)

    @staticmethod
    def _devices(seen: Seen) -> str:
        ports = [f"{port.device} ({port.link}, {port.state})" for port in seen.ports]
        return ", ".join(ports) or "no RDMA device"

    def architecture(self) -> None:
        architectures = sorted({kind.node.architecture for kind in self.live.types()} - {""})
        if architectures in (["x86_64"], ["aarch64"]):
            self.page.value("architecture", architectures[0], _NODE)
        else:
            shown = " and ".join(architectures) or "unknown"
            self.page.missing("architecture", f"{shown}; if nodes differ, make one profile for each kind")

    def gpus(self) -> None:
        """Write vendor and form of the request. A node without any GPU device has none, whatever Slurm counts."""
        page, live, vendor = self.page, self.live, self.vendor
        counted = any(kind.node.gpus for kind in live.types())
        nothing = "no nvidia-smi, rocm-smi, /dev/nvidia*, /dev/kfd"
        if vendor:
            page.value("gpu_vendor", vendor, self.source, nothing if vendor == "none" else "", sure=self.sure)
        else:
            seen = "; ".join(f"{each.node}: {each.vendor or 'unknown'}" for each in self.seen)
            hint = f"the probe saw {seen}" if seen else f"`srun --gpus=1 nvidia-smi`, {_PROBE}"
            none = "" if counted else "Slurm counts no GPUs; "
            page.missing("gpu_vendor", f"{none}nvidia (the default), amd or none: {hint}")
        if vendor == "none" and counted:
            page.value("gpu_request", "none", self.source, "Slurm counts GPUs, but there are no devices")
        elif not counted:
            page.value("gpu_request", "none", _NODE, "no node has Gres=gpu")
        elif live.gpu_request:
            page.value("gpu_request", live.gpu_request, _CONFIG, f"SelectType is {live.config['SelectType']}")
        else:
            page.missing("gpu_request", "gpus-per-node or gres: `scontrol show config` shows no SelectType")
        if model := self.agreed(lambda each: each.gpus[0] if len(set(each.gpus)) == 1 else None, gpus=True):
            page.value("gpu", model, self.source, sure=self.sure)

    def partition(self, name: str, row: Mapping[str, str]) -> None:
        page, live = self.page, self.live
        kinds, here = live.types(name), ("partitions", name)
        number = sum(len(kind.nodes) for kind in kinds)
        summary = "; ".join(map(str, kinds)) if kinds else "Slurm shows none of its nodes"
        with page.part(here, f"{number} nodes: {summary}"):
            if kinds:
                self.partition_gpus(here, kinds)
                threads = max(kind.node.threads_per_core for kind in kinds)
                note = f"hardware threads, {threads} per core" if threads > 1 else ""
                self.same((*here, "cpus_per_node"), {live.cluster.cpus(kind.node, row) for kind in kinds} - {0}, note)
                # 1 MiB is Slurm's default where nobody has written how much a node has.
                memories = {live.cluster.memory(kind.node, row) for kind in kinds}
                self.same((*here, "mem_per_node"), {f"{each}M" for each in memories if each > 1})
            wall, told_by = live.max_time(row)
            if wall is not None:
                page.value((*here, "max_time"), _time(wall), told_by)
            if nodes := limit(row.get("MaxNodes")):
                page.value((*here, "max_nodes"), nodes, PARTITION)
            for field in ("AllowAccounts", "AllowQos", "AllowGroups"):
                if row.get(field, "ALL") != "ALL":
                    page.comment(f"{field}={row[field]}", 2)

    def partition_gpus(self, here: tuple[str, ...], kinds: Sequence[NodeType]) -> None:
        page, counts = self.page, {tuple(sorted(kind.node.gpus.items())) for kind in kinds}
        shapes = {kind.shape for kind in kinds}
        seen = [each for each in self.seen if each.kind.shape in shapes]
        if len(seen) == len(kinds) and all(each.vendor == "none" for each in seen):
            page.value((*here, "gpus_per_node"), 0, self.source, "no GPU devices")
            return
        if counts == {()}:
            page.comment("gpus_per_node: Slurm counts none; write 0 if the nodes have no GPUs", 2)
            return
        if len(counts) > 1:
            page.comment("gpus_per_node: the nodes differ, so each job must set it (resources.gpus_per_node)", 2)
            return
        (gpus,) = counts
        if len(gpus) > 1:
            page.comment(f"gpus_per_node: several types: {', '.join(kind for kind, _ in gpus)}", 2)
            return
        ((kind, count),) = gpus
        page.value((*here, "gpus_per_node"), count, _NODE)
        if kind:
            page.value((*here, "gpu_type"), kind, _NODE)
        else:
            page.comment("gpu_type: Slurm gives the GPUs no type", 2)
        drivers = {each.driver for each in seen}
        if len(drivers) == 1 and (driver := drivers.pop()):
            page.value((*here, "driver"), driver, self.source, "nvidia-smi")

    def same(self, key: tuple[str, ...], values: Collection[str | int], note: str = "") -> None:
        """Write a value that all nodes have; a job on nodes that differ says what it wants."""
        if len(values) == 1:
            self.page.value(key, next(iter(values)), _NODE, note)
        elif values:
            self.page.comment(f"{key[-1]}: the nodes differ, so each job must set it (resources.{key[-1]})", 2)

    def job(self) -> None:
        """Write the defaults of jobs, and which keys each job must set because nothing told them."""
        page, live = self.page, self.live
        default = next((name for name, row in live.partitions.items() if row.get("Default") == "YES"), None)
        only = next(iter(live.partitions)) if len(live.partitions) == 1 else None
        runtime = self.runtime()
        required = [*([] if default or only else ["resources.partition"]), *([] if runtime else ["container.runtime"])]
        page.comment()
        if required:
            page.value("required", required, note="not found, so each job must set it, or this file below `job`")
        if default or only:
            note = "Default=YES" if default else "the only one"
            page.value("job.resources.partition", default or str(only), PARTITION, note)
        if runtime:
            page.value("job.container.runtime", *runtime, sure=self.sure)
        interface = self.agreed(lambda each: next(iter(each.interfaces)) if len(each.interfaces) == 1 else None)
        if interface:
            page.value("job.network.interface", interface, self.source, "the only one with an address", sure=self.sure)
        else:
            interfaces = [f"{each.node}: {', '.join(each.interfaces) or 'none'}" for each in self.seen]
            where = (
                "; ".join(interfaces)
                or f"{live.login.host} has {', '.join(live.login.interfaces) or 'none'}; nodes may differ"
            )
            page.missing("job.network.interface", f"default: the one that leads to the head node; {where}")

    def runtime(self) -> tuple[str, str, str] | None:
        """Return the runtime that all probed nodes have, else the login node's; with its source and version."""
        login = self.live.login
        if self.seen:
            for name in SIF_PROGRAMS:
                if all(each.first(name) for each in self.seen):
                    return name, self.source, self.seen[0].first(name)
        else:
            for name in SIF_PROGRAMS:
                if version := login.runtimes.get(name):
                    return name, f"{name} --version", f"{version}, on {login.host}: nodes may differ"
        modules = [name for name in login.modules if any(each in name.lower() for each in SIF_PROGRAMS)]
        modules += [name for each in self.seen for name in each.facts.get("module", ()) if name not in modules]
        hint = f"; modules: {', '.join(modules[:8])} (then `setup: [module load NAME]` below `job`)" if modules else ""
        hint += "; `srun --help` has --container-image, so `runtime: pyxis` may work" if login.pyxis else ""
        where = "all of the probed nodes" if self.seen else login.host
        self.page.missing("job.container.runtime", f"neither apptainer nor singularity on {where}{hint}")
        return None

    def not_told(self) -> None:
        page, login, config = self.page, self.live.login, self.live.config
        accounts = self.live.cluster.accounts
        if accounts:
            names = ", ".join(dict.fromkeys(each.account for each in accounts))
            qos = ", ".join(dict.fromkeys(name for each in accounts for name in each.qos)) or "default"
            page.missing("job.resources.account", f"you may use {names} (sacctmgr show associations); QOS: {qos}")
        else:
            page.missing(
                "job.resources.account", "sacctmgr shows none; if sbatch requires one: `required: [resources.account]`"
            )
        page.missing("job.container.image", "an image that the nodes can read: `slurmddp build-image`")
        folders = ", ".join(f"${key}={value}" for key, value in login.folders.items())
        folders = f"; here: {folders}" if folders else ""
        page.missing("job.paths.runs", f"a folder that all nodes share, without a small quota{folders}")
        page.missing("internet_on_nodes", "`srun curl -sI https://example.org`; false if it fails")
        page.missing("requeue", "whether a job may requeue itself: `slurmddp check JOB.yaml --rehearse` tries it")
        if not self.seen:
            page.missing("driver", f"`srun --gpus=1 nvidia-smi`, {_PROBE}")
        if login.modules:
            page.missing("job.setup", f"modules that a job may need: {', '.join(login.modules[:20])}")
        if plugins := config.get("JobSubmitPlugins"):
            hint = "it may change or refuse options; read the site's pages"
            page.missing("unsupported_flags", f"JobSubmitPlugins={plugins}: {hint}")
        for line in self.live.cluster.silent:
            page.missing("(no answer)", line)

    def node_types(self) -> list[str]:
        """Return what the probes saw, for people."""
        lines = []
        for each in self.all:
            job = f", job {each.job}" if each.job else ""
            lines.append(f"{each.kind}, in {each.partition}{job}{f', on {each.node}' if each.facts else ''}")
            lines += [f"  {note}" for note in (each.notes() if each.facts else [f"not probed: {each.why}"])]
        return lines


def _time(wall: int) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if wall % size == 0:
            return f"{wall // size}{unit}"
    return slurm_time(wall)
