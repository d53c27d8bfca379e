"""Tells job.sh, for node.sh, why this node cannot start its ranks: fail TOGETHER FAULT TEXT

FAULT: as in records/refusal.py. TOGETHER: not empty if nothing runs on other nodes that the end of this one would end.
"""

import os
import sys
import time
from typing import Mapping, Sequence

from slurmddp.records.refusal import Refusal

#: Seconds in which the other nodes say whether they can start their ranks.
_PATIENCE = 60


def report(together: str, why: Refusal, environment: Mapping[str, str]) -> None:
    """Write it, whole or not at all: the head and job.sh read it from the run folder. Wait for the others."""
    host, folder = environment["SLURMDDP_NODE"], environment["SLURMDDP_LOGS"] + "/preflight"
    part, path = "{}/.{}.part".format(folder, host), "{}/{}.failed".format(folder, host)
    try:
        os.makedirs(folder, exist_ok=True)
        with open(part, "wb") as file:
            file.write(os.fsencode(why._replace(text=why.text.replace("\n", " ")).write()))
        os.rename(part, path)
    except OSError as error:  # then job.sh has the log alone
        print("slurmddp: node {}: cannot write {}: {}".format(host, path, error.strerror), file=sys.stderr)
    if not together:
        _await_others(folder, int(environment["SLURMDDP_NODES"]))


def _await_others(folder: str, nodes: int) -> None:
    """srun ends the other nodes with this one: each first says whether its ranks can start, for job.sh to decide."""
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        try:
            names = os.listdir(folder)
        except OSError:
            return  # nobody can say anything
        if sum(not name.startswith(".") and name.endswith((".failed", ".ready")) for name in names) >= nodes:
            return
        time.sleep(1)


def main(arguments: Sequence[str]) -> int:
    """Tell of a failure that node.sh has printed."""
    together, fault, text = arguments
    report(together, Refusal(text, fault), os.environ)
    return 0
