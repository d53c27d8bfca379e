"""The run that a new run continues (--resume), with those that it continued itself."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmddp.errors import UserError
from slurmddp.job.document import RUN, read_file
from slurmddp.job.plan.program import absolute
from slurmddp.job.resolve import is_site_file
from slurmddp.launch.find import find_run
from slurmddp.records import saves
from slurmddp.records.events import of
from slurmddp.records.rank_events import CheckpointSaved
from slurmddp.run import manifest
from slurmddp.run.events import read_events
from slurmddp.run.gate import stranger
from slurmddp.run.layout import RunFolder
from slurmddp.shared.checkpoint import layout
from slurmddp.shared.files import read_json


@dataclass(frozen=True)
class Resumed:
    """runs: newest first; none for a job that begins anew. longest_save: seconds of their slowest save, if known."""

    runs: tuple[RunFolder, ...] = ()
    longest_save: float | None = None

    @property
    def run(self) -> RunFolder | None:
        return self.runs[0] if self.runs else None

    def newest_checkpoint(self) -> tuple[int, Path] | None:
        """Return step and folder of the checkpoint that the new run would load, as far as sizes tell."""
        # Imported here: it brings pickle, and most jobs continue no run.
        from slurmddp.shared.checkpoint.checkpoints import Checkpoints

        def glance(path: Path) -> tuple[int, Path]:
            return Checkpoints.verify(path, content=False).step, path

        for run in self.runs:
            with contextlib.suppress(OSError):
                newest = Checkpoints(run.checkpoints).newest(glance, lambda rejected: None)
                if newest is not None:
                    return newest
        return None

    def places(self) -> tuple[str, ...]:
        """Return the folders with what the runs have saved: their checkpoints/, and others in the run folder."""
        folders = [(run, folder) for run in self.runs for folder in (str(run.checkpoints), _elsewhere(run))]
        return tuple(folder for run, folder in folders if folder.startswith(f"{run.path}/"))

    def start(self) -> str:
        """Return the run that is continued, and at which step, if that is known."""
        newest = self.newest_checkpoint()
        return f"{newest[1].parent.parent.name}, step {newest[0]}" if newest else self.runs[0].id

    def site(self) -> tuple[str, str] | None:
        """Return the site of the run that is continued, and the file that sets it.

        The run of another user may name a profile, but no file: its lines would run with this user's account.
        """
        if self.run is None or not self.run.job_yaml.is_file():
            return None  # whatever is wrong with that folder, the job may name its site itself
        site = read_file(self.run.job_yaml, "resumed run", below=self.run.path).tree.get("site")
        if not isinstance(site, str) or (is_site_file(site) and stranger(self.run)):
            return None
        return site, str(self.run.job_yaml)


def find_resumed(text: str | None, environment: Mapping[str, str]) -> Resumed:
    """Return the run that --resume names. Raises UserError if neither it nor an earlier one has a checkpoint."""
    if text is None:
        return Resumed()
    folder = find_run(text, environment)
    runs = [folder, *(RunFolder(path) for path in _earlier(folder) if path.is_dir())]
    # A checkpoint is a complete one of slurmddp, or whatever a framework has saved.
    saved = (path for run in runs for path in run.path.glob("checkpoints/[!.]*"))
    is_saved = any(layout.step_of(path) is None or layout.is_complete(path) for path in saved)
    if not is_saved and not any(map(_elsewhere, runs)):
        todo = "submit its job without --resume"
        raise UserError(f"run {folder.id} has no complete checkpoint yet", where="--resume", todo=todo)
    return resumed_of(runs)


def _elsewhere(run: RunFolder) -> str:
    """Return the folder with the newest save of an own script in checkpoint.watch; empty without one."""
    if run.job_json.is_file() or not run.job_yaml.is_file():  # job.json: a bundled task, which saves in checkpoints/
        return ""
    workdir = manifest.read(run).get("workdir")
    if not isinstance(workdir, str):
        return ""
    watch = (read_file(run.job_yaml, "resumed run", below=run.path).tree.get("checkpoint") or {}).get("watch") or ()
    save = saves.newest(absolute(str(path).replace(RUN, str(run.path)), workdir) for path in watch)
    return os.path.dirname(save.path) if save else ""


def resumed_of(runs: Sequence[RunFolder]) -> Resumed:
    """Return these runs, newest first, as the ones to continue."""
    longest: float | None = None
    for run in runs:
        try:
            events = read_events(run.events, run.path).records
        except OSError:
            continue  # a run that cannot be read plans nothing
        for _, saved in of(events, CheckpointSaved):
            if saved.seconds is not None and saved.seconds >= 0:
                longest = max(saved.seconds, longest or 0.0)
    return Resumed(tuple(runs), longest)


def _earlier(folder: RunFolder) -> list[Path]:
    """Return the runs that a run resumed from, newest first. Raises UserError if its checkpoints are unknown."""
    if not folder.job_json.is_file():
        earlier = manifest.read(folder).get("resumed_from")
        runs = [Path(text) for text in earlier if isinstance(text, str)] if isinstance(earlier, list) else []
        if not runs and not any(folder.checkpoints.glob("[!.]*")) and not _elsewhere(folder):
            raise UserError(
                f"run {folder.id} ran your own script, which has saved nothing in {folder.checkpoints}",
                where="--resume",
                todo="submit the script again, with its own option for resuming. To resume the next run, set "
                "checkpoint.watch to where it saves (`slurmddp check` proposes it), or save there (docs/frameworks.md)",
            )
        return runs
    try:
        earlier = read_json(folder.job_json, folder.path).get("resume_from", [])
    except (ValueError, AttributeError):
        raise UserError("is damaged", where=str(folder.job_json), todo="resume another run") from None
    return [Path(text).parent for text in earlier]
