"""Where everything of a run lies in its folder: the one place that spells the names of what ranks do not use."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from slurmddp.shared import run_folder

#: What the run needs of this package, and what starts a program out of it; below `code`.
ARCHIVE, STARTER = "slurmddp.zip", "python.sh"
_MARKER = re.compile(r"attempt-(\d{3,})\.json")


class _Below:
    """A path below the run folder."""

    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __get__(self, folder: RunFolder, kind: type[RunFolder]) -> Path:
        return folder.path.joinpath(*self._parts)


@dataclass(frozen=True)
class RunFolder(run_folder.RunFolder):
    """Paths inside one run's folder, with those that only commands and job.sh use. Makes nothing by itself.

    The folder may be another user's: what changes or executes something takes a `gate.OwnRun` instead.
    """

    @property
    def exists(self) -> bool:
        """Return whether a finished run folder is there: the manifest tells. False if we may not look."""
        try:
            return stat.S_ISREG(os.lstat(self.manifest).st_mode)
        except OSError:
            return False

    @property
    def id(self) -> str:
        """Return the run id: the folder's name."""
        return self.path.name

    #: The resolved job, for people.
    job_yaml = _Below("job.yaml")
    #: The site's profile as it was at submission.
    site_yaml = _Below("site.yaml")
    #: The batch script, and the one that each node runs.
    job_sh, node_sh = _Below("job.sh"), _Below("node.sh")
    #: The scheduler's answer: job id, command, time. Absent until then.
    submission = _Below("submission.json")
    #: The code as it was at submission; mounted into the container and put on PYTHONPATH.
    code = _Below("code")
    #: The files of `code` as it was at submission, each with its sha256.
    code_list = _Below("code.json")
    #: What the run needs of the package, in one file: the supervisor runs out of it, the nodes unpack it.
    code_archive = _Below("code", ARCHIVE)
    #: Starts a program out of the archive.
    python_sh = _Below("code", STARTER)
    #: The snapshot of the user's project folder or script.
    project = _Below("code", "project")
    logs = _Below("logs")
    #: Standard output and error of the batch script, all attempts.
    job_log = _Below("logs", "job.log")
    #: The node of each rank of the newest start, a line a rank.
    ranks = _Below("ranks")
    #: The runs that continue this one (--resume), a file each.
    continued = _Below("continued")
    #: Alerts that could not be sent, a folder each.
    alert_spool = _Below("alerts", "spool")

    def attempt_logs(self, attempt: int) -> Path:
        """Folder of one attempt's logs, one file a node."""
        return self.logs / f"attempt-{attempt:03d}"


def attempt_of(marker: Path) -> int | None:
    """Return the attempt whose marker this is; None for any other file."""
    found = _MARKER.fullmatch(marker.name)
    return int(found[1]) if found else None
