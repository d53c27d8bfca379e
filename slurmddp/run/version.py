"""Which slurmddp this is: the package's version, and the commit that it was installed from."""

from functools import cache
from pathlib import Path

from slurmddp import __version__
from slurmddp.assets import package_folder
from slurmddp.run import git

_DIGITS = 10
#: Seconds. On a slow file system the version goes without its commit: no command waits longer for it.
_PATIENCE = 5


@cache
def version() -> str:
    """Return the version with its commit, such as `0.1.0+g7507821e75`, as scripts and manifests name it.

    `.dirty` follows if tracked files of the checkout were edited. Without a known commit it is the version alone.
    """
    commit = _commit(package_folder())
    return f"{__version__}+g{commit}" if commit else __version__


def checkout_commit(root: Path) -> str | None:
    """Return the commit of a checkout, with `.dirty` if tracked files differ from it; None if `root` is no checkout.

    None as well if git cannot say: it is absent, too slow, or refuses a checkout of another user.
    """
    # The folder itself: git would also look above it, and an environment may lie in a user's own repository.
    if not (root / ".git").exists():
        return None
    describe = ("describe", "--always", "--dirty=.dirty", "--exclude=*", f"--abbrev={_DIGITS}")
    try:
        return git.run(root, describe, timeout=_PATIENCE).decode().strip() or None
    except git.GitError:
        return None


def _commit(package: Path) -> str | None:
    """Return the commit that hatch_build.py wrote into the wheel, or that of the checkout around the package."""
    try:
        return (package / "_assets" / "commit").read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        return checkout_commit(package.parent)
