"""Before the ranks start: can these nodes train, and how fast is the network between them?"""

import signal
import time
from typing import Any, Callable, Dict, List, Optional

from slurmddp.records import network, preflight
from slurmddp.records.cause import Cause
from slurmddp.records.job_events import NETWORK, PREFLIGHT, USER, Network, NodeExcluded, Preflight
from slurmddp.records.refusal import Refusal
from slurmddp.supervisor.brain.heartbeats import NO_HEARTBEAT
from slurmddp.supervisor.brain.types import FAILED, NEXT, REQUEUE
from slurmddp.supervisor.job import Job


def check_nodes(job: Job, look: Callable[[], bool]) -> bool:
    """Check all nodes, spares too, and exclude those that cannot train. Return False if this attempt is over."""
    began = time.monotonic()
    job.nodes.chosen = list(job.nodes.usable)
    if not job.nodes.chosen:
        return True  # there are too few, which comes next
    answers = _ask(job, look)
    if job.must_end():
        return True
    if job.nodes.lost:  # a heartbeat has stopped: the others have not answered yet
        job.decision, job.cause = NEXT, Cause(NO_HEARTBEAT, node=job.nodes.lost[0])
        return False
    verdict = None if answers["verdict"] is None else preflight.read(answers["verdict"])
    bad = _bad(job, answers, verdict)
    for node, refusal in bad.items():
        excluded = NodeExcluded(node, "preflight: " + refusal.text, PREFLIGHT, refusal.fault)
        job.exclude(excluded.reason, [node], lambda *_: excluded)  # noqa: B023 - called at once
    checked = len(job.nodes.chosen)
    seconds = int(time.monotonic() - began)
    warnings = () if verdict is None else tuple(verdict.warnings())
    job.event(Preflight(seconds, " ".join(bad), checked, warnings))
    if not bad:
        job.folder.tell("remove", "preflight-failed")
        return True
    node, refusal = next(iter(bad.items()))
    job.cause = Cause("preflight: " + refusal.text, None, node)
    # If all nodes have the same problem, or earlier nodes had it, other nodes would not help.
    job.decision = FAILED
    if sum(refusal.fault == USER for refusal in bad.values()) >= checked or (checked > 1 and len(bad) == checked):
        return False
    if not job.nodes.choose():
        if job.folder.known(None, "read", "preflight-failed") is None:
            job.decision = REQUEUE
        job.folder.tell("write", "preflight-failed", "")
        return False
    job.decision = NEXT
    return verdict is not None  # without one, the others are not checked yet


def _bad(job: Job, answers: Dict[str, Any], verdict: Optional[preflight.Verdict]) -> Dict[str, Refusal]:
    """Return why which nodes cannot train."""
    missed = dict(answers["unreached"])
    if missed:  # whether the others can train is seen once they are asked without these
        return {
            node: Refusal("Slurm could not start a process there: " + missed[node])
            for node in job.nodes.chosen
            if node in missed
        }
    bad = {}
    for node in job.nodes.chosen:
        if node in answers["failed"]:
            bad[node] = Refusal(*answers["failed"][node])
        elif verdict is None and node != job.nodes.chosen[0]:
            continue  # the first node should have said it
        elif verdict is None or node not in verdict.findings:
            bad[node] = Refusal("no answer: see {}/preflight/{}.log".format(job.logs, node))
        elif verdict.bad(node):
            bad[node] = Refusal(verdict.bad(node), verdict.fault(node))
    return bad


def _ask(job: Job, look: Callable[[], bool]) -> Any:
    """Have the nodes checked. If srun could not reach one, try once more: its slurmd may just be starting."""
    again = True
    while True:
        job.choose_port(job.nodes.chosen[0])
        words = job.values.node_script()
        env = {"SLURMDDP_STEP": "preflight", "SLURMDDP_PREFLIGHT_NODES": " ".join(job.nodes.chosen)}
        limit = job.values.number("join_timeout")
        job.on_nodes(job.logs + "/preflight/%N.log", words, lambda: _look(job, look), limit, env=env)
        answers = job.folder.ask("preflight", job.logs, job.nodes.chosen, patience=60)
        if not (answers["unreached"] and again) or job.must_end() or job.nodes.lost:
            return answers
        again = False
        node, text = answers["unreached"][0]
        job.say("Slurm could not start the preflight on {}: {}; trying once more".format(node, text))
        job.folder.ask("preflight_again", job.logs)
        job.loop.rest(5)


def _look(job: Job, look: Callable[[], bool]) -> None:
    """Where Slurm cannot start a task, srun may wait for the others for ten minutes."""
    if look() and job.child is not None:
        job.child.kill(signal.SIGTERM)


def measure_network(job: Job, look: Callable[[], bool], measured: List[List[str]]) -> bool:
    """Measure the network, unless these nodes were measured before. Replace slow nodes while there are enough others.

    measured: the nodes of earlier measurements. Return False if the run must not continue.
    """
    verdict = network.not_measured("")
    for first in (True, False):
        if len(job.nodes.chosen) < 2 or job.nodes.chosen in measured[-1:]:
            return True
        measured.append(job.nodes.chosen)
        began = time.monotonic()
        _ask_network(job, look)
        if job.must_end():
            return True
        record = job.folder.ask("network", job.logs, patience=60)
        missing = network.not_measured("see {}/network".format(job.logs))
        verdict = missing if record is None else network.read(record)
        job.say("network: " + verdict.text)
        job.event(Network(int(time.monotonic() - began), verdict.text, verdict.measured))
        if not (first and verdict.bad and job.nodes.enough_without(list(verdict.bad))):
            break
        for node, text in verdict.bad.items():
            excluded = NodeExcluded(node, "network: " + text, NETWORK)
            job.exclude(excluded.reason, [node], lambda *_: excluded)  # noqa: B023 - called at once
        job.nodes.choose()
    if verdict.measured.result != network.TCP:
        return True
    job.decision, job.exit_code, job.cause = FAILED, 1, Cause(verdict.text)
    return False


def _ask_network(job: Job, look: Callable[[], bool]) -> None:
    """Start one process per node, like the ranks."""
    job.folder.ask("prepare_network", job.logs)
    job.choose_port(job.head)
    env = {"SLURMDDP_STEP": "network", "SLURMDDP_NETWORK_NODES": " ".join(job.nodes.chosen)}
    words, limit = job.values.node_script(), job.values.number("join_timeout")
    job.on_nodes(job.logs + "/network/%N.log", words, look, limit, env=env)
