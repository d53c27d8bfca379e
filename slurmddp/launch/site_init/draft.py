"""The draft of a site profile: what was found, with its source; what was not found, with how to find it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from slurmddp.launch.job_check.cluster import limit, seconds
from slurmddp.launch.site_init.live import RUNTIMES, Live, NodeType
from slurmddp.launch.site_init.page import Page
from slurmddp.spec.types import slurm_time

_CONFIG, _PARTITION, _NODE = "scontrol show config", "scontrol show partition", "scontrol show node"
_PROBE = "or run `slurmddp sites init --probe`, which looks on the nodes"


def draft(live: Live, name: str) -> str:
    """Return the text of the profile `name`."""
    page = Page(live.date)
    cluster = live.config.get("ClusterName", "")
    page.comment(f"Site profile of Slurm cluster {cluster or '(no name)'}, drafted by `slurmddp sites init` on")
    page.comment(
        f"{live.login.host}. Each value names the command that told it; the end of the file lists what was not"
    )
    page.comment("found. Before you use it: slurmddp sites validate FILE. All keys: docs/sites.md.")
    page.value("name", name)
    page.value("title", f"Slurm cluster {cluster}" if cluster else name, note="write the name that people use")
    page.value("level", "documented", note="no job has looked on the nodes")
    page.missing("documentation", "the address of the site's own pages")
    if cluster:
        page.comment()
        page.value("detect.cluster_names", [cluster], _CONFIG)
    page.comment()
    _architecture(page, live)
    _gpu_request(page, live)
    page.comment()
    for partition, row in live.partitions.items():
        _partition(page, live, partition, row)
    for partition, why in live.left_out.items():
        page.comment(f"{partition} is left out: {why}", 1)
    _job(page, live)
    _not_told(page, live)
    return page.text()


def _architecture(page: Page, live: Live) -> None:
    found = sorted({kind.node.architecture for kind in live.types()} - {""})
    if found in (["x86_64"], ["aarch64"]):
        page.value("architecture", found[0], _NODE)
    else:
        page.missing(
            "architecture", f"{' and '.join(found) or 'unknown'}; if nodes differ, make one profile for each kind"
        )


def _gpu_request(page: Page, live: Live) -> None:
    """How jobs ask for GPUs: --gpus-per-node needs cons_tres."""
    if not any(kind.node.gpus for kind in live.types()):
        page.value("gpu_request", "none", _NODE, "no node has Gres=gpu")
        page.missing("gpu_vendor", f"Slurm counts no GPUs; if the nodes have none, write `gpu_vendor: none`, {_PROBE}")
        return
    select = live.config.get("SelectType", "")
    if select:
        page.value(
            "gpu_request", "gpus-per-node" if "cons_tres" in select else "gres", _CONFIG, f"SelectType is {select}"
        )
    else:
        page.missing("gpu_request", "gpus-per-node, or gres; SelectType of `scontrol show config` was not told")
    page.missing("gpu_vendor", f"nvidia (the default) or amd: `srun --gpus=1 nvidia-smi`, {_PROBE}")


def _partition(page: Page, live: Live, name: str, row: Mapping[str, str]) -> None:
    kinds, here = live.types(name), ("partitions", name)
    number = sum(len(kind.nodes) for kind in kinds)
    told = "; ".join(map(str, kinds)) if kinds else "Slurm shows none of its nodes"
    with page.part(here, f"{number} nodes: {told}"):
        if kinds:
            _gpus(page, here, kinds)
            cpus = {_capped(kind.node.cpus, row.get("MaxCPUsPerNode")) for kind in kinds}
            _same(page, (*here, "cpus_per_node"), cpus - {0}, _NODE, _threads(kinds))
            memories = {_memory(live, kind, row) for kind in kinds}
            _same(page, (*here, "mem_per_node"), {f"{each}M" for each in memories if each > 0}, _NODE)
        wall, told_by = _max_time(live, row)
        if wall is not None:
            page.value((*here, "max_time"), _time(wall), told_by)
        if nodes := limit(row.get("MaxNodes")):
            page.value((*here, "max_nodes"), nodes, _PARTITION)
        for field in ("AllowAccounts", "AllowQos", "AllowGroups"):
            if row.get(field, "ALL") != "ALL":
                page.comment(f"{field}={row[field]}", 2)


def _gpus(page: Page, here: tuple[str, ...], kinds: Sequence[NodeType]) -> None:
    each = {tuple(sorted(kind.node.gpus.items())) for kind in kinds}
    if each == {()}:
        page.comment("gpus_per_node: Slurm counts none; write 0 if the nodes have no GPUs", 2)
        return
    if len(each) > 1:
        page.comment("gpus_per_node: the nodes differ, so each job says it (resources.gpus_per_node)", 2)
        return
    (found,) = each
    if len(found) > 1:
        page.comment(f"gpus_per_node: several types: {', '.join(kind for kind, _ in found)}", 2)
        return
    ((kind, count),) = found
    page.value((*here, "gpus_per_node"), count, _NODE)
    if kind:
        page.value((*here, "gpu_type"), kind, _NODE)
    else:
        page.comment("gpu_type: Slurm gives the GPUs no type", 2)


def _same(page: Page, key: tuple[str, ...], found: Collection[str | int], source: str, note: str = "") -> None:
    """Write a value that all nodes have; a job on nodes that differ says what it wants."""
    if len(found) == 1:
        page.value(key, next(iter(found)), source, note)
    elif found:
        page.comment(f"{key[-1]}: the nodes differ, so each job says it (resources.{key[-1]})", 2)


def _threads(kinds: Sequence[NodeType]) -> str:
    threads = {kind.node.threads_per_core for kind in kinds}
    return f"hardware threads, {max(threads)} per core" if max(threads) > 1 else ""


def _memory(live: Live, kind: NodeType, row: Mapping[str, str]) -> int:
    """What a job may have of a node: less than the node has where MaxMemPerNode or MaxMemPerCPU says so."""
    most = kind.node.memory
    for where in (row, live.config):
        most = _capped(most, where.get("MaxMemPerNode"))
        per_cpu = limit(where.get("MaxMemPerCPU"))
        most = min(most, per_cpu * kind.node.cpus) if per_cpu else most
    return most


def _capped(number: int, most: str | None) -> int:
    """A number, and a limit as Slurm prints it."""
    return min(number, limit(most) or number)


def _max_time(live: Live, row: Mapping[str, str]) -> tuple[int | None, str]:
    """The partition's limit, or that of its QOS if it is lower; and who told it."""
    limits = [(seconds(row.get("MaxTime")), _PARTITION)]
    if row.get("QoS", "N/A") not in ("N/A", "(null)"):
        limits.append((live.cluster.qos_limits.get(row["QoS"]), f"sacctmgr show qos {row['QoS']}"))
    known = [(wall, why) for wall, why in limits if wall]
    return min(known) if known else (None, "")


