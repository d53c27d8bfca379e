"""All layers of one job laid over one another: built-in, site, /etc, user, job file, environment, command line."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from slurmddp.errors import ElsewhereError, UserError
from slurmddp.job.conditions import conditional_layers
from slurmddp.job.document import MAX_DEPTH, Document, Key, Origin, WrongYaml, read_file, read_value
from slurmddp.job.expand import Expander, expand_data
from slurmddp.job.job import Job
from slurmddp.job.layers import Layered, adding_lists, merge
from slurmddp.job.site import Site
from slurmddp.job.validate import depends_on, origin_of, validate

#: The site's profile and the part of it that is a layer of the job.
SiteLookup = Callable[[str], tuple[Site, Document]]

#: The site that this host belongs to, and how that was found out.
Detect = Callable[[], "tuple[str, str] | None"]

#: Prefix of the environment layer: SLURMDDP_RESOURCES__ACCOUNT=my_project sets resources.account.
ENVIRONMENT_PREFIX = "SLURMDDP_"
#: The layer of what Slurm said at submission. It is no part of a run's job.yaml: the next submission asks again.
SLURM_LAYER = "Slurm"
#: The site in the place of an unknown one: it knows nothing of partitions, so it adds no mistake to the job's own.
_STANDS_IN = "generic"
#: The key of a configuration file that is not about a job: the folder of `slurmddp --host` on a login node.
REMOTE_DIR = "remote_dir"


@dataclass(frozen=True)
class Request:
    """What a command was asked.

    job:     a job file, what one contains, or a script; None where `module` is given, or where `resume` names a run
             whose job is taken.
    args:    what stood behind `--`: the program's arguments.
    options: (key path, value, how the user wrote it), in order.
    module:  a Python module to start, in the place of a job file.
    resume:  the run to continue: id, prefix, job id, folder or `last`.
    inside:  the job runs in this shell's allocation, or on this machine.
    """

    job: str | Path | Mapping[str, Any] | Document | None = None
    args: Sequence[str] = ()
    options: Sequence[tuple[str, Any, str]] = ()
    module: str | None = None
    resume: str | None = None
    inside: bool = False
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def adding(self, *options: tuple[str, Any, str]) -> Request:
        """Return the request with more options, which win over those before."""
        return replace(self, options=[*self.options, *options])


class Resolved(NamedTuple):
    """The job as it will run, its site, and where each value came from. mistakes: why `submit` refuses it.

    site_known: False if one of the mistakes is the site's name; `site` then is the generic one.
    """

    job: Job
    site: Site
    layered: Layered
    warnings: tuple[str, ...]
    site_from: str = ""
    mistakes: tuple[UserError, ...] = ()
    site_known: bool = True

    def laid(self, values: Mapping[Key, Any], layer: str, where: str) -> Resolved:
        """Return the job with these values, which are of its types and which no other layer sets. A tuple begins with
        what is set of it, and what follows is new.
        """
        tree, job, origins = copy.deepcopy(self.layered.tree), self.job, dict(self.layered.origins)
        for key, value in values.items():
            branch, models = tree, [job]
            for name in key[:-1]:
                branch[name] = branch.get(name) or {}
                branch = branch[name]
                models.append(getattr(models[-1], name))
            if isinstance(value, tuple):
                old = branch.get(key[-1]) or []
                origins |= {(*key, str(index)): Origin(layer, where) for index in range(len(old), len(value))}
                branch[key[-1]] = [*old, *value[len(old) :]]
            else:
                branch[key[-1]] = value
                origins[key] = Origin(layer, where)
            for name, model in zip(reversed(key), reversed(models), strict=True):
                value = model.model_copy(update={name: value})
            job = value
        return self._replace(job=job, layered=self.layered._replace(tree=tree, origins=origins))

    def location(self, *key: str) -> str:
        """`FILE:LINE: key` for a message about the value of `key`."""
        origin = self.layered.origins.get(key)
        if origin is None:  # a profile with other keys beside it is not where the user sets it
            above = origin_of(self.layered, key[:-1])
            origin = None if above is None or above.layer.startswith("site ") else above
        shown = ".".join(key)
        return origin.of(shown) if origin and not origin.implied else shown


def resolve(
    request: Request,
    config_files: Sequence[Path],
    find_site: SiteLookup,
    detect: Detect,
    *,
    strict: bool,
    resumed_site: tuple[str, str] | None = None,
) -> Resolved:
    """Read, merge, validate and expand. `strict` (submit): wrong values, an unknown site and unset variables are in
    `mistakes`; else wrong values and the site are raised, and unset variables only warned of.

    request: its job is a Path, a Document or None, and its options say what it starts. `detect` is asked only where no
    layer names a site. resumed_site: that of the run that is resumed, and where it is written; the job file may name
    another.
    """
    wrong: list[UserError] | None = [] if strict else None
    above = [read_file(path, "configuration") for path in config_files]
    for document in above:
        document.tree.pop(REMOTE_DIR, None)
    if resumed_site is not None:
        name, where = resumed_site
        above.append(layer_of("resumed run", [("site", name, where)]))
    if isinstance(request.job, Document):
        above.append(request.job)
    elif isinstance(request.job, Path):
        above.append(_job_layer(request.job, wrong))
    above.append(environment_layer(request.environment))
    above.append(layer_of("command line", request.options))
    no_site: UserError | None = None
    try:
        name, named_at, site, site_layer = _site(request.job, above, find_site, detect)
    except UserError as error:
        if wrong is None:
            raise
        no_site = error
        name, named_at, (site, site_layer) = _STANDS_IN, "", find_site(_STANDS_IN)
    if not site.queues:
        _gpus_of_one_machine(above[-1])
    layered, job = _lay(name, [site_layer, *above], wrong)
    if conditional := conditional_layers(site, job, site_layer):
        layered, job = _lay(name, [site_layer, *conditional, *above], wrong)
    expander = Expander(request.environment)
    job = expander.model(job)
    data = expand_data(lambda text: expander.text(text, ("train", "data", "path")), job.train.data)
    train = job.train.model_copy(update={"data": data})
    job = job.model_copy(update={"train": train})
    warnings: list[str] = []
    unset: list[UserError] = []
    for key, variable in dict.fromkeys(expander.unset):
        origin = origin_of(layered, key)
        where = origin.of(".".join(key)) if origin else ".".join(key)
        if strict:
            todo = f"export {variable}=..., or write the path"
            unset.append(ElsewhereError(f"the variable ${variable} is not set", where=where, todo=todo))
        warnings.append(f"{where}: the variable ${variable} is not set on this machine; it is kept as written")
    mistakes = [*(wrong or ()), *unset]
    if no_site is not None and not depends_on(no_site, mistakes):
        mistakes.insert(0, no_site)
    return Resolved(job, site, layered, tuple(warnings), named_at, tuple(mistakes), no_site is None)


def _job_layer(path: Path, wrong: list[UserError] | None) -> Document:
    """Read the job file. wrong: gets the mistakes in its YAML, if any of it can be read."""
    try:
        return read_file(path, "job file")
    except WrongYaml as error:
        if wrong is None or not error.document.tree:
            raise
        wrong += error.parts
        return error.document


def _site(
    job_file: object, above: Sequence[Document], find_site: SiteLookup, detect: Detect
) -> tuple[str, str, Site, Document]:
    """Return the site's name, where that was found, its profile, and its layer of the job."""
    name, named_at = _site_name(above) or detect() or _no_site()
    if isinstance(job_file, Path) and named_at.startswith(f"{job_file}:"):
        _refuse_others_site(name, named_at, job_file)
    try:
        return (name, named_at, *find_site(name))
    except UserError as error:
        raise UserError(error.what, where=error.where or named_at, todo=error.todo) from None


