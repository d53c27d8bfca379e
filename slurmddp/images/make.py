"""What `slurmddp build-image` does, without its options and its printing."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmddp import __version__
from slurmddp.errors import ExternalError, UserError
from slurmddp.images.base import Pin, check_architecture
from slurmddp.images.image_spec import Wanted
from slurmddp.images.inputs import Inputs, inputs_of
from slurmddp.images.provenance import check_name, check_target, other_owner, read_lock
from slurmddp.images.registry.settings import RegistrySettings
from slurmddp.styled import labelled

if TYPE_CHECKING:
    from slurmddp.images.builder import Built
    from slurmddp.images.registry.image import RegistryImage


def resolve_all(names: Iterable[str], settings: RegistrySettings) -> dict[str, RegistryImage]:
    """Return the registries' answers about these images. Raises UserError, ExternalError, as `client.resolve` does.

    Some over plain HTTP and some over HTTPS are refused: the builder can be told for all of a build's registries only.
    """
    from slurmddp.images.registry.client import resolve
    from slurmddp.images.registry.reference import parse_reference

    names = tuple(names)
    by_scheme = {settings.location(parse_reference(name)).scheme: name for name in names}
    if len(by_scheme) > 1:
        raise UserError(
            f"{by_scheme['http']} comes over plain HTTP and {by_scheme['https']} over HTTPS, but one build can "
            f"use HTTP or HTTPS, not both",
            todo="use one registry for both, or build a .sif from one of them first and use it as the base",
        )
    return {name: resolve(name, settings=settings) for name in names}


#: Where images go that were given no name, below the folder of the command.
FOLDER = "images"
_SHOWN = 12


@dataclass(frozen=True)
class Rules:
    """What a site says of builds."""

    prefer: str | None = None  # its container runtime, `apptainer` or `singularity`, taken first where both are there
    #: a folder for downloads and for the image while it is built; None: the builder's own paths
    cache: Path | None = None
    processors: int | None = None  # processors, memory: what mksquashfs may take; memory in MiB
    memory: int | None = None
    registries: RegistrySettings = field(default_factory=RegistrySettings)  # how they are reached


@dataclass(frozen=True)
class BuildResult:
    """definition: the definition file's text; built: the image, None in a dry run and where there is nothing to do."""

    target: Path
    definition: str
    built: Built | None
    up_to_date: bool = False


@dataclass(frozen=True)
class Request:
    image: Wanted
    target: Path | None  # where the image goes; None for images/NAME-HASH.sif. A relative one begins at `cwd`.
    cwd: Path
    force: bool = False  # build it whatever is there, and replace that
    update: bool = False  # ask the registry whether the base's tag leads to another image by now
    #: folder -> the commit that it is at, or None; asked of where the recipe lies, when the image is built
    commit: Callable[[Path], str | None] = lambda folder: None

    def path_of(self, target: Path) -> Path:
        return Path(os.path.abspath(self.cwd / target))


@dataclass(frozen=True)
class Decision:
    """What a request comes to. image: with what registries were asked to be able to decide; target: an absolute path;
    bases: those in registries, by name, as they are now."""

    image: Wanted
    target: Path
    inputs: Inputs
    bases: Mapping[str, RegistryImage]
    up_to_date: bool = False  # it is there, made from just these inputs


def preview(request: Request, report: Callable[[str], None]) -> BuildResult:
    """A dry run: touch and run nothing, ask no registry; what stands in the way of a build is said, not raised."""
    inputs, existing = _look(request)
    target = existing or request.target or Path(FOLDER, f"{request.image.name}-{_short(inputs, {})}.sif")
    target = request.path_of(target)
    for note in request.image.notes:
        report(f"note: {note}")
    try:
        check_name(target)
        check_architecture(request.image.base)
        if existing is not None and not request.force:
            report(f"note: {target} is up to date: no input has changed")
        else:
            _refuse_other(target, inputs, request.force)
    except UserError as error:
        report(labelled("warning", f"{error}"))
    return BuildResult(target, request.image.definition, None)


def build_image(
    request: Request,
    report: Callable[[str], None],
    rules: Callable[[], Rules] = Rules,
    tell: Callable[[str], None] = lambda doing: None,
) -> BuildResult:
    """Build the image, unless one of these inputs is there.

    A base in a registry is taken by the digest that its tag has now; an image that is there keeps the digest of its
    own time, until --update or --force asks again.
    report: gets every line for people: what is about to happen, and the builder's own output as it comes.
    rules:  finds out those of the site, if there is something to do.
    tell:   gets what is being done while it takes long.

    Raises UserError, ExternalError (the build failed), and Stopped (ctrl-C, SIGTERM, SIGHUP): what was there is then
    as it was.
    """
    found_out = cache(rules)
    decision = decide(request, found_out)
    if decision.up_to_date:
        return BuildResult(decision.target, decision.image.definition, None, up_to_date=True)
    check_architecture(decision.image.base)
    decision = replace(decision, image=decision.image.with_bases(decision.bases))
    for note in decision.image.notes:
        report(f"note: {note}")
    built, definition = _build(decision, request, found_out(), report, tell)
    return BuildResult(decision.target, definition, built)


