"""`slurmddp alert test`: the job's own alert.sh, with a run folder made up for it, to its real targets."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import MutableMapping
from pathlib import Path
from typing import NamedTuple

from slurmddp.alerts import secrets
from slurmddp.errors import UserError
from slurmddp.plan.model import AlertsPlan, Plan
from slurmddp.render.scripts import alert_files
from slurmddp.runs.layout import RunFolder
from slurmddp.slurm.base import clean_environment
from slurmddp.spec.alerts import KINDS

#: Seconds for one kind of message, to all targets: as for the last one of a job.
_BUDGET = 20
_CAUSE = "a test by `slurmddp alert test`: nothing happened (rank 0 on node1)"
_LOG = "This is a test of the alerts of slurmddp.\nThe last lines of the log go here: <b> & @everyone `code` *stars*\n"


#: What alert.sh says on stderr of a message that it could not send: target and reason.
_COMPLAINT = re.compile(r": target (\S+): (.*); kept in ")


class Results(NamedTuple):
    """A line for each message, and whether every one was taken."""

    lines: tuple[str, ...]
    all_arrived: bool


class _Answer(NamedTuple):
    """The last of the tries to send one message. status: of HTTP, 000 without an answer; tries: 0 if none was made;
    why: what alert.sh said of a failure."""

    status: str = "000"
    seconds: str = "0"
    tries: int = 0
    why: str = ""


def send_samples(plan: Plan, environment: MutableMapping[str, str]) -> Results:
    """Send each kind that a target asks for. Raises UserError if there is no target, or an address is missing."""
    if plan.alerts is None:
        raise UserError(
            "the job has no alert targets",
            where="alerts",
            todo="add `alerts: [{to: slack}]` to the job file (Slurm sends mail, so this command cannot test it)",
        )
    if shutil.which("curl", path=environment.get("PATH")) is None:
        raise UserError("curl is not installed on this machine, and alerts need it", todo="try a login node")
    addresses = secrets.take(plan.alerts.targets, environment)
    # From here, whatever the nodes may do: the login node is where messages leave that they cannot send.
    alerts = plan.alerts._replace(leave="node") if plan.alerts.leave == "login" else plan.alerts
    root = Path(tempfile.mkdtemp(prefix="alert-test-"))
    folder = RunFolder(root)
    try:
        for name, text in alert_files(plan._replace(alerts=alerts)).items():
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_text(text, encoding="utf-8")
        secrets.keep(folder, addresses, environment)
        _make_up(folder)
        lines, arrived = [], True
        for kind in KINDS:
            found = _send(folder, kind, environment)
            for line, good in _rows(alerts, kind, found):
                lines.append(line)
                arrived = arrived and good
        return Results(tuple(lines), arrived)
    finally:
        secrets.forget(folder.id, environment)
        shutil.rmtree(root, ignore_errors=True)


def _make_up(folder: RunFolder) -> None:
    logs = folder.attempt_logs(0)
    logs.mkdir(parents=True)
    (logs / "node1.log").write_text(_LOG, encoding="utf-8")
    (folder.path / "progress").write_text("120 1000\n", encoding="utf-8")


def _send(folder: RunFolder, kind: str, environment: MutableMapping[str, str]) -> dict[str, _Answer]:
    """Run alert.sh once: the answer by target. One that arrived or failed has one, others were not asked for."""
    import subprocess

    report = folder.path / "report"
    report.unlink(missing_ok=True)
    variables = {
        **clean_environment(environment),
        "SLURMDDP_ALERT_BUDGET": str(_BUDGET),
        "SLURMDDP_ALERT_REPORT": str(report),
        "SLURMDDP_JOB_ID": "0",
    }
    words = ("bash", str(folder.path / "alert.sh"), kind, "TEST", _CAUSE, "nothing: this is a test", "0", "node1")
    done = subprocess.run(
        words, env=variables, stdin=subprocess.DEVNULL, capture_output=True, timeout=_BUDGET + 30, check=False
    )
    found: dict[str, _Answer] = {}
    for line in report.read_text(encoding="utf-8").splitlines() if report.exists() else ():
        name, _, status, seconds = line.split(" ")
        found[name] = _Answer(status, seconds, found.get(name, _Answer()).tries + 1)
    for name, why in _COMPLAINT.findall(done.stderr.decode("utf-8", errors="replace")):
        found[name] = found.get(name, _Answer())._replace(why=why.replace(" )", ")"))
    return found


def _rows(alerts: AlertsPlan, kind: str, found: dict[str, _Answer]) -> list[tuple[str, bool]]:
    rows = []
    for target in alerts.targets:
        head = f"{kind:<10} {target.name:<16}"
        if kind not in target.on:
            rows.append((f"{head} skipped (not in `on`)", True))
            continue
        answer = found.get(target.name, _Answer())
        if not answer.tries:
            rows.append((f"{head} not sent{answer.why and ': '}{answer.why}", False))
            continue
        good = answer.status.startswith("2")
        said = f"status {answer.status}" if answer.status != "000" else "no answer"
        # What curl said stands in parentheses behind the status.
        reason = "" if good or "(" not in answer.why else f" {answer.why[answer.why.index('(') :]}"
        tries = f", {answer.tries} tries" if answer.tries > 1 else ""
        rows.append((f"{head} {'arrived' if good else 'FAILED '}  {said}{reason}, {answer.seconds} s{tries}", good))
    return rows
