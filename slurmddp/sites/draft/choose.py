"""`slurmddp init`: a commented job file to start from."""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from slurmddp.sites.catalogue import Catalogue
from slurmddp.sites.detect import select


class Made(NamedTuple):
    """The site of a new job file, why it was chosen, and whether only because no profile matches this host."""

    site: str
    why: str
    guessed: bool = False


def choose_site(catalogue: Catalogue, environment: Mapping[str, str], option: str | None) -> Made:
    """Select a site as for a job without `site:`. If none matches: generic if sbatch exists, else local.

    Jobs of the site `local` train on this machine, which must not be a login node.
    """
    selection = select(catalogue, environment, option)
    if selection is not None:
        return Made(*selection)
    if shutil.which("sbatch", path=environment.get("PATH")):
        return Made("generic", "no profile matches this host, and sbatch is in PATH", True)
    return Made("local", "no profile matches this host, and sbatch is not in PATH", True)


def address(path: Path) -> str:
    """Return a file as editors take it in a comment: its path, or an address if the path has a blank."""
    return str(path) if re.fullmatch(r"[\w./+-]+", str(path)) else path.as_uri()
