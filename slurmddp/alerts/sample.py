"""`slurmddp alert test`: the job's own sender, with a run folder made up for it, to its real targets."""

import shutil
import tempfile
import time
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import NamedTuple

from slurmddp.alerts import secrets
from slurmddp.errors import UserError
from slurmddp.job.alerts import KINDS
from slurmddp.job.plan.model import AlertsPlan, Plan
from slurmddp.records.alert import Alert
from slurmddp.render.scripts import alert_files
from slurmddp.run.layout import RunFolder
from slurmddp.supervisor.deliver import Sender, from_environment
from slurmddp.supervisor.post import ARRIVED, WAITS, Sent

#: Seconds for one kind of message, to all targets: as for the last one of a job.
_BUDGET = 20
_CAUSE = "a test by `slurmddp alert test`: nothing happened (rank 0 on node1)"
_LOG = "This is a test of the alerts of slurmddp.\nThe last lines of the log go here: <b> & @everyone `code` *stars*\n"


class Sample(NamedTuple):
    """What became of one message. arrived: None if the target does not ask for this kind."""

    kind: str
    target: str
    arrived: bool | None
    text: str

    def __str__(self) -> str:
        return f"{self.kind:<10} {self.target:<16} {self.text}"


def send_samples(plan: Plan, environment: MutableMapping[str, str]) -> list[Sample]:
    """Send each kind that a target asks for. Raises UserError if there is no target, or an address is missing."""
    if plan.alerts is None:
        todo = "add `alerts: [{to: slack}]` to the job file (Slurm sends mail, so this command cannot test it)"
        raise UserError("the job has no alert targets", where="alerts", todo=todo)
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
        return [row for kind in KINDS for row in _rows(alerts, kind, _send(folder, kind, environment))]
    finally:
        secrets.forget(folder.id, environment)
        shutil.rmtree(root, ignore_errors=True)


def _make_up(folder: RunFolder) -> None:
    logs = folder.attempt_logs(0)
    logs.mkdir(parents=True)
    (logs / "node1.log").write_text(_LOG, encoding="utf-8")
    (folder.path / "progress").write_text("120 1000\n", encoding="utf-8")


def _send(folder: RunFolder, kind: str, environment: MutableMapping[str, str]) -> dict[str, Sent]:
    """Send one kind: what became of it, by target. Others did not ask for it."""
    settings = from_environment(str(folder.path), environment)
    alert = Alert(
        kind, "TEST", _CAUSE, "nothing: this is a test", 0, "node1", job_id="0", attempt=0, time=int(time.time())
    )
    return {outcome.target: outcome.sent for outcome in Sender(settings, says=lambda text: None).send(alert, _BUDGET)}


def _rows(alerts: AlertsPlan, kind: str, outcomes: dict[str, Sent]) -> Iterator[Sample]:
    for target in alerts.targets:
        if kind not in target.on:
            yield Sample(kind, target.name, None, "skipped (not in `on`)")
            continue
        sent = outcomes.get(target.name, Sent(WAITS, why="no answer in time"))
        if not sent.tries:
            yield Sample(kind, target.name, False, f"not sent: {sent.why}")
            continue
        arrived = sent.outcome == ARRIVED
        status = f"status {sent.status}" if sent.status != "000" else "no answer"
        reason = f" ({sent.error})" if sent.error and not arrived else ""
        tries = f", {sent.tries} tries" if sent.tries > 1 else ""
        text = f"{'arrived' if arrived else 'FAILED '}  {status}{reason}, {sent.seconds:g} s{tries}"
        yield Sample(kind, target.name, arrived, text)
