"""Drafts the profile, checks it, and writes it where slurmddp finds it."""

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurmddp.errors import ExternalError, UserError
from slurmddp.job.types import is_name
from slurmddp.shared.files import write_whole
from slurmddp.sites.catalogue import Catalogue, user_folder
from slurmddp.sites.detect import select
from slurmddp.sites.draft.draft import draft
from slurmddp.sites.draft.live import Live
from slurmddp.sites.draft.seen import Seen
from slurmddp.sites.problems import problems

STDOUT = "-"


class Target:
    """Where a draft goes: a file, by default the user's own profile named as the cluster, or stdout."""

    def __init__(self, output: str | None, force: bool, environment: Mapping[str, str]) -> None:
        self._output, self._force, self._environment = output, force, environment

    def refuse(self) -> None:
        """Raise UserError for a file that cannot be a profile, or that exists, before anything is asked."""
        if self._output not in (None, STDOUT):
            self._refuse(Path(str(self._output)))

    def path(self, live: Live) -> Path | None:
        """Return the file, None for stdout. Raises UserError."""
        if self._output == STDOUT:
            return None
        path = Path(self._output) if self._output else user_folder(self._environment) / f"{_name(live)}.yaml"
        self._refuse(path)
        return path

    def write(self, live: Live, seen: Sequence[Seen]) -> tuple[str, Path | None]:
        """Write the draft and return its text and its file. Raises UserError, ExternalError, OSError."""
        path = self.path(live)
        name = path.stem if path else _name(live)
        text = draft(live, name, seen)
        _check(text, name, self._environment)
        if path is not None:
            if self._output is None:
                path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text)
        return text, path

    def notes(self, path: Path) -> list[str]:
        """Return what the new file changes beside itself: a profile that it hides, or that is used in its place."""
        if self._output is not None:
            return []
        catalogue, name = Catalogue(self._environment), path.stem
        hidden = [folder / path.name for folder in catalogue.folders if folder != path.parent]
        notes = [f"it hides the profile {other}" for other in hidden if other.is_file()]
        try:
            active = select(catalogue, self._environment)
        except UserError as error:
            return [*notes, str(error)]
        if active is None or active[0] != name:
            used = f"site {active[0]} is used here ({active[1]})" if active else "no site is detected here"
            notes.append(f"{used}: select the draft with --site {name}")
        return notes

    def _refuse(self, path: Path) -> None:
        if path.suffix != ".yaml" or not is_name(path.stem):
            todo = "name it NAME.yaml, NAME of letters, digits, '.', '_', '+' or '-'"
            raise UserError(f"{str(path)!r} cannot be a profile's file", where="--output", todo=todo)
        if path.exists() and not self._force:
            raise UserError(f"{path} exists", todo="use --force to replace it, or --output for another file")


def _name(live: Live) -> str:
    """Return the cluster's name as a profile can have it."""
    name = re.sub(r"[^A-Za-z0-9._+-]", "-", live.config.get("ClusterName", "")).strip("-.")
    return name if is_name(name) else "cluster"


def _check(text: str, name: str, environment: Mapping[str, str]) -> None:
    """Raise ExternalError for a draft that is not valid: Slurm said something that no profile can hold."""
    with tempfile.TemporaryDirectory(prefix="slurmddp-") as folder:
        path = Path(folder, f"{name}.yaml")
        path.write_text(text, encoding="utf-8")
        if errors := problems(Catalogue(environment), str(path)):
            raise ExternalError("Slurm's answers make no valid profile; please report this:\n" + "\n".join(errors))
