"""What is looked at on each node, and what must be the same on all of them.

A check of one node by itself is a function NodeSettings -> findings; one of the nodes against each other is a fact
(NodeSettings -> text) with the message for those that differ. A new check is a module here and a line in one of the
lists. Measurements that nodes make with each other (bandwidth, speed) belong between report and verdict: a node knows
the head by then, and what it measures joins its report.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from slurmddp.records.preflight import Finding, bad
from slurmddp.runtime.preflight.checks import code, devices, folders, gpu_health, limits, packages, rdma, space
from slurmddp.runtime.preflight.node_settings import NodeSettings

#: What a node can tell by itself.
ALONE: tuple[Callable[[NodeSettings], Iterable[Finding]], ...] = (
    packages.check,
    devices.check,
    gpu_health.check,
    rdma.check,
    limits.check,
    folders.check,
    space.check,
)


class Same(NamedTuple):
    """A fact that all nodes must share. differs: (own, the others') -> reason; either may be empty, for `absent`."""

    name: str
    look: Callable[[NodeSettings], str]
    differs: Callable[[str, str], str]
    todo: str


#: What must be the same on all nodes; where it is not, the majority is right.
SAME: tuple[Same, ...] = (
    Same(
        "image",
        lambda settings: settings.image,
        lambda own, others: f"its image file differs from the others' ({own or 'none'}, theirs {others or 'none'})",
        "copy the image to this node again, or set container.image to one that all nodes share",
    ),
    Same(
        "code",
        code.fingerprint,
        lambda own, others: f"sees other code in the run folder ({own}, the others {others})",
        "its mount of the shared file system is stale or wrong: ask the site's support to check the mounts",
    ),
    Same(
        "packages",
        packages.installed,
        packages.differs,
        "install the same software as on the others, or use one image for all nodes",
    ),
)


def alone(settings: NodeSettings, now: list[str]) -> list[Finding]:
    """Return what the node itself finds; a check that fails is a finding as well. now: gets what is being looked at."""
    found: list[Finding] = []
    for check in ALONE:
        now.append(check.__module__.rpartition(".")[2])
        try:
            found += check(settings)
        except (OSError, ValueError) as error:
            found.append(bad(f"could not be checked ({now[-1]}): {error}", "see its log"))
    return found


def facts(settings: NodeSettings, now: list[str]) -> tuple[dict[str, str], list[Finding]]:
    """Return the facts to compare, by name, and what kept a fact from being seen. now: as above."""
    seen: dict[str, str] = {}
    found: list[Finding] = []
    for same in SAME:
        now.append(same.name)
        try:
            seen[same.name] = same.look(settings)
        except (OSError, ValueError) as error:
            found.append(
                bad(f"cannot read its {same.name}: {error}", "ask the site's support to check the node's file systems")
            )
    return seen, found
