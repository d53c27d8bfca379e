"""`status --prometheus`: a run as text for the textfile collector of Prometheus's node_exporter."""

from __future__ import annotations

from slurmddp.report.status import RunStatus
from slurmddp.run.index import entry_of
from slurmddp.run.ledger import Ledger

#: Name -> type and help, of which each scrape must show the same.
METRICS = {
    "slurmddp_going": ("gauge", "1 while the run is pending or running, else 0"),
    "slurmddp_step": ("gauge", "Newest optimizer step"),
    "slurmddp_steps": ("gauge", "Optimizer steps asked for"),
    "slurmddp_loss": ("gauge", "Loss of the newest metrics line"),
    "slurmddp_samples_per_second": ("gauge", "Samples per second of all ranks, while the run is going"),
    "slurmddp_goodput_ratio": ("gauge", "Share of the time since the submission that was training"),
    "slurmddp_restarts_total": ("counter", "Starts of the ranks after the first"),
    "slurmddp_metrics_timestamp_seconds": ("gauge", "Unix time of the newest metrics line"),
}


def prometheus_text(found: RunStatus, ledger: Ledger | None) -> str:
    """Return the metrics that are known, in Prometheus's text exposition format."""
    progress, going = found.progress, found.state.going
    values = {
        "slurmddp_going": int(going),
        "slurmddp_step": progress.step,
        "slurmddp_steps": progress.steps,
        "slurmddp_loss": progress.loss,
        "slurmddp_samples_per_second": progress.speed.get("samples") if going else None,
        "slurmddp_goodput_ratio": ledger and ledger.goodput,
        "slurmddp_restarts_total": max(ledger.rank_starts - 1, 0) if ledger else 0,
        "slurmddp_metrics_timestamp_seconds": found.metrics.time if found.metrics else None,
    }
    entry = entry_of(found.folder)
    names = {"run": found.folder.id, "site": entry.site if entry else "", "job_id": found.job_id}
    labels = ",".join(f'{name}="{_escaped(text)}"' for name, text in names.items())
    lines = []
    for name, (kind, meaning) in METRICS.items():
        if (value := values[name]) is not None:
            lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", f"{name}{{{labels}}} {value!r}"]
    return "".join(line + "\n" for line in lines)


def _escaped(text: str) -> str:
    """Return a label's value as the format wants it; what is no UTF-8 becomes question marks."""
    text = text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
    return text.encode("utf-8", errors="replace").decode()
