"""Which way of building without root is taken, and what is said where there is none."""

import os
import subprocess
from dataclasses import replace

import pytest

from slurmddp.errors import UserError
from slurmddp.images.privilege import Facts, choose, look

NOTHING = Facts("alice", False, False, "unshare failed: Operation not permitted", False, False, False)
NAMESPACES = replace(NOTHING, namespaces=True, refusal="")
FULL = replace(NAMESPACES, subuid=True, fakeroot=True, proot=True)


@pytest.mark.parametrize(
    ("flavour", "facts", "mode", "options"),
    [
        ("apptainer", replace(NOTHING, root=True), "root", ()),
        ("singularity", replace(NOTHING, root=True), "root", ()),
        ("apptainer", FULL, "subuid", ()),
        ("singularityce", FULL, "subuid", ("--fakeroot",)),
        ("singularity", FULL, "subuid", ("--fakeroot",)),
        ("apptainer", replace(NAMESPACES, fakeroot=True), "root-mapped with fakeroot", ()),
        ("apptainer", NAMESPACES, "root-mapped", ()),
        ("singularityce", replace(NAMESPACES, proot=True), "proot", ()),
        ("singularityce", replace(NOTHING, proot=True), "proot", ()),
    ],
)
def test_the_way(flavour: str, facts: Facts, mode: str, options: tuple[str, ...]) -> None:
    way = choose(flavour, facts)
    assert (way.mode, way.options) == (mode, options)
    assert bool(way.note) == (mode in ("root-mapped", "proot"))


@pytest.mark.parametrize(
    ("flavour", "facts", "what", "todo"),
    [
        (
            "apptainer",
            NOTHING,
            "user namespaces are disabled for users (unshare failed: Operation not permitted)",
            "user.max_user_namespaces",
        ),
        (
            "apptainer",
            replace(NOTHING, subuid=True, fakeroot=True),
            "user namespaces are disabled for users",
            "or build on another machine",
        ),
        ("singularityce", NAMESPACES, "alice has no range of ids in /etc/subuid", "config fakeroot --add alice"),
        ("singularity", replace(NAMESPACES, proot=True), "alice has no range", "uidmap"),
    ],
)
def test_no_way(flavour: str, facts: Facts, what: str, todo: str) -> None:
    with pytest.raises(UserError) as caught:
        choose(flavour, facts)
    assert what in caught.value.what
    assert todo in caught.value.todo


def test_this_machine() -> None:
    """What is found is what happens when it is tried."""
    facts = look()
    assert facts.root == (os.geteuid() == 0)
    tried = subprocess.run(["unshare", "--user", "--map-root-user", "id", "-u"], capture_output=True, text=True)
    assert facts.namespaces == (tried.returncode == 0) and facts.namespaces == (facts.refusal == "")
