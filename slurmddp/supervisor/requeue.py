"""Back into the queue: as the same job (scontrol requeue), as a new one that waits for its end (chain), or not."""

import os
import re
import subprocess
import sys
from typing import Dict, List, Mapping

from slurmddp.records import json_lines
from slurmddp.records.events import Event
from slurmddp.records.job_events import HoldReleased
from slurmddp.supervisor.brain.types import NODE_FAILURE, PREEMPTION
from slurmddp.supervisor.loop import Loop

#: What a command of Slurm needs of this job's environment. A token must not be a command's argument.
_REACH = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
_OF_JOB = (
    *("SLURMDDP_", "SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_"),
    *("PMIX_", "PMI_", "SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_"),
)

with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "release.py"), encoding="utf-8") as _file:
    _RELEASE = _file.read()


class Refused(Exception):
    """The job cannot be requeued."""


class Never:
    """This job is not one that could be brought back."""

    def again(self, ended_by: str, excluded: List[str]) -> str:
        """Have the run go on; return the id of the job that will. ended_by: as in Decision. Raises Refused."""
        raise Refused("")

    def by_others(self, excluded: List[str]) -> str:
        """Somebody else has put the job back: return its id. Raises Refused."""
        raise Refused("")


class Requeue:
    """The same job, with `scontrol requeue`. attempt: the newest, set by whoever makes one."""

    def __init__(self, loop: Loop, slurm_job: str, job_id: str, host: str, run: str) -> None:
        self._loop, self._job, self._id, self._host, self._run = loop, slurm_job, job_id, host, run
        self._restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        self.attempt = 0

    def again(self, ended_by: str, excluded: List[str]) -> str:
        if ended_by == NODE_FAILURE or (ended_by == PREEMPTION and self._slurm_does_it()):
            return self.by_others(excluded)  # or Slurm will, when this script ends: asked as well, it would do it twice
        self._release_hold(excluded)
        for tries in range(1, 9):
            done = self._loop.run(["scontrol", "requeue", self._job], 10, errors=subprocess.STDOUT)
            if done.code == 0 or self._in_the_queue():  # its answer may be lost
                return self._id
            answer = done.text.strip()
            if "contact slurm controller" not in answer or tries == 8:
                raise Refused(answer)
            self._loop.rest(5)  # it may just be starting again
        raise Refused("")

    def by_others(self, excluded: List[str]) -> str:
        self._release_hold(excluded)
        return self._id

    def _slurm_does_it(self) -> bool:
        """To Slurm 22.05, a job that ends within its grace time is over, so it is asked; 24.11 and 26.05 requeue it."""
        if re.search(r" (1?[0-9]|2[0-2])\.", self._loop.run(["scontrol", "--version"], 5).text):
            return False
        partition = ["scontrol", "show", "partition", os.environ.get("SLURM_JOB_PARTITION", ""), "-o"]
        return bool(re.search(r"PreemptMode=\S*REQUEUE", self._loop.run(partition, 5).text))

    def _in_the_queue(self) -> bool:
        """Return whether Slurm has put the job back since this script began."""
        report = self._loop.run(["scontrol", "show", "job", self._job, "-o"], 5).text
        restarts = re.search(r" Restarts=(\d+)", report)
        return restarts is not None and int(restarts.group(1)) > self._restarts

    def _release_hold(self, excluded: List[str]) -> None:
        names = ("PATH", "HOME", *_REACH)
        env = {name: os.environ[name] for name in names if name in os.environ}
        events = os.path.join(self._run, "events.jsonl")
        told = json_lines.dump(Event(HoldReleased(), None, self.attempt, self._id, self._host).write()).decode()
        nodes = os.environ.get("SLURM_JOB_NODELIST", "")
        words = [self._job, str(self._restarts), " ".join(excluded), nodes, events, told]
        self._loop.start(
            [sys.executable, "-I", "-c", _RELEASE, *words],
            env,
            "tool",
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


class Chain:
    """A new job, where the site forbids scontrol requeue: job.sh is submitted again, to begin when this has ended."""

    def __init__(self, loop: Loop, job_id: str, run: str, singleton: bool) -> None:
        self._loop, self._id, self._run = loop, job_id, run
        # A sweep with --at-most: one job of this name at a time. The option below would replace that of the script.
        self._after = "afterany:" + job_id + (",singleton" if singleton else "")

    def again(self, ended_by: str, excluded: List[str]) -> str:
        log = self._run.replace("%", "%%") + "/logs/job.log"
        words = ["sbatch", "--parsable", "--dependency=" + self._after, "--output=" + log]
        words += ["--exclude=" + ",".join(excluded)] if excluded else []
        here = ["bash", "-c", 'cd "$0" && exec "$@"', os.path.dirname(self._run)]  # as at the first submission
        done = self._loop.run([*here, *words, self._run + "/job.sh", self._run], 20, of_the_user(os.environ))
        if done.code != 0:
            raise Refused("could not submit the job that should continue the run")
        return done.text.strip().split(";")[0]

    def by_others(self, excluded: List[str]) -> str:
        return self._id


def of_the_user(environment: Mapping[str, str]) -> Dict[str, str]:
    """Return an environment without what this job was given: that is not what the next one asks for."""
    return {name: text for name, text in environment.items() if name in _REACH or not name.startswith(_OF_JOB)}
