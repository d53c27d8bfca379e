"""The brain decides as slurmddp/shell/decide.sh does: generated ends of attempts, given to both."""

from __future__ import annotations

import itertools
import json
import shlex
import subprocess
from pathlib import Path
from random import Random
from typing import Any

from slurmddp.records.cause import CONSEQUENCE, EXCEPTION, SIGNAL, Cause
from slurmddp.supervisor.brain import ledger as ledgers
from slurmddp.supervisor.brain.decide import decide
from slurmddp.supervisor.brain.types import Facts, Job, Ledger, Marker, Settings
from tests.helpers import SHELL

CASES = 160
NODES = ("node1", "node2", "node3")
SETUP = "setup line failed with exit code 3: module load x"
LOST = Cause("RuntimeError: Connection reset by peer", 2, "node2", CONSEQUENCE)
BOOM = Cause('ValueError: no "such\\" book', 1, "node1", EXCEPTION)
KILLED = Cause("killed by SIGKILL (out of memory?)", 0, "node1", SIGNAL)
TERMED = "SIGTERM received by rank 1 on node2"
FORGED = "somebody else changed the state of rendezvous 7 (not signed)"

#: What job.sh's other files do is given: the answers of Slurm, the search in the logs, what was saved.
BASH = """
set -uo pipefail
shopt -s extglob
say() { :; }
event() { :; }
cd "$1"
source "$2/messages.sh"; source "$2/cause.sh"; source "$2/nodes.sh"; source "$2/breaker.sh"; source "$2/decide.sh"
ask_slurm() { slurm_state=$slurm_says; preempted_at=$slurm_preempted; }
list_nodes() { lost_nodes=$loses; }
exclude() { local reason=$1; shift; for node in "$@"; do echo "exclude $node $reason"; done; }
cause_in_logs() { printf '%s' "$logged"; }
saved_nothing() { [[ "$saved" == no ]]; }
for run in "$PWD"/case-*; do
  (
    logs=$run/logs attempt=4 chosen=(node1 node2 node3) suspects=() slurm_state=RUNNING preempted_at=
    source "$run/values"
    echo "case ${run##*/case-}"
    decide "$exit_code"
    echo "decision $decision"
    echo "cause $cause"
    echo "ended_by $outside"
    echo "kept $kept"
    echo "suspects ${suspects[*]}"
  )
done
"""


