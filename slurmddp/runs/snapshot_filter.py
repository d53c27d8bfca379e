"""What lies in a project and is no code: credentials, images of containers, run folders, caches."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from slurmddp.shared.files import read_json

SKIPPED_FOLDERS = frozenset({".git", "__pycache__", ".venv", "venv", "node_modules", ".cache"})
SKIPPED_SUFFIXES = (".pyc", ".pyo")
_IMAGES = (".sif", ".sif.def", ".sif.build.log", ".sif.lock.json", ".sqsh", ".simg")
_SECRET_FOLDERS = frozenset({".ssh", ".gnupg", ".aws"})
_SECRET_NAMES = frozenset({".git-credentials", ".pypirc", ".npmrc", ".pgpass", "kubeconfig", "token.json"})
_SECRET_PATHS = frozenset({".docker/config.json", ".kube/config"})
_SECRET_SUFFIXES = (".pem", ".key", ".token", "credentials.json")
#: A file that is called after what it holds: token, hf_token, wandb-api-key.txt, _netrc, netrc.bak.
_SECRET_WORDS = re.compile(r"(?:.*[._-])?(?:token|api[_-]?key)(?:\.txt)?|(?:.*[._-])?netrc(?:[._-](?!.*py$).*)?")
#: What a netrc file of any name begins with, behind comments (the format is that of ftp(1)).
_NETRC = re.compile(rb"(?:\s|#[^\n]*\n)*(?:machine\s+\S+|default)\s+(?:(?:login|account)\s+\S+\s+){0,2}password\s")
_NETRC_BYTES = 4096
_NO_NETRC = (
    ".py",
    ".ipynb",
    ".json",
    ".yaml",
    ".yml",
    ".toml",
    ".md",
    ".rst",
    ".sh",
    ".c",
    ".cpp",
    ".cu",
    ".h",
    ".png",
)
_SECRET_KEYS = ("id_rsa*", "id_ed25519*", "id_ecdsa*")
_PART = re.compile(r"\.[A-Za-z0-9][A-Za-z0-9._+-]*-\d{8}-\d{6}-[a-z0-9]{4}\.part")  # see create.Draft


def credential(path: str, *, is_folder: bool) -> str | None:
    """Return the file or folder (it ends in /) of this relative path that is known for credentials, or None."""
    parts = path.split("/")
    for number, name in enumerate(parts):
        is_file = number == len(parts) - 1 and not is_folder
        found = "/".join(parts[: number + 1])
        name = name.lower()
        if _is_env(name) or (name in _SECRET_FOLDERS and not is_file):
            return found if is_file else found + "/"
        if is_file and (_is_secret_file(name) or "/".join(parts[-2:]).lower() in _SECRET_PATHS):
            return found
    return None


def is_netrc(path: Path) -> bool:
    """Return whether curl or git would read logins from this file, whatever its name. False if unreadable."""
    if path.name.lower().endswith(_NO_NETRC):
        return False
    try:
        with path.open("rb") as file:
            return _NETRC.match(file.read(_NETRC_BYTES)) is not None
    except OSError:
        return False  # whoever copies it says so


def is_image(name: str) -> bool:
    """Return whether a file of this name is a container's image, or what we write beside one."""
    return name.lower().endswith(_IMAGES)


def is_run_folder(path: Path) -> bool:
    """Return whether this is a run folder of ours: whole (a manifest that says so, and what a job has), half made, or
    rendered by `slurmddp render`.
    """
    if _PART.fullmatch(path.name) or all(os.path.lexists(path / name) for name in ("rendezvous.key", "job.sh")):
        return True
    try:
        manifest = read_json(path / "manifest.json")
    except (OSError, ValueError):
        return False  # none, unreadable or somebody else's: then it is a folder like any other
    ours = isinstance(manifest, dict) and "run" in manifest and "slurmddp" in manifest
    return ours and any(os.path.lexists(path / name) for name in ("submission.json", "job.sh", "job.json"))


def below(root: Path, folders: Iterable[Path]) -> tuple[frozenset[str], frozenset[Path]]:
    """Return the folders below the root, as paths relative to it, and the real path of each.

    The root and its parents are not below it: leaving them out would leave nothing of the project.
    """
    real_root = Path(os.path.realpath(root))
    relative, real = set(), set()
    for folder in folders:
        target = Path(os.path.realpath(folder))
        if not real_root.is_relative_to(target):
            real.add(target)
        for path, base in ((Path(os.path.abspath(folder)), root), (target, real_root)):
            if path != base and path.is_relative_to(base):
                relative.add(path.relative_to(base).as_posix())
    return frozenset(relative), frozenset(real)


def _is_env(name: str) -> bool:
    return name == ".env" or (name.startswith(".env.") and name != ".env.example")


def _is_secret_file(name: str) -> bool:
    if name in _SECRET_NAMES or name.endswith(_SECRET_SUFFIXES) or _SECRET_WORDS.fullmatch(name):
        return True
    return not name.endswith(".pub") and any(fnmatchcase(name, key) for key in _SECRET_KEYS)
