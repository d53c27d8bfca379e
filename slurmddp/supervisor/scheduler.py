"""The job as the scheduler knows it: Slurm, or one machine without Slurm."""

import os
import re
import socket
import subprocess
import sys
from typing import Dict, List, Optional, Sequence

from slurmddp.supervisor import values
from slurmddp.supervisor.brain.types import Job
from slurmddp.supervisor.loop import Loop

#: Seconds for an answer of Slurm's controller.
_PATIENCE = 5.0
#: Arguments: Slurm's library, the job, its exit code.
_COMPLETE = """import ctypes, sys
slurm = ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)  # its plugins need its names
slurm.slurm_init(None)
job, code = (ctypes.c_uint32(int(word)) for word in sys.argv[2:])
if slurm.slurm_api_version() >> 16 >= 44:  # Slurm 25.11: a slurm_step_id_t, here with no step
    no_val = 0xFFFFFFFE
    job = ctypes.byref((ctypes.c_uint32 * 6)(0, 0, job.value, no_val, no_val, 0))
sys.exit(slurm.slurm_complete_job(job, code) != 0)"""
_FIELDS = {
    "state": re.compile(r"JobState=([A-Z_]+)"),
    "reason": re.compile(r"Reason=([A-Za-z_]+)"),
    "raised": re.compile(r"Reason=RaisedSignal:(\d+)"),
    "exit_code": re.compile(r" ExitCode=([0-9:]+)"),
    "batch_host": re.compile(r" BatchHost=([A-Za-z0-9._-]+)"),
    "restarts": re.compile(r" Restarts=(\d+)"),
    "began": re.compile(r" StartTime=(\d\S*)"),
    "preempted": re.compile(r" PreemptTime=(\d\S*)"),
    "nodes": re.compile(r" NodeList=([A-Za-z0-9]\S*)"),
    "end": re.compile(r" EndTime=(\S+)"),
}


def fields(report: str) -> Dict[str, str]:
    """Return what scontrol says of a job, by the names above, as far as it says it."""
    matches = {name: pattern.search(report) for name, pattern in _FIELDS.items()}
    return {name: match.group(1) for name, match in matches.items() if match}


class Local:
    """One machine without Slurm; Slurm has the same methods."""

    head_address = "127.0.0.1"
    slurm = False

    def __init__(self, pid: str) -> None:
        self.host = socket.gethostname()
        self.job_id = self.slurm_job = "local-" + pid
        self.job_nodes = self.host
        self.job = Job()

    def ask(self) -> bool:
        """Ask how the job is now. Return whether there was an answer."""
        return True

    def withdraw(self) -> None:
        """Cancel the job, so that nothing starts it again."""

    def takes_steps(self) -> bool:
        """Return whether something may still be started in a job that a signal ends."""
        return True

    def ends_job(self) -> bool:
        """Ask whether something has ended the job: only its processes are still there."""
        return False

    def nodes(self) -> Optional[List[str]]:
        """Return the nodes that the job has now; None if that is not known."""
        return [self.host]

    def count_gpus(self, env: Dict[str, str]) -> int:
        raise NotImplementedError

    def end_time(self) -> Optional[float]:
        """Return the job's time limit, in unix seconds."""
        return None

    def step(self, nodes: Sequence[str], options: Sequence[str], log: str, words: List[str]) -> List[str]:
        """Return the command that starts one process on each node. `%N` in log: the node."""
        return ["bash", "-c", 'exec "$@" >>"$0" 2>&1', log.replace("%N", self.host), *words]


