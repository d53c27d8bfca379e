"""What `build-image --on-node` asks Slurm for: by the site's profile, and what the user has configured for all jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from slurmddp.errors import UserError
from slurmddp.job.document import Document, read_file
from slurmddp.job.job import Job
from slurmddp.job.layers import Layered, merge
from slurmddp.job.resolve import environment_layer
from slurmddp.job.site import Partition, Site
from slurmddp.job.types import Line, Model, SbatchValue, slurm_time
from slurmddp.job.validate import validate
from slurmddp.launch.image import named_site
from slurmddp.sites.catalogue import config_files

HERE = "remove --on-node to build on this machine"
_HOUR = 3600


class _Resources(Model):
    partition: SbatchValue | None = None
    account: SbatchValue | None = None
    qos: SbatchValue | None = None


class _Layers(Model):
    """What of a job's layers holds for a build, too."""

    resources: _Resources = _Resources.model_construct()
    setup: tuple[Line, ...] = ()


class Asked(NamedTuple):
    """site: as the job names it, None where none is known; options: of sbatch; setup: lines for the node's shell."""

    site: str | None
    options: tuple[str, ...]
    setup: tuple[str, ...]


def ask(site: str | None, environment: Mapping[str, str]) -> Asked:
    """Return what to ask Slurm for. Raises UserError for a site without Slurm, or if a required setting is missing."""
    named = named_site(site, environment)
    if named is None:  # Slurm's own defaults
        return Asked(None, _sbatch_options(Site.model_construct(), _Resources.model_construct()), ())
    name, profile, layer = named
    if profile.scheduler != "slurm":
        raise UserError(f"site {profile.name} has no Slurm, so --on-node does not work", where="--on-node", todo=HERE)
    layers = _layers(layer, environment)
    options = _sbatch_options(profile, layers.resources)
    if "resources.account" in profile.required and not any(line.startswith(("--account", "-A")) for line in options):
        todo = "set resources.account in ~/.config/slurmddp/config.yaml, or export SLURMDDP_RESOURCES__ACCOUNT=NAME"
        raise UserError(
            f"site {profile.name} requires an account, but resources.account is not set", where="--on-node", todo=todo
        )
    return Asked(name, options, layers.setup)


def _layers(site_layer: Document, environment: Mapping[str, str]) -> _Layers:
    """Return the site's layer of the job, and the user's below a job file. Raises UserError."""
    configuration = [read_file(path, "configuration") for path in config_files(environment)]
    merged = merge(Job, [site_layer, *configuration, environment_layer(environment)])
    resources = merged.tree.get("resources") or {}
    if isinstance(resources, dict):
        resources = {key: resources[key] for key in _Resources.model_fields if key in resources}
    tree = {"resources": resources, "setup": merged.tree.get("setup") or []}
    return validate(_Layers, Layered(tree, merged.origins, {}))


def _sbatch_options(site: Site, wanted: _Resources) -> tuple[str, ...]:
    """Return the options for one task on one node, without GPUs, in this site's form."""
    own, unsupported = site.images.on_node, set(site.unsupported_flags)
    name = own.partition or wanted.partition
    partition = site.partitions.get(name or "", Partition.model_construct())
    form = dict(partition.ask) if partition.ask is not None else {"partition": name}
    # The QOS of jobs goes with their own partition.
    qos = form.get("qos") or (wanted.qos if own.partition is None else None)
    time = own.time or min(_HOUR, partition.max_time or _HOUR)
    options = [
        ("--nodes", "1"),
        ("--ntasks", "1"),
        ("--cpus-per-task", own.cpus_per_node or site.images.processors),
        ("--mem", f"{own.mem_per_node}M" if own.mem_per_node else None),
        ("--time", slurm_time(time)),
        ("--partition", form.get("partition")),
        ("--account", own.account or wanted.account),
        ("--qos", qos),
        ("--constraint", form.get("constraint")),
        # What the registry wants to know stands in the environment, and nowhere else.
        ("--export", "ALL"),
    ]
    left_out = unsupported | {extra.split("=")[0] for extra in own.sbatch}
    lines = [f"{flag}={value}" for flag, value in options if value is not None and flag not in left_out]
    return (*lines, *(flag for flag in ("--no-requeue",) if flag not in left_out), *own.sbatch)
