"""How an image can be built here without root: by what this machine allows, found out before anything is downloaded.

Apptainer takes the first of its fakeroot modes that works and says little where none does (apptainer, "Fakeroot
feature"); SingularityCE has to be told. So we look first, and name what is missing and whom to ask.
"""

import getpass
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slurmddp.errors import UserError

Mode = Literal["root", "subuid", "root-mapped with fakeroot", "root-mapped", "proot"]


@dataclass(frozen=True)
class Facts:
    """What this machine allows its user."""

    user: str
    root: bool
    namespaces: bool  # user namespaces can be made
    refusal: str  # what was said where they cannot
    subuid: bool  # the user has ranges of ids in /etc/subuid and /etc/subgid, and newuidmap maps them
    fakeroot: bool  # the command
    proot: bool  # likewise


@dataclass(frozen=True)
class Way:
    """How to build: the mode, options for the builder, and a note where the mode has limits."""

    mode: Mode
    options: tuple[str, ...] = ()
    note: str = ""


def look() -> Facts:
    """Find out, by trying where that is harmless."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the system has no name for it (containers, LDAP that is away)
        user = str(os.getuid())
    refusal = _namespace_refusal()
    here = {name: shutil.which(name) is not None for name in ("newuidmap", "newgidmap", "fakeroot", "proot")}
    ranges = all(_has_range(Path(path), user) for path in ("/etc/subuid", "/etc/subgid"))
    subuid = here["newuidmap"] and here["newgidmap"] and ranges
    return Facts(user, os.geteuid() == 0, not refusal, refusal, subuid, here["fakeroot"], here["proot"])


def choose(flavour: str, facts: Facts) -> Way:
    """The way for this builder (`apptainer`, `singularityce` or `singularity`).

    Raises UserError where none works: why, and what to ask the administrators.
    """
    if facts.root:
        return Way("root")
    fakeroot = () if flavour == "apptainer" else ("--fakeroot",)
    if facts.namespaces and facts.subuid:
        return Way("subuid", fakeroot)
    if flavour == "apptainer" and facts.namespaces:
        if facts.fakeroot:
            return Way("root-mapped with fakeroot")
        note = (
            "the build has only one user id (no range for you in /etc/subuid, no `fakeroot` command). Packages "
            "that chown files to other users will fail"
        )
        return Way("root-mapped", note=note)
    if flavour == "singularityce" and facts.proot:
        return Way("proot", note="built with proot: %post is slow and cannot use setuid programs")
    if facts.namespaces:
        proot = ", and there is no proot" if flavour == "singularityce" else ""
        lacks = f"{facts.user} has no range of ids in /etc/subuid and /etc/subgid (or newuidmap is missing){proot}"
        ask = f"`singularity config fakeroot --add {facts.user}` and for the package uidmap"
    else:
        lacks = f"user namespaces are disabled for users ({facts.refusal})"
        ask = "user namespaces: user.max_user_namespaces above 0 (sysctl), and on Ubuntu no "
        ask += "apparmor_restrict_unprivileged_userns"
    todo = f"ask the administrators for {ask}; or build on another machine and copy the .sif and its .lock.json here"
    raise UserError(f"this machine cannot build images: {lacks}", todo=todo)


def _namespace_refusal() -> str:
    """Empty where a user namespace can be made, with this user as its root."""
    try:
        done = subprocess.run(
            ["unshare", "--user", "--map-root-user", "true"],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unshare: {getattr(error, 'strerror', None) or 'no answer'}"
    errors = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else (errors[-1] if errors else f"unshare exited with code {done.returncode}")


def _has_range(path: Path, user: str) -> bool:
    """Return whether a line of the file begins with the user's name or number."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    return any(line.split(":")[0] in (user, str(os.getuid())) for line in lines if line.count(":") == 2)
