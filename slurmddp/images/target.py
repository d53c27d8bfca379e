"""At which paths an image can be made."""

from __future__ import annotations

import os
from pathlib import Path

from slurmddp.errors import UserError


def check_name(target: Path) -> None:
    """Raise UserError for a path at which no image can be."""
    if ":" in target.name or "," in target.name or not target.name.isprintable():
        raise UserError(
            f"the image name {target.name!r} contains ':', ',' or a control character",
            todo="remove them: ':' and ',' break bind specifications",
        )
    if target.is_dir():
        raise UserError(f"{target} is a folder", todo=f"give a file in it: {target / 'image.sif'}")


def check_target(target: Path, force: bool) -> None:
    """Raise UserError for a path at which no image can or may be written."""
    check_name(target)
    if os.path.lexists(target) and not force:
        if (other := other_owner(target)) is not None:
            raise UserError(
                f"{target} belongs to {other}, so nobody knows whether it was built from these inputs",
                todo="choose another file; if you trust that user, use the image as it is: container.image",
            )
        raise UserError(f"{target} already exists", todo="use --force to replace it after the build")


def other_owner(path: Path) -> str | None:
    """Return the name of another user who owns a file; None if it is this user's or there is none."""
    from slurmddp.run.gate import owner_name  # here: few files are another user's

    try:
        owner = path.lstat().st_uid
    except OSError:
        return None
    return None if owner == os.geteuid() else owner_name(owner)