def _time(wall: int) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if wall % size == 0:
            return f"{wall // size}{unit}"
    return slurm_time(wall)


def _job(page: Page, live: Live) -> None:
    """The defaults of jobs, and the keys that only the user can know."""
    default = next((name for name, row in live.partitions.items() if row.get("Default") == "YES"), None)
    only = next(iter(live.partitions)) if len(live.partitions) == 1 else None
    runtime = next((name for name in RUNTIMES if name in live.login.runtimes), None)
    required = [] if default or only else ["resources.partition"]
    required += [] if runtime else ["container.runtime"]
    page.comment()
    if required:
        page.value("required", required, note="not found, so each job must set it, or this file below `job`")
    if default or only:
        page.value(
            "job.resources.partition", default or str(only), _PARTITION, "Default=YES" if default else "the only one"
        )
    if runtime:
        told = live.login.runtimes[runtime]
        where = f"{told}, on {live.login.host}: nodes may differ"
        page.value("job.container.runtime", runtime, f"{runtime} --version", where, sure=False)
    else:
        page.missing("job.container.runtime", f"no apptainer or singularity on {live.login.host}{_others(live)}")


def _others(live: Live) -> str:
    """What else could run a container, or be loaded to do it."""
    modules = [name for name in live.login.modules if any(each in name.lower() for each in RUNTIMES)]
    told = f"; modules: {', '.join(modules[:8])} (then `setup: [module load NAME]` below `job`)" if modules else ""
    return told + ("; `srun --help` has --container-image, so `runtime: pyxis` may work" if live.login.pyxis else "")


def _not_told(page: Page, live: Live) -> None:
    login, config = live.login, live.config
    accounts = live.cluster.accounts
    if accounts:
        names = ", ".join(dict.fromkeys(each.account for each in accounts))
        qos = ", ".join(dict.fromkeys(name for each in accounts for name in each.qos))
        page.missing(
            "job.resources.account", f"you may use {names} (sacctmgr show associations); QOS: {qos or 'default'}"
        )
    else:
        page.missing(
            "job.resources.account", "sacctmgr told none; if sbatch wants one: `required: [resources.account]`"
        )
    interfaces = ", ".join(login.interfaces) or "unknown"
    page.missing("job.network.interface", f"{login.host} has {interfaces}; nodes may differ: `srun ip addr`, {_PROBE}")
    page.missing("fabric", f"infiniband, slingshot11, efa, roce, ...: `srun ls /sys/class/infiniband`, {_PROBE}")
    page.missing("driver", f"`srun --gpus=1 nvidia-smi`, {_PROBE}")
    page.missing("job.container.image", "an image that the nodes can read: `slurmddp build-image`")
    folders = "; here: " + ", ".join(f"${key}={value}" for key, value in login.folders.items()) if login.folders else ""
    page.missing("job.paths.runs", f"a folder that all nodes share, without a small quota{folders}")
    page.missing("internet_on_nodes", "`srun curl -sI https://example.org`; false if it fails")
    page.missing("requeue", "whether a job may requeue itself: `slurmddp rehearse JOB.yaml` tries it")
    if modules := login.modules:
        page.missing("job.setup", f"modules that a job may need: {', '.join(modules[:20])}")
    if plugins := config.get("JobSubmitPlugins"):
        page.missing(
            "unsupported_flags", f"JobSubmitPlugins={plugins}: it may change or refuse options; read the site's pages"
        )
    for line in live.cluster.silent:
        page.missing("(no answer)", line)
