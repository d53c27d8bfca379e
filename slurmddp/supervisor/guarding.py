"""The guard's step: the supervisor starts it, and starts it again if it dies. See guard.py."""

import os
import signal
import time
from typing import Any, Callable, Optional

from slurmddp.supervisor.loop import Child
from slurmddp.supervisor.standby import BATCH_ENV, batch_environment, candidates

#: Seconds from the guard's death to its next start. The first time at once: the next node may be lost soon. Then ever
#: later: what killed it may go on.
_FIRST, _AGAIN, _LONGEST = 1.0, 30.0, 600.0


class Guarding:
    """The guard of a job, if it has one. clock: seconds of a clock that nobody sets."""

    def __init__(self, job: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._job, self._clock = job, clock
        self._child: Optional[Child] = None
        self._died: Optional[float] = None
        self._pause = _FIRST

    def start(self) -> None:
        """Start it beside this script, or on every node of a job that may lose nodes: it brings the job back where
        job.sh is killed, or dies with its node and the others live on.
        """
        job = self._job
        where = ["--nodes=1", "--ntasks=1", "--nodelist=" + job.scheduler.host]
        if job.values.yes("elastic"):
            count = str(len(job.nodes.usable))
            where = ["--no-kill", "--nodes=" + count, "--ntasks=" + count, "--ntasks-per-node=1"]
            where += ["--nodelist=" + ",".join(job.nodes.usable)]  # the job may still have a node that is lost
        env = job.env
        if job.values.yes("standby"):
            job.values.words["standby"] = candidates(job)
            env = dict(job.env, **{BATCH_ENV: batch_environment()})
        step = ["srun", "--overlap", *where, "--cpus-per-task=1", "--mem=0", "--gres=none", "--export=ALL"]
        step += ["--input=none", "--output=none", "--error=none", *job.values.program("guard"), *job.values.write()]
        # srun tells of its end, which is no news
        errors = ["bash", "-c", 'exec "$@" 2>>"$0"', job.run + "/logs/guard.err"]
        self._child = job.loop.start([*errors, *step], env)

    def look(self) -> None:
        """Start it again if it has died. One that has nothing more to do exits with code 0."""
        code = None if self._child is None else self._child.code
        if not code or self._job.ending:
            return
        if self._died is None:
            self._died = self._clock()
            text = "the guard has died (exit code {}, see logs/guard.err): it is started again in {:.0f} s"
            self._job.say(text.format(code, self._pause))
            try:
                os.unlink(os.path.join(self._job.values.folder, "guard"))  # job.sh cannot count on it now
            except OSError:
                pass  # it died before it was ready
        elif self._clock() - self._died >= self._pause:
            self._died, self._pause = None, min(max(_AGAIN, 2 * self._pause), _LONGEST)
            self.start()

    def end(self) -> None:
        """End it with the job."""
        if self._child is not None:
            self._child.kill(signal.SIGTERM)
