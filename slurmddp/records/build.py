"""The lock file beside an image that is being built: who builds it."""

import time
from typing import NamedTuple, Optional

from slurmddp.records import json_lines
from slurmddp.records.values import number, whole

VERSION = 1


class Build(NamedTuple):
    """The process that builds. job: of Slurm, if it runs in one. since: unix seconds."""

    pid: int
    node: str
    since: float
    job: Optional[str] = None

    def write(self) -> bytes:
        return json_lines.dump(dict(self._asdict(), schema=VERSION))

    def line(self) -> str:
        """Return one line for people."""
        of_job = " of job {}".format(self.job) if self.job else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return "process {}{} on {}, since {}".format(self.pid, of_job, self.node, since)


def read(data: bytes) -> Optional[Build]:
    """Return what the file says; None if it is not sound."""
    fields = json_lines.load(data) or {}
    pid, since, node, job = whole(fields.get("pid")), number(fields.get("since")), fields.get("node"), fields.get("job")
    if pid is None or pid < 1 or since is None or not (isinstance(node, str) and node.isprintable()):
        return None
    return Build(pid, node, since, job if isinstance(job, str) and job.isdecimal() else None)