def _gpus_of_one_machine(command_line: Document) -> None:
    """Take `--gpus N` for the GPUs per node: on one machine, both meanings are the same."""
    resources = command_line.tree.get("resources", {})
    if "gpus" in resources and "gpus_per_node" not in resources:
        resources["gpus_per_node"] = resources.pop("gpus")
        command_line.origins["resources", "gpus_per_node"] = command_line.origins["resources", "gpus"]


def _lay(name: str, layers: Sequence[Document], wrong: list[UserError] | None) -> tuple[Layered, Job]:
    """The layers over one another, and the job that they make.

    name: what the site was named by. wrong: as for `validate`.
    """
    layered = merge(Job, layers)
    # So that the resolved job finds the site again from any folder.
    layered.tree["site"] = os.path.abspath(name) if is_site_file(name) else name
    return layered, validate(Job, layered, wrong)


def is_site_file(name: str) -> bool:
    """Return whether what a job calls its site is the path of a profile."""
    return "/" in name or name.endswith((".yaml", ".yml"))


def _refuse_others_site(site: str, where: str, job_file: Path) -> None:
    """Refuse a profile by its path in a job file of another user: its setup lines would run with this account."""
    if not is_site_file(site):
        return
    try:
        owner = os.stat(job_file).st_uid
    except OSError:
        owner = -1  # unknown: it was there a moment ago
    if owner not in (0, os.geteuid()):
        todo = "read both files, then copy the job file, or pass the profile yourself: --site FILE"
        raise UserError(
            f"the site is a file ({site}), and this job file belongs to another user", where=where, todo=todo
        )


