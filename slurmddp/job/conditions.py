"""`when` of a site profile: which of its entries hold for a job, and the layers of the job that they add."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from slurmddp.container import runtime_named
from slurmddp.job.document import Document
from slurmddp.job.job import Job
from slurmddp.job.site import Partition, Site, When


def holding(site: Site, job: Job) -> Iterator[tuple[str, When]]:
    """The entries whose conditions the job meets, by name, in the order of the profile: a later one wins."""
    resources = job.resources
    partition = site.partitions.get(resources.partition or "", Partition.model_construct())
    properties = {
        "partition": resources.partition,
        "account": resources.account,
        "qos": resources.qos or (partition.ask or {}).get("qos"),
        "runtime": runtime_named(job.container.runtime).runtime,
        "image": PurePosixPath(job.container.image or "").name if job.container.needs_image else None,
    }
    nodes = resources.node_range.max + resources.node_range.spares
    for name, entry in site.when.items():
        patterns = {key: getattr(entry, key) for key in properties}
        if _in_range(entry.nodes, nodes) and all(
            pattern is None or fnmatchcase(properties[key] or "", pattern) for key, pattern in patterns.items()
        ):
            yield name, entry


def conditional_layers(site: Site, job: Job, site_layer: Document) -> list[Document]:
    """The layers of the job that go over the site's own. Their origins are among those of `site_layer`."""
    layers = []
    for name, entry in holding(site, job):
        above = ("when", name, "job")
        origins = {key[3:]: origin for key, origin in site_layer.origins.items() if key[:3] == above and len(key) > 3}
        layers.append(Document(entry.job, origins))
    return layers


def _in_range(text: str | None, nodes: int) -> bool:
    if text is None:
        return True
    least, dash, most = text.partition("-")
    return int(least) <= nodes and (nodes <= int(most) if most else bool(dash) or nodes == int(least))
