"""Finds and loads site profiles: shipped ones, the administrator's in /etc, the user's own, or a file by its path."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmddp.assets import asset_folder
from slurmddp.errors import UserError
from slurmddp.spec.document import Document
from slurmddp.spec.job import Job
from slurmddp.spec.layers import Layered, merge
from slurmddp.spec.renamed import read_layer
from slurmddp.spec.site import Site
from slurmddp.spec.validate import validate

MAX_BASES = 16
MAX_NAME = 100


def config_files(environment: Mapping[str, str]) -> list[Path]:
    """The /etc and user layers of the job that exist, lowest first."""
    return [path for path in (folder / "config.yaml" for folder in _config_folders(environment)) if path.exists()]


class Catalogue:
    """The profiles that this user can name."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        own = [folder / "sites" for folder in reversed(_config_folders(environment))]
        self.folders = [*own, asset_folder("site_configs")]

    def names(self) -> list[str]:
        """All site names, sorted; a profile of the user's hides a shipped one of the same name."""
        found = {path.stem for folder in self.folders if folder.is_dir() for path in folder.glob("*.yaml")}
        return sorted(found)

    def path(self, name: str) -> Path:
        """The file of a profile. Raises UserError that names the nearest known ones."""
        if "/" in name or name.endswith((".yaml", ".yml")):
            return Path(name)
        for folder in self.folders:
            candidate = folder / f"{name}.yaml"
            if name and not name.startswith(".") and len(name) <= MAX_NAME and candidate.is_file():
                return candidate
        import difflib

        near = difflib.get_close_matches(name, self.names(), 3, 0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "`slurmddp sites` lists all sites"
        raise UserError(f"unknown site {name!r}", todo=hint)

    def layered(self, name: str) -> Layered:
        """The profile laid over its bases, not validated yet."""
        return merge(Site, self._documents(self.path(name), (), set()), job=Job)

    def load(self, name: str) -> tuple[Site, Document]:
        """The validated profile, and its `job` part as a layer of the job."""
        layered = self.layered(name)
        site = validate(Site, layered)
        part: dict[str, Any] = layered.tree.get("job") or {}
        origins = {key[1:]: origin for key, origin in layered.origins.items() if key[:1] == ("job",) and len(key) > 1}
        return site, Document(part, origins)

    def _documents(self, path: Path, above: tuple[Path, ...], read: set[Path]) -> list[Document]:
        """The profile and its bases, lowest first. above: those whose base it is; read: a shared base is laid once."""
        if path in above or len(above) >= MAX_BASES:
            raise UserError("its bases include each other in a circle", where=_shown(path))
        if path in read:
            return []
        read.add(path)
        document = read_layer(path, f"site {path.stem}", _shown(path))
        bases = document.tree.get("bases") or []
        if not isinstance(bases, list):
            raise UserError("bases must be a list of names", where=str(path))
        below: list[Document] = []
        for base in bases:
            below.extend(self._documents(self._base(str(base), path), (*above, path), read))
        return [*below, document]

    def _base(self, name: str, user: Path) -> Path:
        for folder in (user.parent, *self.folders):
            for candidate in (folder / "bases" / f"{name}.yaml", folder / f"{name}.yaml"):
                if candidate.is_file() and candidate != user:
                    return candidate
        raise UserError(f"its base {name!r} does not exist", where=_shown(user))


def _shown(path: Path) -> str:
    """Shipped profiles are named as in the repository, others by their path."""
    shipped = asset_folder("site_configs")
    return f"site_configs/{path.relative_to(shipped)}" if path.is_relative_to(shipped) else str(path)


def _config_folders(environment: Mapping[str, str]) -> list[Path]:
    home = environment.get("HOME") or os.path.expanduser("~")
    user = Path(environment.get("XDG_CONFIG_HOME") or os.path.join(home, ".config"))
    return [Path("/etc/slurmddp"), user / "slurmddp"]
