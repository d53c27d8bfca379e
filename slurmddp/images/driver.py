"""Whether a driver runs an image's CUDA: natively, within its major release, by the compat libraries, or not at all.

And whether that CUDA has code for the GPU's generation.

NVIDIA's rules: docs.nvidia.com/deploy/cuda-compatibility; their numbers: containers/tables/cuda-compat.yaml. What is
not documented stays unknown. On the nodes, slurmddp/runtime/libcuda.py decides by the driver that is there.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from slurmddp.assets import asset_folder
from slurmddp.images import releases
from slurmddp.shared.cuda_driver import FLOORS, Version, is_consumer, support

Kind = Literal["native", "minor", "forward", "impossible", "unknown"]

_PTX = "code that is compiled to PTX at run time can still fail ('unsupported toolchain')"


@dataclass(frozen=True)
class ImageCuda:
    """What an image brings. None: unknown."""

    cuda: str | None  # its CUDA, "12.9.0.036"
    driver: str | None  # the driver that this CUDA was released with, "575.51.02"
    compat: bool | None  # whether it has that driver's libcuda (NVIDIA's cuda-compat) for hosts with an older driver


@dataclass(frozen=True)
class Verdict:
    """Whether it runs. why: the rule and its numbers, one sentence; todo: what helps, or empty."""

    kind: Kind
    why: str
    todo: str = ""


@dataclass(frozen=True)
class _Table:
    """containers/tables/cuda-compat.yaml."""

    #: by "MAJOR.MINOR": on which older drivers its compat libraries run, and the branches named as not compatible
    forward: Mapping[str, Mapping[str, list[str]]]
    data_center: frozenset[str]
    capability: Mapping[str, str]  # patterns of products, by their compute capability
    first: Mapping[int, str]  # the first CUDA by the capability's major
    least: Mapping[int, str]  # the least capability by CUDA major


def of_release(tag: str) -> ImageCuda:
    """Return what NVIDIA's PyTorch image `25.04` has, as far as the table knows, with compat libraries."""
    known = releases.releases().get(tag)
    return ImageCuda(known.cuda, known.driver, True) if known else ImageCuda(None, None, True)


def check(image: ImageCuda, driver: str | None, *, gpu: str | None = None) -> Verdict:
    """Return whether the image runs on hosts with that driver. gpu: a profile's gpu_type or a model. Never raises."""
    refusal, verdict = without_code(image, gpu), _by_driver(image, driver, gpu)
    if refusal and (refusal.kind == "impossible" or verdict.kind != "impossible"):
        return refusal
    if verdict.kind in ("native", "minor") and (capability_of(gpu) is None or not image.cuda):
        name = gpu or "the GPU, whose type is unknown"
        whose = f"CUDA {image.cuda}" if image.cuda else "the image's CUDA, which is unknown,"
        return replace(verdict, why=f"{verdict.why}. Unknown: whether {whose} has code for {name}")
    return verdict


def without_code(image: ImageCuda, gpu: str | None) -> Verdict | None:
    """Return the verdict where the image's CUDA has no code for this generation of GPUs; None where it has, or unknown.

    No driver changes that.
    """
    cuda, capability = Version.parse(image.cuda), capability_of(gpu)
    if cuda is None or capability is None:
        return None
    shown = f"{gpu} (compute capability {capability})"
    own = Version.known(capability)
    least, first = _table().least.get(cuda.major), _table().first.get(own.major)
    if least is not None and own < Version.known(least):
        fitting = max((major for major, text in _table().least.items() if own >= Version.known(text)), default=None)
        todo = "use an older image" if fitting is None else f"use an image with CUDA {fitting}"
        why = f"CUDA {image.cuda} has no code for {shown}: CUDA {cuda.major} needs {least} or newer"
        return Verdict("impossible", why, todo)
    if first is not None and cuda < Version.known(first):
        why = f"CUDA {image.cuda} has no code for {shown}, which needs CUDA {first} or newer"
        why += ": at most what the image has as PTX runs"
        return Verdict("unknown", why, f"use an image with CUDA {first} or newer")
    return None


def capability_of(gpu: str | None) -> str | None:
    """Return the compute capability, such as "9.0", of a Slurm type or a model's name; None if it is unknown."""
    # RTX 3090, rtx_3090 and rtx3090 are one word
    text = re.sub(r"\b(rtx|gtx|titan)[^a-z0-9]+", r"\1", (gpu or "").lower().replace("_", " "))
    words = re.findall(r"[a-z0-9]+", text)
    table = _table().capability.items()
    found = {capability for capability, names in table if any(re.fullmatch(names, word) for word in words)}
    return found.pop() if len(found) == 1 else None


