"""Image, dataset, binds, run folder, caches: what is not there, too small, or seen by one node only."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from slurmddp.job.plan.program import host_path
from slurmddp.launch.accelerate import ignored
from slurmddp.launch.job_check.rule import Hit, Subject, rule
from slurmddp.launch.problems import driver_verdict
from slurmddp.launch.quotas import quotas

#: A checkpoint of a small model fits in it; with less, the first save may fail.
_LEAST_BYTES = 2 << 30
_LEAST_INODES = 2000
_OF_ONE_NODE = ("/tmp", "/var/tmp", "/dev/shm", "/run")
_OF_THE_IMAGE = frozenset(("/", "/bin", "/etc", "/lib", "/lib64", "/opt", "/sbin", "/usr", "/usr/bin", "/usr/local"))


@rule
def submit_refuses(subject: Subject) -> Iterator[Hit]:
    for error in subject.missing:
        if error not in subject.elsewhere:
            yield Hit(error.where or "", error.what, error.todo)


@rule
def image_driver(subject: Subject) -> Iterator[Hit]:
    verdict = driver_verdict(subject.prepared)
    if verdict is not None and verdict.kind not in ("native", "minor"):
        message = f"the image may not run on these nodes: {verdict.why}"
        yield Hit(subject.where("container.image"), message, verdict.todo or "ask the site for the driver's version")


@rule
def site_bind(subject: Subject) -> Iterator[Hit]:
    for bind in subject.prepared.plan.container.binds:
        if bind.by_site and not os.path.exists(bind.source):
            message = f"the site's bind source {bind.source} is not on this machine"
            yield Hit(f"site {subject.prepared.plan.site.name}", message)


@rule
def accelerate_layout(subject: Subject) -> Iterator[Hit]:
    plan = subject.prepared.plan
    if keys := ignored(subject.prepared):
        ranks = plan.nodes.ranks_per_node or "auto"
        message = f"{', '.join(keys)} of {plan.accelerate} is ignored: the job starts {plan.nodes.max} x {ranks} ranks"
        yield Hit(subject.where("launch.accelerate"), message)


@rule
def login_node(subject: Subject) -> Iterator[Hit]:
    import shutil

    if not subject.prepared.plan.site.queues and "SLURM_JOB_ID" not in subject.environment:
        if shutil.which("sbatch", path=subject.environment.get("PATH")):
            yield Hit(subject.where("site"), "site local would train on this machine, which has sbatch")


@rule
def bind_hides(subject: Subject) -> Iterator[Hit]:
    for index, bind in enumerate(subject.prepared.resolved.job.container.binds):
        destination = os.path.normpath(bind.destination or bind.source)
        if destination in _OF_THE_IMAGE:
            where = subject.where(f"container.binds.{index}")
            yield Hit(where, f"the bind {bind.source} hides the image's own {destination}")


@rule
def local_folder(subject: Subject) -> Iterator[Hit]:
    plan = subject.prepared.plan
    if not plan.queued:
        return
    named = [("paths.runs", "the run folder", plan.runs_root)]
    named += [("train.data.path", "the dataset", host_path(path, plan.container.binds)) for path in plan.data_paths]
    named += [("container.image", "the image", plan.container.image)] if plan.container.image else []
    for key, label, path in named:
        real = os.path.realpath(path)
        if any(real == top or real.startswith(f"{top}/") for top in _OF_ONE_NODE):
            yield Hit(subject.where(key), f"{label} {path} is in a folder that differs on each node")


@rule
def space(subject: Subject) -> Iterator[Hit]:
    root = Path(subject.prepared.plan.runs_root)
    there = next((each for each in (root, *root.parents) if each.exists()), None)
    if there is None:
        return
    usage = os.statvfs(there)
    free = usage.f_bavail * usage.f_frsize
    if free < _LEAST_BYTES:
        yield Hit(subject.where("paths.runs"), f"only {free >> 20:,} MiB are free in {there}")
    if usage.f_files and usage.f_favail < _LEAST_INODES:
        yield Hit(subject.where("paths.runs"), f"only {usage.f_favail:,} more files fit into {there}")
    for quota in quotas(there):
        if quota.bytes is not None and quota.bytes < _LEAST_BYTES:
            message = f"{quota.whose} quota on {quota.mount} leaves only {quota.bytes >> 20:,} MiB"
            yield Hit(subject.where("paths.runs"), message)
        if quota.files is not None and quota.files < _LEAST_INODES:
            yield Hit(
                subject.where("paths.runs"), f"{quota.whose} quota on {quota.mount} leaves only {quota.files:,} files"
            )


@rule
def shared_cache(subject: Subject) -> Iterator[Hit]:
    if subject.prepared.plan.nodes.max < 2:
        return
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH"):
        value = subject.prepared.resolved.job.environment.get(name)
        if value and not re.match(r"(/tmp|/var/tmp|/dev/shm)(/|$)|.*TMP", value):
            yield Hit(subject.where(f"environment.{name}"), f"{name}={value} is a folder that the nodes share")
