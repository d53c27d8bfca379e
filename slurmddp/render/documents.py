"""The job as text for people (job.yaml) and for the runtime (job.json), and the site's snapshot."""

import json
from typing import Any

from pydantic import BaseModel

from slurmddp.job.document import Plain, is_null, typed
from slurmddp.job.expand import expand_data, path_fields, unexpand
from slurmddp.job.plan.model import Plan
from slurmddp.job.plan.program import absolute, absolute_workdir
from slurmddp.job.resolve import SLURM_LAYER, Resolved
from slurmddp.job.types import unit_of


def job_yaml(resolved: Resolved, plan: Plan) -> str:
    """Return the resolved job as a job file, which keeps the same global batch on any number of nodes."""
    job, origins = resolved.job, resolved.layered.origins
    keys = [key[1] for key, origin in origins.items() if origin.layer == SLURM_LAYER and key[0] == "resources"]
    job = job.model_copy(update={"resources": job.resources.model_copy(update=dict.fromkeys(keys))})
    if plan.batch is not None:
        batch = job.train.batch.model_copy(
            update={"global_": plan.batch.total, "micro": plan.batch.micro, "accumulation": None}
        )
        job = job.model_copy(update={"train": job.train.model_copy(update={"batch": batch})})
    title = f"# The resolved job for site {resolved.site.name}. You can submit this file as it is."
    data = expand_data(lambda path: unexpand(absolute(path, plan.cwd)), job.train.data)
    workdir = job.train.workdir and absolute_workdir(job.train.workdir, plan.cwd)
    train = job.train.model_copy(update={"data": data, "workdir": workdir})
    return _yaml(title, job.model_copy(update={"train": train}), plan.cwd)


def site_yaml(resolved: Resolved) -> str:
    """Return the site's profile, bases merged, as it was at submission."""
    return _yaml("# The site profile at submission, merged with its bases.", resolved.site, "/")


def job_json(plan: Plan, run_id: str) -> str | None:
    """Return what the ranks read; None for an own script, which reads its own options."""
    if plan.runtime_job is None:
        return None
    run = {"id": run_id, "name": plan.job.name, "site": plan.site.name}
    return json.dumps({"run": run, **plan.runtime_job}, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _yaml(title: str, model: BaseModel, cwd: str) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Quotes each text that our reader would take for a number, a bool or nothing."""

    def text(dumper: Dumper, value: str) -> Any:
        # "<<" and "=" mean something to YAML 1.1 readers where they stand plain.
        plain = value not in ("<<", "=") and not is_null(value) and typed(Plain(value)) == value and value.isprintable()
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if plain else '"')

    Dumper.add_representer(str, text)
    data = _as_written(model, model.model_dump(mode="json", by_alias=True), cwd)
    return f"{title}\n" + yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)


def _drop_defaults(model: BaseModel, data: dict[str, Any]) -> None:
    """Leave an item of a list as its layer wrote it: a list that adds must find it there when the job is read again."""
    for name, field in type(model).model_fields.items():
        if getattr(model, name) == field.get_default(call_default_factory=True):
            data.pop(field.alias or name, None)


def _path(path: str, start: str | None) -> str:
    return unexpand(path if start is None else absolute(path, start))


def _as_written(model: BaseModel, data: dict[str, Any], cwd: str) -> dict[str, Any]:
    """Return values that read back as they are: seconds and MiB get their unit, a path becomes absolute (the job may be
    submitted again from another folder) and a dollar sign in it is doubled."""
    paths, relative = path_fields(type(model)), path_fields(type(model), relative=True)
    for name, field in type(model).model_fields.items():
        key, value = field.alias or name, getattr(model, name)
        unit = unit_of(field)
        if value is None:
            continue
        if unit:
            data[key] = f"{value}{unit}"
        elif name in paths:
            start = cwd if name in relative else None
            several = isinstance(value, tuple)
            data[key] = [_path(item, start) for item in value] if several else _path(value, start)
        elif isinstance(value, BaseModel):
            _as_written(value, data[key], cwd)
        elif isinstance(value, tuple):
            for index, item in enumerate(value):
                if isinstance(item, BaseModel):
                    _as_written(item, data[key][index], cwd)
                    _drop_defaults(item, data[key][index])
        elif isinstance(value, dict):
            for entry, item in value.items():
                if isinstance(item, BaseModel):
                    _as_written(item, data[key][entry], cwd)
    return data
