"""Secrets of a build, as --secret names them: `id=NAME,src=FILE` or `id=NAME,env=VARIABLE`, as Docker has them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from slurmddp.errors import UserError
from slurmddp.images.context.staging import SECRETS, Item

_KEYS = {"source": "src", "src": "src", "env": "env", "id": "id", "type": "type"}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def read_secrets(options: Iterable[str], cwd: Path, environment: Mapping[str, str]) -> dict[str, Item]:
    """Return what is put beside the definition, by id. Raises UserError, never with a value in it."""
    found: dict[str, Item] = {}
    for option in options:
        said = {_KEYS.get(name, ""): value for name, _, value in (part.partition("=") for part in option.split(","))}
        name = said.get("id", "")
        if "" in said or not _NAME.fullmatch(name) or ("src" in said and "env" in said):
            todo = "write id=NAME,src=FILE or id=NAME,env=VARIABLE"
            raise UserError(f"--secret {option.split('=')[0]}=... is not understood", where="--secret", todo=todo)
        itself = "src" not in said and (said.get("type") == "env" or name in environment)
        variable = said.get("env") or (name if itself else "")
        place = f"{SECRETS}/{name}"
        if variable:
            if variable not in environment:
                raise UserError(f"the variable {variable} is not set", where="--secret", todo="export it")
            found[name] = Item(place, Path(), text=environment[variable])
            continue
        path = (cwd / said.get("src", name)).expanduser().resolve()
        if not path.is_file():
            raise UserError(f"there is no file {path}", where="--secret", todo="name the file of the secret: src=FILE")
        found[name] = Item(place, path)
    return found