def made(random: Random) -> tuple[Settings, Facts, Ledger]:
    """One end of an attempt, and what was known before."""
    pick, chance = random.choice, lambda share: random.random() < share
    policy = pick(("requeue", "requeue", "chain", "none"))
    settings = Settings(
        "RUN",
        scheduler=pick(("slurm", "slurm", "local")),
        own_script=chance(0.5),
        requeue_policy=policy,
        must_save=policy != "none" and chance(0.3),
        preflight=pick(("", "yes")),
        breaker=pick((1, 2, 3, 4)),
    )
    ending = pick(("cancelled", "time limit", "preemption", "node failure", "requeued")) if chance(0.1) else ""
    marker = None
    if chance(0.5):
        reason = pick((TERMED, TERMED, TERMED, "stop file", "time limit", ""))
        signalled = (1, "node2") if reason == TERMED else None
        state = pick(("stopped", "stopped", "stopped", "done", "failed", "no progress", ""))
        cause = pick(("OSError: no space", "3 starts in a row crashed before step 1"))
        marker = Marker(state, reason, cause, signalled) if state else Marker()
    stop = pick(("stop file", "cancelled by the user", "time limit", "time limit", "preemption", "SIGTERM"))
    noted = pick((None, None, BOOM, KILLED, LOST))
    logged = None if noted in (BOOM, KILLED) else pick((None, BOOM, KILLED, *([LOST] if noted is None else [])))
    facts = Facts(
        attempt=4,
        exit_code=pick((0, 1, 1, 1, 137, 143)),
        job=Job(pick(("RUNNING", "RUNNING", "COMPLETING")), preempted=chance(0.2)),
        marker=marker,
        stop=stop if chance(0.3) else None,
        ending=ending,
        back=bool(ending) and chance(0.5),
        kept="nothing was saved" if ending and chance(0.5) else "",
        noted=noted,
        logged=logged,
        abandoned="the ranks did not restart within 45 s" if chance(0.2) else "",
        uncounted=pick((0, 0, 0, 1, 2, 3, 5)),
        saved=chance(0.5),
        chosen=NODES,
        lost=NODES[: random.randint(1, 2)] if chance(0.1) else (),
        refused=dict.fromkeys(random.sample(NODES, random.randint(1, 3)), SETUP) if chance(0.25) else {},
        unreached=(("node3", "Socket timed out"), ("node1", "Down"))[: random.randint(1, 2)] if chance(0.15) else (),
        killed_agents=("node2",) if chance(0.2) else (),
        signalled=random.randint(0, 3),
        stranger=Cause(FORGED, node="node1") if chance(0.15) else None,
    )
    step = pick((0, 10, 57, 57, 60))
    failures = tuple(sorted(ledgers.Failure(3, pick((0, 10, 57))) for _ in range(random.randint(0, 4))))
    # The brain also compares with failed starts, and job.sh only with those that reached a limit.
    most = max((failure.step for failure in failures), default=None)
    best = most if most is not None else pick((None, 10, 57))
    progress = pick((None, ledgers.Progress(step), ledgers.Progress(step, 100), ledgers.Progress(step, 100)))
    return settings, facts, Ledger(failures, progress, best, strangers=pick((0, 0, 9, 10)))


def words(cause: Cause | None) -> str:
    """RANK NODE TEXT."""
    return "" if cause is None else f"{'-' if cause.rank is None else cause.rank} {cause.node or '-'} {cause.text}"


def write(folder: Path, settings: Settings, facts: Facts, ledger: Ledger) -> None:
    """The same case, as files and variables of job.sh."""
    logs = folder / "logs"
    (logs / "preflight").mkdir(parents=True)
    (folder / "markers").mkdir()
    if facts.marker:
        record = {"restart": False, **facts.marker._replace(signalled=None)._asdict(), "attempt": 4}
        text = json.dumps(record, indent=1) if facts.marker.state else "{damaged"
        (folder / "markers/attempt-004.json").write_text(text)
    if facts.stop is not None:
        (folder / "stop").write_text("" if facts.stop == "stop file" else f"{facts.stop}\n")
    for node, said in facts.refused.items():
        (logs / "preflight" / f"{node}.failed").write_text(f"{said}\n")
    for number, node in enumerate(NODES):
        lines = ["step 1"]
        lines += ["W1 api.py:1] Received 15 death signal, shutting down"] if number < facts.signalled else []
        lines += [f"slurmddp: node {node}: {FORGED}"] if facts.stranger and node == facts.stranger.node else []
        (logs / f"{node}.log").write_text("\n".join(lines) + "\n")
    srun = [f"srun: error: Task launch for StepId=7.0 failed on node {node}: {said}" for node, said in facts.unreached]
    srun += [f"srun: error: {node}: task 1: Killed" for node in facts.killed_agents]
    (logs / "srun.err").write_text(
        "".join(f"{line}\n" for line in [*srun, "srun: error: node9: task 0: Killed"][: len(srun)])
    )
    for name, text in files(ledger).items():
        if text is not None:
            (folder / name).write_text(text)
    values: dict[str, Any] = {
        "scheduler": settings.scheduler,
        "own_script": "yes" if settings.own_script else "",
        "requeue_policy": settings.requeue_policy,
        "must_save": "yes" if settings.must_save else "",
        "preflight": settings.preflight,
        "breaker": settings.breaker,
        "exit_code": facts.exit_code,
        "ending": facts.ending,
        "back": "yes" if facts.back else "",
        "kept": facts.kept,
        "noted": words(facts.noted),
        "noted_cascade": "yes" if facts.noted == LOST else "",
        "logged": words(facts.logged),
        "abandoned": facts.abandoned,
        "uncounted": facts.uncounted,
        "slurm_says": facts.job.state,
        "slurm_preempted": "2026-01-01" if facts.job.preempted else "",
        "loses": " ".join(facts.lost),
        "saved": "yes" if facts.saved else "no",
        "strangers": ledger.strangers,
    }
    (folder / "values").write_text("".join(f"{name}={shlex.quote(str(value))}\n" for name, value in values.items()))


