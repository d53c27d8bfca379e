"""Chooses the libcuda of the ranks, then becomes their command: libcuda NODE QUIET COMMAND...

That is the host's, or the image's own (cuda-compat) if the node's driver is too old for the image. The image's entry
point would decide this, but `apptainer exec` does not run it. Only in the container can the image's variables and
libraries be seen; and a process reads LD_LIBRARY_PATH when it starts, so this one comes before torchrun or the rank.
QUIET: not empty if the log has this choice already.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from slurmddp.shared.cuda_driver import FLOORS, Version, is_consumer, support

_VERSION = r"[0-9]+(?:\.[0-9]+)+"
_MODULE = re.compile(rf"Kernel Module(?: +for +[\w-]+)? +({_VERSION})")
_QUERY = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
_WORKS = "CUDA Driver OK"


class Host(NamedTuple):
    """The node's driver and GPU; empty: unknown."""

    driver: str
    gpu: str


class Image(NamedTuple):
    """What the image brings; empty: unknown, or not there. driver: that its CUDA was released with. compat: the folder
    of its own libcuda."""

    cuda: str
    driver: str
    compat: str


class Choice(NamedTuple):
    """Whether the driver runs the image, what becomes of the image's libcuda, and the LD_LIBRARY_PATH for that."""

    verdict: str
    libraries: str
    path: str


def find_host(folder: Path) -> Host:
    """folder: of the kernel module, /proc/driver/nvidia."""
    reports = sorted(folder.glob("gpus/*/information"))
    models = re.findall(r"^Model:[ \t]*(.*?)[ \t]*$", "\n".join(map(_read, reports)), re.MULTILINE)
    gpu = models[0] if models else ""
    match = _MODULE.search(_read(folder / "version"))
    if match:
        return Host(match[1], gpu)
    driver, _, name = _first_line(_QUERY).partition(", ")
    if not re.fullmatch(_VERSION, driver):  # an error message
        return Host("", gpu)
    return Host(driver, gpu or name)


def find_image() -> Image:
    """Return what this container's variables and libraries tell of its image."""
    folder = os.environ.get("_CUDA_COMPAT_PATH") or "/usr/local/cuda/compat"
    compat = next(filter(_has_libcuda, (folder + "/lib.real", folder)), "")
    bundled = os.path.realpath(compat + "/libcuda.so.1").rpartition("libcuda.so.")[2] if compat else ""
    drivers = (bundled, os.environ.get("CUDA_DRIVER_VERSION", ""))
    driver = next((text for text in drivers if re.fullmatch(_VERSION, text)), "")
    return Image(os.environ.get("CUDA_VERSION", ""), driver, compat)


def choose(host: Host, image: Image, path: str) -> Choice:
    """Return what is right here. path: the image's LD_LIBRARY_PATH, which stays, behind ours."""
    left = Choice("unknown", "left as the image has them", path)
    driver, cuda = Version.parse(host.driver), Version.parse(image.cuda)
    if driver is None:
        return left._replace(verdict="the driver is unknown")
    release, floor = (f"CUDA {cuda.major}.x", FLOORS.get(cuda.major)) if cuda is not None else ("", None)
    way = support(driver, Version.parse(image.driver), cuda)
    if way == "native":
        return Choice("native", "off", without_compat(path))
    if way == "minor":
        least = "" if image.driver else " at least"
        return left._replace(verdict=f"minor-version compatibility ({release} from driver {floor} on){least}")
    if not image.compat:
        return left if floor is None else left._replace(verdict=f"impossible: {release} needs driver {floor} or newer")
    if floor is not None and is_consumer(host.gpu):
        return Choice(f"impossible: forward compatibility is not for {host.gpu}", "off", path)
    on = image.compat + (f":{path}" if path else "")
    if shutil.which("cudaCheck"):  # NVIDIA's own check, which its images bring
        said = _first_line(["cudaCheck"], LD_LIBRARY_PATH=on)
        if said == _WORKS:
            return Choice("forward compatibility, by the image's own check", "on", on)
        verdict = f"impossible: the compat libraries do not run here, the image's own check says '{said}'"
        return Choice(verdict, "off", path)
    if floor is None:
        return left
    # Without them it fails for sure.
    verdict = f"forward compatibility (the driver is older than {floor}), which data-center GPUs have"
    return Choice(verdict, "on", on)


def without_compat(path: str) -> str:
    """Return a path without the folders of compat libraries: with them, a newer driver gives CUDA error 803."""
    return ":".join(each for each in path.split(":") if not ("/compat/" in each + "/" and _has_libcuda(each)))


def _has_libcuda(folder: str) -> bool:
    return os.path.exists(folder + "/libcuda.so.1")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""  # unknown


def _first_line(command: Sequence[str], **variables: str) -> str:
    """Return the first line that a program prints; empty where it does not run."""
    try:
        done = subprocess.run(
            command, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, timeout=60, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "".join(done.stdout.decode(errors="replace").splitlines()[:1])


def main(words: Sequence[str]) -> int:
    """Become the command. Return an exit code where that is not possible."""
    node, quiet, *command = words
    host, image = find_host(Path(os.environ.get("SLURMDDP_NVIDIA", "/proc/driver/nvidia"))), find_image()
    path = os.environ.get("LD_LIBRARY_PATH", "")
    choice = choose(host, image, path)
    if not quiet:
        print(
            f"slurmddp: node {node}: NVIDIA driver {host.driver or '?'}, {host.gpu or 'GPU ?'}; "
            f"image: CUDA {image.cuda or '?'}, driver {image.driver or '?'}; {choice.verdict}; "
            f"compat libraries {f'{choice.libraries} ({image.compat})' if image.compat else 'none in the image'}",
            flush=True,
        )
    if choice.path != path:
        os.environ["LD_LIBRARY_PATH"] = choice.path
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores, and the command would, too
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"slurmddp: node {node}: cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
