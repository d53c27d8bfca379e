"""Ends Slurm's hold on a requeued job, in a process that has left the job. It stands alone: its text is run by itself.

Slurm holds a requeued job back for two minutes. Its owner may end that, but not before the job's last process has
ended. (Where cgroups track processes, this one is ended with the others: the next command on the login node does it.)
Nodes that are not to be used are kept out of the next start in the same way; where that leaves too few, they are not.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any, Dict, List


def scontrol(*words: str) -> str:
    """Return what scontrol writes; None if it fails."""
    done = subprocess.run(
        ["timeout", "10", "scontrol", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
    )
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""


def updated(job: str, change: str) -> bool:
    words = ["timeout", "10", "scontrol", "update", "JobId=" + job, change]
    return subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0


def main(job: str, restarts: int, excluded: List[str], events: str, event: Dict[str, Any]) -> None:
    """Wait for the hold, three minutes at most, and end it. restarts: of the start that is about to end.

    event: to be written to the file `events` then; the time is missing.
    """
    told, held = False, 0
    for _ in range(180):
        time.sleep(1)
        report = scontrol("show", "job", job, "-o")
        if re.search("JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT)", report):
            return
        started = re.search(r" Restarts=(\d+)", report)
        if started is None or int(started.group(1)) <= restarts:
            continue
        if re.search("JobState=PENDING.*Reason=BeginTime", report):
            # Within the second in which it ended the last one, a node refuses a job's new start, and the job fails.
            held += 1
            if held < 3 or not updated(job, "StartTime=now"):
                continue
            if not told:
                with open(events, "a") as file:
                    file.write(json.dumps(dict(event, time=round(time.time(), 3))) + "\n")
                told = True
            if not excluded:
                return
            there = re.search(r" ExcNodeList=([A-Za-z0-9]\S*)", report)
            if not updated(job, "ExcNodeList=" + ",".join(excluded + ([there.group(1)] if there else []))):
                return
        elif re.search("JobState=PENDING.*Reason=(BadConstraints|ReqNodeNotAvail)", report):
            if updated(job, "ExcNodeList="):
                return
        elif "JobState=RUNNING" in report:
            return


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    own_job, own_restarts, own_excluded, own_events, own_event = sys.argv[1:]
    main(own_job, int(own_restarts), own_excluded.split(), own_events, json.loads(own_event))
