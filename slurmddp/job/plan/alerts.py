"""Alert targets, the kinds that they receive, and the host that sends; the watchdog job; Slurm's own mail."""

from typing import Literal

from slurmddp.errors import UserError
from slurmddp.job.plan.model import AlertsPlan, AlertTarget, Context, Note
from slurmddp.job.plan.program import absolute
from slurmddp.job.resolve import Resolved
from slurmddp.job.types import slurm_time

#: What Slurm sends mail of (sbatch(1), --mail-type), by our words; of the others it knows nothing.
_MAIL_TYPES = {"started": "BEGIN", "requeued": "REQUEUE", "stopping": "TIME_LIMIT", "failed": "FAIL", "finished": "END"}


def plan_alerts(resolved: Resolved, context: Context) -> tuple[AlertsPlan | None, list[Note]]:
    """None where nobody is to be told. Raises UserError for two targets of one name."""
    targets, notes = [], []
    names: dict[str, int] = {}
    for index, target in enumerate(resolved.job.alerts):
        if target.to == "mail":
            continue
        if target.called in names:
            raise UserError(
                f"alerts has two targets called {target.called}",
                where=resolved.location("alerts", str(index)),
                todo="name one of them: {to: ..., name: NAME}. slurmddp reads its address from a file of that name",
            )
        names[target.called] = index
        file = absolute(target.url_file, context.cwd) if target.url_file else None
        targets.append(AlertTarget(target.called, target.to, target.on, target.insecure, target.url_env, file))
    if not targets:
        return None, []
    leave = _leave(resolved)
    if leave == "login" and resolved.site.queues:
        text = "nodes of this site cannot send alerts: `slurmddp alert watch`, or the next command, sends them"
        notes.append(Note("note", text))
    return AlertsPlan(tuple(targets), leave), notes


def plan_mail(resolved: Resolved) -> tuple[str, ...]:
    """sbatch options for the target that is mail. Raises UserError where there are several, or none would ever come."""
    mails = [(index, target) for index, target in enumerate(resolved.job.alerts) if target.to == "mail"]
    if not mails or not resolved.site.queues:
        return ()
    if len(mails) > 1:
        raise UserError(
            "alerts has two mail targets, but Slurm keeps only one list of addresses per job",
            where=resolved.location("alerts", str(mails[1][0])),
            todo="use one target, with commas between the addresses",
        )
    index, target = mails[0]
    if "--mail-type" in resolved.site.unsupported_flags:
        raise UserError(
            f"site {resolved.site.name} rejects jobs with --mail-type",
            where=resolved.location("alerts", str(index)),
            todo="remove the mail target",
        )
    types = [_MAIL_TYPES[kind] for kind in target.on if kind in _MAIL_TYPES]
    if not types:
        raise UserError(
            f"Slurm cannot send mail for {', '.join(target.on) or 'no event'}",
            where=resolved.location("alerts", str(index), "on"),
            todo=f"set on to some of {', '.join(_MAIL_TYPES)}, or remove this target",
        )
    user = [f"--mail-user={target.address}"] if target.address else []
    return (f"--mail-type={','.join(dict.fromkeys(types))}", *user)


def plan_watchdog(resolved: Resolved, context: Context) -> tuple[str, ...] | None:
    """None where the site has none, or nobody would be told."""
    settings = resolved.site.watchdog
    tells = any(target.to != "mail" and "failed" in target.on for target in resolved.job.alerts)
    if settings is None or not tells or context.inside or not resolved.site.queues:
        return None
    account = settings.account or resolved.job.resources.account
    options = [
        ("--job-name", f"{resolved.job.name}-watchdog"),
        ("--partition", settings.partition),
        ("--time", slurm_time(settings.time)),
        ("--account", account),
        ("--nodes", "1"),
        ("--ntasks", "1"),
    ]
    named = {extra.split("=")[0] for extra in settings.sbatch} | set(resolved.site.unsupported_flags)
    lines = [f"{flag}={value}" for flag, value in options if value is not None and flag not in named]
    return (*lines, *settings.sbatch)


def _leave(resolved: Resolved) -> Literal["node", "proxy", "login"]:
    """Return the host that sends: the profile's, else a node, unless nodes are known to have no internet."""
    site = resolved.site
    return site.alerts.from_ or ("login" if site.internet_on_nodes is False else "node")