class Slurm:
    """A job of Slurm. Where Slurm does not answer, it is what it was last."""

    head_address = ""
    slurm = True

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        env = os.environ
        self.host, self.job_id, self.slurm_job = values.host(env), env["SLURM_JOB_ID"], values.slurm_job(env)
        self.job_nodes = self._node_list = env["SLURM_JOB_NODELIST"]
        restarts = int(env.get("SLURM_RESTART_COUNT") or 0)
        self.job = Job(restarts=restarts, restarts_then=restarts)

    def report(self) -> str:
        """Return what scontrol says of the job, or why it says nothing."""
        words = ["scontrol", "show", "job", self.slurm_job, "-o"]
        return self._loop.run(words, _PATIENCE, errors=subprocess.STDOUT).text

    def ask(self) -> bool:
        text = fields(self.report())
        # Slurm keeps the time of a preemption that was before this start.
        preempted = "preempted" in text and text["preempted"] >= text.get("began", "")
        self.job = self.job._replace(
            state=text.get("state", self.job.state),
            reason=text.get("reason", self.job.reason),
            preempted=preempted or self.job.preempted,
            restarts=int(text.get("restarts", self.job.restarts)),
        )
        self._node_list = text.get("nodes", self._node_list)
        return "state" in text

    def takes_steps(self) -> bool:
        return self.job.state == "RUNNING"

    def ends_job(self) -> bool:
        return self.ask() and self.job.state in ("COMPLETING", "CANCELLED")

    def withdraw(self) -> None:
        self._loop.run(["scancel", self.slurm_job], _PATIENCE)

    def nodes(self) -> Optional[List[str]]:
        return self.names(self._node_list)

    def names(self, node_list: str) -> Optional[List[str]]:
        """Return the nodes of a list that Slurm has written; None if it does not answer."""
        done = self._loop.run(["scontrol", "show", "hostnames", node_list], 20)
        return done.text.split() if done.code == 0 else None

    def library(self) -> str:
        """Return Slurm's library, which scontrol is linked to; empty: it is not known."""
        linked = self._loop.run(["bash", "-c", 'ldd "$(type -P scontrol)"'], _PATIENCE).text
        library = re.search(r"=> (\S*libslurm\S*)", linked)
        return library.group(1) if library else ""

    def complete(self, code: int) -> None:
        """End the job from another node than that of its batch script, as salloc does: it is completed, or failed with
        this code, while scancel would have it cancelled. No command does it, only a function of Slurm's library.
        """
        words = [self.library(), self.job_id, str(code << 8)]  # the code is that of waitpid
        self._loop.run([sys.executable, "-I", "-c", _COMPLETE, *words], 20)
        if self.ask() and self.job.state == "RUNNING":
            self.withdraw()

    def count_gpus(self, env: Dict[str, str]) -> int:
        """Return the job's GPUs, for nodes that may differ in them. A step gets the GPUs that were asked for, not those
        that came with whole nodes: it has to ask for all of the job's.
        """
        for name in ("SLURM_GPUS", "SLURM_GPUS_PER_NODE"):  # the job's own wish, which srun would take for the step's
            env.pop(name, None)
        report = self._loop.run(["scontrol", "show", "job", "-d", self.job_id, "-o"], 60).text
        given = re.search(r"JOB_GRES=(\S*)", report)
        kinds = given.group(1).split(",") if given else []
        counts = [re.match(r"gpu(?::[^:]*)?:(\d+)", kind) for kind in kinds]  # gpu:4 or gpu:a100:4
        return sum(int(count.group(1)) for count in counts if count)

    def end_time(self) -> Optional[float]:
        """Ask for the job's time limit: an operator may have given it more time."""
        match = _FIELDS["end"].search(self.report())
        if match is None:
            return None
        done = self._loop.run(["date", "-d", match.group(1), "+%s"], _PATIENCE)
        return float(done.text) if done.code == 0 else None

    def step(self, nodes: Sequence[str], options: Sequence[str], log: str, words: List[str]) -> List[str]:
        count = str(len(nodes))
        head = ["srun", "--nodes=" + count, "--ntasks=" + count, "--ntasks-per-node=1"]
        tail = ["--wait=0", "--export=ALL", "--input=none", "--output=" + log, "--open-mode=append"]
        return [*head, *options, *tail, *words]
