"""The last alert of a job that cannot start its supervisor: job.sh sends it with curl, from what is prepared here."""

from __future__ import annotations

from collections.abc import Mapping

from slurmddp.job.plan.model import AlertsPlan
from slurmddp.records.alert import Alert
from slurmddp.supervisor import post
from slurmddp.supervisor.compose import compose

#: The first part of the names of these files, beside the addresses; job.sh looks for it.
PREFIX = ".last."
#: Where job.sh puts the time.
NOW = "@now@"


def last_alerts(alerts: AlertsPlan, payloads: Mapping[str, str], run_id: str, folder: str) -> dict[str, str]:
    """Return, for each target that hears of failures from the nodes, curl's configuration without the address.

    payloads: by the target's name.
    """
    configs = {}
    cause = f"job.sh could not start the supervisor on its node: see {folder}/logs/job.log"
    alert = Alert("failed", "failed", cause, "not restarted automatically", run=run_id, folder=folder)
    for target in alerts.targets:
        composed = compose(target.name, payloads[target.name], alert._replace(time=NOW))  # type: ignore[arg-type]
        if composed is not None and composed.leave != "login":
            proto = ("proto", "=http,https" if target.insecure else "=https")
            configs[target.name] = post.config(proto, *post.request(composed.message, composed.proxy)).decode()
    return configs