def decide(
    request: Request, rules: Callable[[], Rules], unreachable: Callable[[ExternalError], None] | None = None
) -> Decision:
    """Return what is to be built, and where: all that can be refused before a builder is needed. Changes nothing.

    unreachable: gets the error where a registry gives no answer, and the digests stay unknown; without it, or where
    they were asked for by --update, the error is raised. Raises UserError, ExternalError.
    """
    if request.image.undecided:
        bases = resolve_all(request.image.in_registries, rules().registries)
        request = replace(request, image=request.image.with_bases(bases))
    inputs, existing = _look(request)
    if existing is not None and not (request.force or request.update):
        return Decision(request.image, existing, inputs, {}, up_to_date=True)
    if request.target is not None:
        path = request.path_of(request.target)
        check_name(path)
        if existing is None:
            _refuse_other(path, inputs, request.force)
    try:
        bases = resolve_all(request.image.in_registries, rules().registries)
    except ExternalError as error:
        if unreachable is None or (existing is not None and not request.force):
            raise
        unreachable(error)
        bases = {}
    digests = {name: image.digest for name, image in bases.items()}
    if existing is not None and not request.force:
        if (read_lock(existing) or {}).get("digests") == digests:
            return Decision(request.image, existing, inputs, bases, up_to_date=True)
        if request.target is not None:
            todo = "use --force to replace it after the build, or omit the name"
            raise UserError(f"{existing} exists, but its base has changed in the registry", todo=todo)
    target = request.target or Path(FOLDER, f"{request.image.name}-{_short(inputs, digests)}.sif")
    return Decision(request.image, request.path_of(target), inputs, bases)


def _look(request: Request) -> tuple[Inputs, Path | None]:
    """The inputs' hashes, and the image that was made from just these; None where there is none."""
    if request.target is None:
        paths = [*request.path_of(Path(FOLDER)).glob(f"{glob.escape(request.image.name)}-*.sif")]
    else:
        paths = [request.path_of(request.target)]
    # Another user can write into a lock what they want: their images are not known to be made from these inputs.
    locks = [(path, lock) for path in paths if _stranger(path) is None and (lock := read_lock(path)) is not None]
    locks.sort(key=lambda entry: float(entry[1]["mtime"]), reverse=True)
    hashed = ((locks[0][1].get("inputs") or {}).get("files") if locks else None) or {}
    inputs = inputs_of(request.image, hashed)
    made = (path for path, lock in locks if (lock.get("inputs") or {}).get("key") == inputs.key)
    return inputs, next(made, None)


def _short(inputs: Inputs, digests: Mapping[str, str]) -> str:
    """Return what the name of an image ends with: of its inputs, and of the bases in registries."""
    whole = "\n".join([inputs.key, *sorted(digests.values())])
    return hashlib.sha256(whole.encode()).hexdigest()[:_SHOWN]


def _build(
    decision: Decision, request: Request, rules: Rules, report: Callable[[str], None], tell: Callable[[str], None]
) -> tuple[Built, str]:
    # Here: most calls find that there is nothing to do, or print a definition
    from slurmddp.images.build_lock import only_build
    from slurmddp.images.builder import build, find_builder
    from slurmddp.images.context.download import downloaded
    from slurmddp.images.privilege import choose, look
    from slurmddp.images.registry.credentials import for_builder
    from slurmddp.images.workspace import check_space, make_folders, mksquashfs_options, workspace

    image, target, bases = decision.image, decision.target, decision.bases
    builder = find_builder(rules.prefer)
    way = choose(builder.flavour, look())
    area = workspace(rules.cache, os.environ)
    squash = mksquashfs_options(builder.flavour, builder.version, rules.processors, rules.memory)
    roots = sum(bases[base.source].size for base in image.bases if base.source in bases)
    check_space(sum(base.size for base in bases.values()) or None, target, area, roots)
    make_folders(area)
    reported = bases.get(image.base.source)
    commit = request.commit(image.folder) if image.folder else None
    places = {name: rules.registries.location(base.reference) for name, base in bases.items()}
    pins = {name: Pin(places[name].repository, base.digest) for name, base in bases.items()}
    definition = image.labelled(pins, commit)
    variables = dict(area.variables)
    if rules.registries.proxy:
        variables |= dict.fromkeys(("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy"), rules.registries.proxy)
    if any(place.scheme == "http" for place in places.values()):  # which the builder has to be told
        variables |= {"APPTAINER_NOHTTPS": "1", "SINGULARITY_NOHTTPS": "1"}
    credentials, notes = for_builder({place.registry for place in places.values()})
    variables |= credentials
    for note in notes:
        report(f"note: {note}")
    facts: dict[str, Any] = {
        "recipe": image.name,
        "commit": commit,
        "base": image.base.reference,
        "digests": {name: base.digest for name, base in bases.items()},
        "registry": reported.facts() if reported else None,
        "pip": list(image.pip),
        "slurmddp": __version__,
        "inputs": decision.inputs.facts(),
        "mode": way.mode,
    }
    with only_build(target, report) as lock:
        report(f"building {target} from {image.base.reference} with {builder.name} {builder.version}")
        if way.note:
            report(f"note: {way.note}")
        tell(f"building {target.name}")
        with downloaded(image.items, area.temporary, rules.registries, report) as (items, facts["downloads"]):
            built = build(
                definition, target, builder,
                options=(*way.options, *squash),
                variables=variables, facts=facts, temporary=area.temporary, items=items,
                lock=lock, force=request.force, report=report,
            )  # fmt: skip
    return built, definition


def _refuse_other(target: Path, inputs: Inputs, force: bool) -> None:
    """An image of other inputs is replaced only where that is asked for: runs may be using it."""
    lock = None if force or other_owner(target) else read_lock(target)
    if lock is not None:
        todo = "use --force to replace it after the build, or omit the name to get a new one"
        raise UserError(f"{target} exists, built from other inputs ({inputs.differs(lock)})", todo=todo)
    check_target(target, force)


def _stranger(image: Path) -> str | None:
    """Return who owns an image, if this is neither this user nor root; None also where there is no image."""
    owner = other_owner(image)
    if image.is_symlink():
        owner = owner or other_owner(image.resolve())
    return None if owner == "root" else owner