def files(ledger: Ledger) -> dict[str, str | None]:
    """What a ledger is on the disk; None: no such file."""
    failures = "".join(f"{line}\n" for line in ledgers.lines_to_add(Ledger(), ledger))
    progress = " ".join(str(number) for number in ledger.progress or () if number is not None)
    return {
        "failures": failures or None,
        "progress": f"{progress}\n" if ledger.progress else None,
        "best": None if ledger.best is None else f"{ledger.best}\n",
    }


def decided(folder: Path, settings: Settings, facts: Facts, ledger: Ledger) -> dict[str, Any]:
    """What the brain makes of it."""
    decision = decide(settings._replace(run=str(folder)), facts, ledger)
    return {
        "decision": decision.what,
        "cause": words(decision.cause),
        "ended_by": decision.ended_by,
        "kept": decision.not_requeued,
        "suspects": " ".join(decision.suspects),
        "exclude": [" ".join(pair) for pair in decision.exclude],
        "marker": decision.marker and list(decision.marker[:3]),
        **files(decision.ledger),
    }


def done(folder: Path, output: str, before: Facts) -> dict[str, Any]:
    """What bash made of it."""
    lines = [line.partition(" ")[::2] for line in output.splitlines()[1:]]
    found: dict[str, Any] = {"exclude": [text for key, text in lines if key == "exclude"]}
    found.update((key, text) for key, text in lines if key != "exclude")
    found["cause"] = found["cause"].replace("-  ", "- - ") if found["cause"] == "-  " else found["cause"]
    marker = folder / "markers/attempt-004.json"
    record = json.loads(marker.read_text()) if marker.exists() and "damaged" not in marker.read_text() else {}
    ours = record.get("state") == "no progress" and not (before.marker and before.marker.state == "no progress")
    found["marker"] = [record[key] for key in ("state", "reason", "cause")] if ours else None
    for name in ("failures", "progress", "best"):
        path = folder / name
        found[name] = path.read_text() if path.exists() else None
    return found


def test_the_brain_decides_as_job_sh(tmp_path: Path) -> None:
    random = Random(29)
    cases = [made(random) for _ in range(CASES)]
    for number, case in enumerate(cases):
        write(tmp_path / f"case-{number:03d}", *case)
    said = subprocess.run(
        ["bash", "-c", BASH, "bash", str(tmp_path), str(SHELL)], capture_output=True, text=True, check=True
    )
    assert said.stderr == ""
    outputs = [f"case {text}" for text in said.stdout.split("case ")[1:]]
    assert len(outputs) == CASES
    seen = set()
    for number, (case, output) in enumerate(zip(cases, outputs, strict=True)):
        folder = tmp_path / f"case-{number:03d}"
        brain, bash = decided(folder, *case), done(folder, output, case[1])
        assert brain == bash, (number, case)
        seen.add((brain["decision"], bool(brain["marker"]), bool(brain["exclude"]), bool(brain["suspects"])))
    assert {name for name, *_ in seen} == {"done", "stopped", "failed", "cancelled", "requeue", "next"}
    assert all(any(found[index] for found in seen) for index in (1, 2, 3)), list(itertools.islice(seen, 9))
