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
        """The run id: the folder's name."""
        return self.path.name

    @property
    def job_yaml(self) -> Path:
        """The resolved job, for people."""
        return self.path / "job.yaml"

    @property
    def site_yaml(self) -> Path:
        """The site's profile as it was at submission."""
        return self.path / "site.yaml"

    @property
    def job_sh(self) -> Path:
        """The batch script."""
        return self.path / "job.sh"

    @property
    def node_sh(self) -> Path:
        """The script that each node runs."""
        return self.path / "node.sh"

    @property
    def submission(self) -> Path:
        """The scheduler's answer: job id, command, time. Absent until then."""
        return self.path / "submission.json"

    @property
    def code(self) -> Path:
        """The code as it was at submission; mounted into the container and put on PYTHONPATH."""
        return self.path / "code"

    @property
    def code_list(self) -> Path:
        """The files of `code` as it was at submission, each with its sha256."""
        return self.path / "code.json"

    @property
    def code_archive(self) -> Path:
        """What the run needs of the package, in one file: the supervisor runs out of it, the nodes unpack it."""
        return self.code / ARCHIVE

    @property
    def python_sh(self) -> Path:
        """Starts a program out of the archive."""
        return self.code / STARTER

    @property
    def project(self) -> Path:
        """The snapshot of the user's project folder or script."""
        return self.code / "project"

    @property
    def logs(self) -> Path:
        """All logs."""
        return self.path / "logs"

    @property
    def job_log(self) -> Path:
        """Standard output and error of the batch script, all attempts."""
        return self.logs / "job.log"

    def attempt_logs(self, attempt: int) -> Path:
        """Folder of one attempt's logs, one file a node."""
        return self.logs / f"attempt-{attempt:03d}"

    @property
    def ranks(self) -> Path:
        """The node of each rank of the newest start, a line a rank."""
        return self.path / "ranks"

    @property
    def continued(self) -> Path:
        """The runs that continue this one (--resume), a file each."""
        return self.path / "continued"

    @property
    def alert_spool(self) -> Path:
        """Alerts that could not be sent, a folder each."""
        return self.path / "alerts" / "spool"


def attempt_of(marker: Path) -> int | None:
    """Return the attempt whose marker this is; None for any other file."""
    found = _MARKER.fullmatch(marker.name)
    return int(found[1]) if found else None
