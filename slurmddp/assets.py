"""Finds the data that ships with the program: templates, image recipes, site profiles, schemas.

All but the schemas stand at the top of the repository and inside the package in a wheel; this is the only place that
knows.
"""

from __future__ import annotations

from pathlib import Path

from slurmddp.errors import UserError

_PACKAGE = Path(__file__).resolve().parent


def asset_folder(name: str) -> Path:
    """The folder of `templates`, `containers` or `site_configs`. Raises FileNotFoundError in a broken installation."""
    for folder in (_PACKAGE / "_assets" / name, _PACKAGE.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"the installation has no folder {name!r}: install slurmddp again")


def schema_file(kind: str) -> Path:
    """Return the JSON Schema of `job`, `site` or `recipe` files, or of `doctor --json`. Raises UserError for others."""
    if kind not in ("job", "site", "recipe", "doctor"):
        raise UserError(f"unknown kind of file {kind!r}", todo="use job, site, recipe or doctor")
    return _PACKAGE / "schemas" / f"{kind}.schema.json"


def package_folder() -> Path:
    """The folder of the package itself, from which a run's code snapshot is taken."""
    return _PACKAGE
