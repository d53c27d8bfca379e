"""Back into the queue: as the same job (scontrol requeue), as a new one that waits for its end (chain), or not."""

import os
import pkgutil
import re
import subprocess
import sys
import time
from typing import Any, Dict, List, Mapping, Optional

from slurmddp.records import json_lines
from slurmddp.records.events import Event
from slurmddp.records.job_events import HoldReleased
from slurmddp.supervisor.brain.types import NODE_FAILURE, PREEMPTION
from slurmddp.supervisor.loop import Loop, Output
from slurmddp.supervisor.release import excluded_in

#: What a command of Slurm needs of this job's environment. A token must not be a command's argument.
_REACH = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
_OF_JOB = (
    *("SLURMDDP_", "SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_"),
    *("PMIX_", "PMI_", "SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_"),
)

#: Seconds for one try and for one look at the queue; and for all of them, where no signal ends the job.
_TRY, _LOOK, _ALL = 20.0, 5.0, 120.0
#: What Slurm's commands write where the controller is slow, or starts again.
_TRANSIENT = re.compile("contact slurm controller|Unable to contact|Socket timed out|Zero Bytes were transmitted", re.I)
#: Submits a run's job.sh. Whoever may write to the parent folder can replace the run folder: then job.sh is not ours.
_SUBMIT = 'cd "$0" && for its in "$1" "$1/job.sh"; do [[ ! -e $its || -O $its ]] || exit 99; done && shift && exec "$@"'

# __package__ is not known to Python 3.6 while it imports out of an archive
_RELEASE = (pkgutil.get_data("slurmddp.supervisor", "release.py") or b"").decode()


class Refused(Exception):
    """The job cannot be requeued."""


def answer(done: Output, seconds: float) -> str:
    """Return what a command that failed has said."""
    silent = "no answer within {:.0f} s".format(seconds)
    return done.text.strip() or (silent if done.code is None else "exit code {}".format(done.code))


class _Tries:
    """Tries of one command, until its time is over. what: what could not be done."""

    def __init__(self, loop: Loop, seconds: float, what: str) -> None:
        self._loop, self.what, self._pause = loop, what, min(seconds / 10, 10.0)
        self._end = time.monotonic() + seconds
        self._seconds, self._answer, self._last = _TRY, "", False

    def run(self, words: List[str], env: Optional[Dict[str, str]] = None) -> Output:
        """Try once. Time is left for a look at the queue after that."""
        self._seconds = max(min(_TRY, self._end - time.monotonic() - _LOOK), _LOOK)
        return self._loop.run(words, self._seconds, env, errors=subprocess.STDOUT)

    def failed(self, done: Output) -> None:
        """Take note of a failure, and let time pass if there may be another try: the controller may be restarting."""
        self._answer = answer(done, self._seconds)
        self._last = done.code is not None and not _TRANSIENT.search(done.text)
        if not self._last and not self._late():
            self.rest()

    def check(self) -> None:
        """Raise Refused if another try makes no sense."""
        if self._last or self._late():
            raise Refused("{}: {}".format(self.what, self._answer))

    def rest(self) -> None:
        self._loop.rest(self._pause)

    def _late(self) -> bool:
        return self._end - time.monotonic() < self._pause + 2 * _LOOK


class Never:
    """No way back: this job is not one that could be brought back. The ways back have the same methods."""

    attempt = 0  # the newest; whoever asks sets both
    seconds = _ALL  # for all tries together

    def keep_out(self, excluded: List[str]) -> str:
        """Keep nodes out of the start that was asked for; return what went wrong."""
        return ""

    def again(self, ended_by: str, excluded: List[str]) -> str:
        """Have the run go on; return the id of the job that will. ended_by: as in Decision. Raises Refused."""
        raise Refused("")

    def by_others(self, excluded: List[str]) -> str:
        """Somebody else has put the job back: return its id. Raises Refused."""
        raise Refused("")


