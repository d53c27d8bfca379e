"""Finds the data that ships with the program: templates, image recipes, site profiles, schemas.

They stand at the top of the repository and inside the package in a wheel; this is the only place that knows.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def asset_folder(name: str) -> Path:
    """The folder of `templates`, `containers`, `site_configs` or, in a checkout, `docs`.

    Raises FileNotFoundError in a broken installation.
    """
    for folder in (_PACKAGE / "_assets" / name, _PACKAGE.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"the installation has no folder {name!r}: install slurmddp again")


def built_schema(kind: str) -> Path:
    """Return where a wheel has the JSON Schema of `job`, `site` or `recipe` files. A checkout has none."""
    return _PACKAGE / "_assets" / "schemas" / f"{kind}.schema.json"


def package_folder() -> Path:
    """The folder of the package itself, from which a run's code snapshot is taken."""
    return _PACKAGE
