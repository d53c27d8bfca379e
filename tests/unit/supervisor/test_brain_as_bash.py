"""The brain decides as slurmddp/shell/decide.sh does: generated ends of attempts, given to both."""

from __future__ import annotations

import itertools
import json
import shlex
import subprocess
from pathlib import Path
from random import Random
from typing import Any

from slurmddp.records.cause import Cause
from slurmddp.supervisor.brain import ledger as ledgers
from slurmddp.supervisor.brain.decide import decide
from slurmddp.supervisor.brain.types import Facts, Ledger, Settings
from tests.helpers import SHELL
from tests.unit.supervisor.ends import FORGED, LOST, NODES, made

CASES = 160

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


def words(cause: Cause | None) -> str:
    """RANK NODE TEXT."""
    return "" if cause is None else f"{'-' if cause.rank is None else cause.rank} {cause.node or '-'} {cause.text}"


def write(folder: Path, settings: Settings, facts: Facts, ledger: Ledger) -> None:
    """The same case, as files and variables of job.sh."""
    logs = folder / "logs"
    (logs / "preflight").mkdir(parents=True)
    (folder / "markers").mkdir()
    if facts.marker:
        record = {**facts.marker._replace(signal=None).write(), "attempt": 4}
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
    for name, content in files(ledger).items():
        if content is not None:
            (folder / name).write_text(content)
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
