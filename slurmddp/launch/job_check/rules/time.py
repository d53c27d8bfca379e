"""Time to save, and alerts that arrive."""

from __future__ import annotations

from collections.abc import Iterator

from slurmddp.job.plan.recovery import BESIDE_THE_SAVE
from slurmddp.launch.job_check.rule import Hit, Subject, rule


@rule(
    "stop-lead",
    "warning",
    reason="Slurm signals the job `timeouts.stop` seconds before its time limit. If a save takes longer, it is lost.",
    source="https://slurm.schedmd.com/sbatch.html#OPT_signal",
)
def stop_lead(subject: Subject) -> Iterator[Hit]:
    prepared = subject.prepared
    lead, save, beside = prepared.plan.stop_lead, prepared.resumed.longest_save, BESIDE_THE_SAVE
    if lead and save and lead < save + beside:
        text = f"ranks get {lead} s before the time limit, and the longest save of the resumed runs took {save:.0f} s"
        yield Hit(subject.where("timeouts.stop"), text, f"set timeouts.stop to {2 * save + beside:.0f} or more")


@rule(
    "alert-address",
    "warning",
    reason="An alert to a host that does not resolve is never delivered.",
    source="docs/alerts.md",
    fix="correct the address, and try it: slurmddp alert test JOB.yaml",
)
def alert_address(subject: Subject) -> Iterator[Hit]:
    import socket
    from urllib.parse import urlsplit

    plan = subject.prepared.plan
    for index, target in enumerate(plan.alerts.targets if plan.alerts else ()):
        url = subject.environment.get(target.url_env or "")
        host = urlsplit(url).hostname if url else None
        if host is None or (plan.alerts and plan.alerts.leave == "proxy"):
            continue  # `submit` tells where the address is missing
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            message = f"the host of alert target {target.name} does not resolve on this machine: {error.strerror}"
            yield Hit(subject.where(f"alerts.{index}"), message)