def environment_layer(environment: Mapping[str, str]) -> Document:
    """SLURMDDP_SITE, and SLURMDDP_<KEY>__<KEY>: a double underscore stands for the dot. The names of variables
    below `environment` and `network.variables` keep their case."""
    pairs = []
    for variable in sorted(environment):
        rest = variable.removeprefix(ENVIRONMENT_PREFIX)
        if rest == variable or ("__" not in rest and rest != "SITE"):
            continue
        parts = rest.split("__")
        lowered = [part.lower() for part in parts]
        if lowered[0] == "environment":
            parts = ["environment", "__".join(parts[1:])]
        elif lowered[:2] == ["network", "variables"]:
            parts = ["network", "variables", "__".join(parts[2:])]
        else:
            parts = lowered
        pairs.append((".".join(parts), environment[variable], f"${variable}"))
    return layer_of("environment", pairs)


def layer_of(layer: str, pairs: Sequence[tuple[str, Any, str]]) -> Document:
    """A layer from (key path, value, where it was written); a text is read as `--set` reads it, all else is kept."""
    tree: dict[str, Any] = {}
    origins: dict[Key, Origin] = {}
    for key, text, where in pairs:
        path = tuple(key.split("."))
        if len(path) > MAX_DEPTH:
            raise UserError(f"a key is nested deeper than {MAX_DEPTH} levels", where=where[:80])
        if not all(path):
            raise UserError(f"{key!r} is not a key", where=where, todo="write --set key.path=value")
        node = tree
        for end, part in enumerate(path[:-1], start=1):
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise UserError(
                    f"{'.'.join(path[:end])} already has a value, so it cannot have keys below it", where=where
                )
            origins.setdefault(path[:end], Origin(layer, where, implied=True))
        value, before = read_value(text, layer, where) if isinstance(text, str) else text, node.get(path[-1])
        if isinstance(value, list):
            # As of layers: --exclude, --reservation and --set resources.sbatch_extra all add to one list.
            before = before if isinstance(before, list) and path in adding_lists(Job) else []
            value = [*before, *(item for item in value if item not in before)]
            added = range(len(before), len(value))
            origins.update({(*path, str(index)): Origin(layer, where) for index in added})
        node[path[-1]] = value
        origins[path] = Origin(layer, where)
    return Document(tree, origins)


def named_site(environment: Mapping[str, str], config_files: Sequence[Path]) -> tuple[str, str] | None:
    """The site that the user's configuration or SLURMDDP_SITE names, and where; None if neither does."""
    layers = [read_file(path, "configuration") for path in config_files]
    return _site_name([*layers, environment_layer(environment)])


def _site_name(layers: Sequence[Document]) -> tuple[str, str] | None:
    for document in reversed(layers):
        if document.tree.get("site") is not None:
            name, where = document.tree["site"], document.origins[("site",)].where
            if not isinstance(name, str):
                raise UserError("site must be the name of a site profile", where=where)
            return str(name), where
    return None


def _no_site() -> tuple[str, str]:
    text = "no site selected, and no profile matches this host"
    if shutil.which("sbatch"):
        todo = "`slurmddp site init` writes a profile of this cluster, in seconds; or try --site generic"
    else:
        todo = (
            "to train on this machine: `slurmddp run`, or --site local. For a cluster: --site NAME, or `site: NAME` in "
            "the job file; `slurmddp site` lists all, and generic is for any"
        )
    raise UserError(text, todo=todo)