def _by_driver(image: ImageCuda, driver: str | None, gpu: str | None) -> Verdict:
    found, own, cuda = Version.parse(driver), Version.parse(image.driver), Version.parse(image.cuda)
    if driver is None or found is None:
        what = "the driver of the nodes is unknown" if driver is None else f"{driver!r} is not a driver's version"
        return Verdict("unknown", what, "`nvidia-smi` on a node of the partition shows it")
    way = support(found, own, cuda)
    if way == "native" and own is not None:
        return Verdict(
            "native",
            f"native: driver {driver} is not older than the image's {image.driver}, so its compat libraries stay off "
            "(forced, they would give CUDA error 803)",
        )
    if cuda is None:
        return Verdict(
            "unknown", f"driver {driver}: the image's CUDA is unknown", "use an image whose CUDA version is known"
        )
    if way == "unknown":
        return Verdict("unknown", f"driver {driver}: the minimum driver for CUDA {cuda.major}.x is unknown")
    if way == "native":
        above = cuda.major + 1
        return Verdict("native", f"native: driver {driver} supports CUDA {above} ({FLOORS[above]} or newer)")
    if way == "minor":
        return _within_major(image, driver, cuda)
    return _across_majors(image, driver, found, cuda, gpu)


def _within_major(image: ImageCuda, driver: str, cuda: Version) -> Verdict:
    rule = f"CUDA {cuda.major}.x needs driver {FLOORS[cuda.major]} or newer"
    if image.driver is None:
        why = f"at least minor-version compatibility: {rule}. The nodes have {driver}; the image's driver is unknown"
    else:
        why = f"minor-version compatibility: {rule}. Driver {driver} is older than the image's {image.driver}"
    return Verdict("minor", why, f"usually nothing; {_PTX}, and then an image with an older CUDA {cuda.major} helps")


def _across_majors(image: ImageCuda, driver: str, found: Version, cuda: Version, gpu: str | None) -> Verdict:
    least = FLOORS[cuda.major]
    needs = f"CUDA {cuda.major}.x needs driver {least} or newer, the nodes have {driver}"
    todo = _older_image(found, least)
    package = _table().forward.get(".".join(str(field) for field in (*cuda.fields, 0)[:2]))
    name = f"cuda-compat of CUDA {image.cuda}"
    if image.compat is False:
        return Verdict("impossible", f"{needs}; the image has no compat libraries", todo)
    if gpu is not None and is_consumer(gpu):
        return Verdict("impossible", f"{needs}; forward compatibility does not work on GeForce and Titan ({gpu})", todo)
    if package is not None and str(found.major) in package["refused"]:
        return Verdict("impossible", f"{needs}; {name} does not support driver branch {found.major}", todo)
    drivers = map(Version.known, package["drivers"]) if package is not None else ()
    if not any(found.major == one.major and found >= one for one in drivers):
        why = f"{needs}; NVIDIA's table of forward compatibility does not list driver branch {found.major} for {name}"
        return Verdict("unknown", why, f"try it on one node; if it fails, {todo}")
    if image.compat is None:
        why = f"{needs}; forward compatibility needs compat libraries, and it is unknown whether the image has them"
        return Verdict("unknown", why, f"try it on one node; if it fails, {todo}")
    if _table().data_center.isdisjoint(re.findall(r"[a-z0-9]+", (gpu or "").lower())):
        why = f"{needs}; forward compatibility depends on the GPU, {gpu or 'whose type is unknown'}: data-center GPUs"
        return Verdict("unknown", f"{why} and some certified RTX have it", f"try it on one node; if it fails, {todo}")
    return Verdict("forward", f"forward compatibility: {needs}; {name} supports driver branch {found.major} on {gpu}")


def _older_image(found: Version, least: str) -> str:
    """Return what helps where the driver is too old for the image's CUDA."""
    fitting = [
        tag
        for tag, release in releases.releases().items()
        if (cuda := Version.parse(release.cuda)) and found >= Version.known(FLOORS.get(cuda.major, least))
    ]
    newest = f"NGC {fitting[-1]} is the newest that needs no compat libraries with this driver" if fitting else ""
    return f"use an older image ({newest or 'with an older CUDA'}), or ask the site for driver {least} or newer"


@cache
def _table() -> _Table:
    from slurmddp.job.document import read_file

    path = asset_folder("containers") / "tables" / "cuda-compat.yaml"
    tree = read_file(path, "drivers", f"containers/tables/{path.name}").tree
    forward = {str(cuda): row for cuda, row in tree["forward"].items()}
    gpus, code = tree["gpus"], tree["code"]
    first, least = ({int(major): str(text) for major, text in code[key].items()} for key in ("first", "least"))
    capability = {str(number): str(names) for number, names in gpus["capability"].items()}
    return _Table(forward, frozenset(map(str, gpus["data_center"])), capability, first, least)
