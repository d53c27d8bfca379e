"""What the rest of the toolkit asks of a container runtime."""

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple


class Bind(NamedTuple):
    """by_site: the site's own; its nodes may have what this machine lacks."""

    source: str
    destination: str
    mode: Literal["ro", "rw"]
    by_site: bool = False

    @property
    def spec(self) -> str:
        """Return the value for --bind."""
        return f"{self.source}:{self.destination}:{self.mode}"


class _Values(NamedTuple):
    python: str
    image: str | None = None
    options: tuple[str, ...] = ()
    binds: tuple[Bind, ...] = ()
    compat: bool = False
    python_of_setup: bool = False


class Container(_Values):
    """What the ranks' command runs in. image: None without a container. compat: each node chooses which libcuda the
    ranks get, by its driver. python_of_setup: where a setup line brings another python3, that one is taken instead of
    `python`."""

    __slots__ = ()
    #: The word of container.runtime.
    runtime = "none"
    #: What starts the ranks' command on a node, and how the name of a variable begins there, so that the ranks get it.
    executable = environment_prefix = ""
    needs_image = True
    #: Whether its images are .sif files or root folders; else another program checks them.
    takes_sif = False
    #: Whether Slurm's srun makes the container, so that only a job of Slurm has one.
    made_by_srun = False
    #: Whether a job has run with it.
    proven = True
    #: The option that shows the ranks the GPUs of a vendor.
    devices: Mapping[str, str] = {}
    #: Parts of node.sh and of the script of `submit --plain` (Jinja2): what sets the array `container`; what adds the
    #: ranks' variables to it; the lines between srun's options and the program.
    node_part = node_variables = plain_part = ""

    @property
    def contained(self) -> bool:
        """Return whether it has a /dev, /tmp and home of its own."""
        return False

    @property
    def gpu_vendor(self) -> str:
        """Return whose GPUs a node must show; empty if the options do not tell: then what is there is counted."""
        return next((vendor for vendor, option in self.devices.items() if option in self.options), "")

    def words(self, binds: Iterable[str]) -> list[str]:
        """Return the words before a command that runs in it on this machine."""
        return []


class NoContainer(Container):
    """The ranks run in a Python environment of the nodes."""

    __slots__ = ()
    needs_image = False