class Requeue(Never):
    """The same job, with `scontrol requeue`."""

    def __init__(self, loop: Loop, slurm_job: str, job_id: str, host: str, run: str) -> None:
        self._loop, self._job, self._id, self._host, self._run = loop, slurm_job, job_id, host, run
        self._restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        self._requeued = False

    def again(self, ended_by: str, excluded: List[str]) -> str:
        tries = _Tries(self._loop, self.seconds, "could not requeue job " + self._job)
        if ended_by == NODE_FAILURE or (ended_by == PREEMPTION and self._slurm_does_it()):
            return self.by_others(excluded)  # or Slurm will, when this script ends: asked as well, it would do it twice
        self._release_hold(excluded)
        words = ["scontrol", "requeue", self._job]
        while True:
            done = tries.run(words)
            if done.code == 0:
                break
            tries.failed(done)
            if self._in_the_queue():  # its answer was lost
                break
            tries.check()
        self._requeued = True
        return self._id

    def by_others(self, excluded: List[str]) -> str:
        self._release_hold(excluded)
        return self._id

    def _slurm_does_it(self) -> bool:
        """To Slurm 22.05, a job that ends within its grace time is over, so it is asked; 24.11 and 26.05 requeue it."""
        if re.search(r" (1?[0-9]|2[0-2])\.", self._loop.run(["scontrol", "--version"], 5).text):
            return False
        return bool(re.search(r"PreemptMode=\S*REQUEUE", self._partition()))

    def _partition(self) -> str:
        words = ["scontrol", "show", "partition", os.environ.get("SLURM_JOB_PARTITION", ""), "-o"]
        return self._loop.run(words, _LOOK).text

    def _report(self) -> str:
        return self._loop.run(["scontrol", "show", "job", self._job, "-o"], _LOOK).text

    def keep_out(self, excluded: List[str]) -> str:
        """As release.py does later: where cgroups track processes, that one is killed with this job. It alone sees a
        job that waits for good, so this is done only where enough other nodes are left.
        """
        if not (excluded and self._requeued):  # Slurm takes this for a job in the queue
            return ""
        text = "could not exclude {} from the next start yet: ".format(",".join(excluded))
        report = self._report()
        if "JobState=" not in report:
            return text + "Slurm does not answer"  # which nodes the user has excluded is not known
        total = re.search(r" TotalNodes=(\d+)", self._partition())
        needed = len(set(excluded)) + int(os.environ.get("SLURM_JOB_NUM_NODES") or 1)
        if total is not None and int(total.group(1)) < needed:
            return ""
        listed = excluded_in(report)
        nodes = [node for node in dict.fromkeys(excluded) if node not in listed]
        words = ["scontrol", "update", "JobId=" + self._job, "ExcNodeList=" + ",".join(nodes + listed)]
        done = self._loop.run(words, _LOOK, errors=subprocess.STDOUT) if nodes else Output(0, "")
        return "" if done.code == 0 else text + answer(done, _LOOK)

    def _in_the_queue(self) -> bool:
        """Return whether Slurm has put the job back since this script began."""
        restarts = re.search(r" Restarts=(\d+)", self._report())
        return restarts is not None and int(restarts.group(1)) > self._restarts

    def _release_hold(self, excluded: List[str]) -> None:
        names = ("PATH", "HOME", *_REACH)
        env = {name: os.environ[name] for name in names if name in os.environ}
        events = os.path.join(self._run, "events.jsonl")
        event = json_lines.dump(Event(HoldReleased(), None, self.attempt, self._id, self._host).write()).decode()
        nodes = os.environ.get("SLURM_JOB_NODELIST", "")
        words = [self._job, str(self._restarts), " ".join(excluded), nodes, events, event]
        apart: Any = {"start_new_session": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._loop.start([sys.executable, "-I", "-c", _RELEASE, *words], env, "tool", **apart)


class Chain(Never):
    """A new job, where the site forbids scontrol requeue: job.sh is submitted again, to begin when this has ended."""

    def __init__(self, loop: Loop, job_id: str, run: str, singleton: bool) -> None:
        self._loop, self._id, self._run = loop, job_id, run
        # A sweep with --at-most: one job of this name at a time. The option below would replace that of the script.
        self._after = "afterany:" + job_id + (",singleton" if singleton else "")

    def again(self, ended_by: str, excluded: List[str]) -> str:
        log = self._run.replace("%", "%%") + "/logs/job.log"
        words = ["sbatch", "--parsable", "--dependency=" + self._after, "--output=" + log]
        words += ["--exclude=" + ",".join(excluded)] if excluded else []
        here = ["bash", "-c", _SUBMIT, os.path.dirname(self._run), self._run]  # as at the first submission
        words = [*here, *words, self._run + "/job.sh", self._run]
        tries = _Tries(self._loop, self.seconds, "could not submit the job that should continue the run")
        while True:
            done = tries.run(words, of_the_user(os.environ))
            if done.code == 99:
                raise Refused(tries.what + ": another user owns {0} or {0}/job.sh".format(self._run))
            submitted = re.findall(r"^(\d+)(?:;\S*)?$", done.text, re.MULTILINE)
            if done.code == 0 and submitted:
                return str(submitted[-1])
            tries.failed(done)
            waiting = self._waiting()
            while waiting is None:  # without an answer, a second submission might be a second job
                tries.check()
                tries.rest()
                waiting = self._waiting()
            if waiting:
                return waiting
            tries.check()

    def _waiting(self) -> Optional[str]:
        """Return the id of a job of this run that waits for the end of ours: of a submission whose answer was lost.
        Empty: there is none. None: Slurm does not answer.
        """
        words = ["squeue", "--me", "--noheader", "--format=%i %E %o"]
        done = self._loop.run(words, _LOOK, of_the_user(os.environ))
        if done.code != 0:
            return None
        ours = r"^(\d+) \S*afterany:{}\b.*{}/job\.sh".format(re.escape(self._id), re.escape(self._run))
        match = re.search(ours, done.text, re.MULTILINE)
        return match.group(1) if match else ""

    def by_others(self, excluded: List[str]) -> str:
        return self._id


def of_the_user(environment: Mapping[str, str]) -> Dict[str, str]:
    """Return an environment without what this job was given: that is not what the next one asks for."""
    return {name: text for name, text in environment.items() if name in _REACH or not name.startswith(_OF_JOB)}
