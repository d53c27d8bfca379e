"""Finds and loads site profiles: shipped ones, the administrator's in /etc, the user's own, or a file by its path."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmddp.assets import asset_folder
from slurmddp.errors import UserError
from slurmddp.job.document import Document, read_file, read_text, text_of
from slurmddp.job.job import Job
from slurmddp.job.layers import Layered, merge
from slurmddp.job.site import Detect, Site
from slurmddp.job.types import Model
from slurmddp.job.validate import validate

MAX_BASES = 16
MAX_NAME = 100
#: The key at the top of a profile, up to the next one.
_DETECT_BLOCK = re.compile(r"^detect:.*\n?(?:(?:[ \t#\]}-].*)?(?:\n|\Z))*", re.MULTILINE)


def user_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of the user's own profiles, which need not exist."""
    return _config_folders(environment)[-1] / "sites"


class _Detection(Model):
    """The part of a profile that detection reads."""

    detect: Detect = Detect.model_construct()


def config_files(environment: Mapping[str, str]) -> list[Path]:
    """The /etc and user layers of the job that exist, lowest first."""
    return [path for path in (folder / "config.yaml" for folder in _config_folders(environment)) if path.exists()]


class Catalogue:
    """The profiles that this user can name."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        user_folders = [folder / "sites" for folder in reversed(_config_folders(environment))]
        self.folders = [*user_folders, asset_folder("site_configs")]

    def names(self) -> list[str]:
        """All site names, sorted; a profile of the user's hides a shipped one of the same name."""
        names = {path.stem for folder in self.folders if folder.is_dir() for path in folder.glob("*.yaml")}
        return sorted(names)

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
        hint = f"did you mean {' or '.join(near)}?" if near else "`slurmddp site` lists all sites"
        raise UserError(f"unknown site {name!r}", todo=hint)

    def layered(self, name: str) -> Layered:
        """The profile laid over its bases, not validated yet."""
        return merge(Site, self._documents(self.path(name), (), set()), job=Job)

    def load(self, name: str) -> tuple[Site, Document]:
        """The validated profile, and its `job` part as a layer of the job. The layer's origins have those of `when`."""
        layered = self.layered(name)
        site = validate(Site, layered)
        part: dict[str, Any] = layered.tree.get("job") or {}
        origins = {key[1:]: origin for key, origin in layered.origins.items() if key[:1] == ("job",) and len(key) > 1}
        origins |= {key: origin for key, origin in layered.origins.items() if key[:1] == ("when",)}
        return site, Document(part, origins)

    def detection(self, name: str) -> Detect:
        """The rules of detection in a profile. Only that part of the file is parsed: all profiles take 0.1 s."""
        path = self.path(name)
        shown = _shown(path)
        text = text_of(path, shown)
        if "detect" not in text:
            return Detect.model_construct()
        if block := _DETECT_BLOCK.search(text):
            text = "\n" * text.count("\n", 0, block.start()) + block[0]
        document = read_text(text, f"site {name}", shown)
        tree = {key: value for key, value in document.tree.items() if key == "detect"}
        return validate(_Detection, Layered(tree, document.origins, {})).detect

    def _documents(self, path: Path, above: tuple[Path, ...], read: set[Path]) -> list[Document]:
        """The profile and its bases, lowest first. above: those whose base it is; read: a shared base is laid once."""
        if path in above or len(above) >= MAX_BASES:
            raise UserError("its bases include each other in a circle", where=_shown(path))
        if path in read:
            return []
        read.add(path)
        document = read_file(path, f"site {path.stem}", _shown(path))
        if above:  # else a profile laid over a shipped one would match wherever that one does
            document.tree.pop("detect", None)
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
