"""docs/sites.md: the table of the shipped profiles is made from them.

`SLURMDDP_UPDATE_GOLDEN=1 pytest tests/unit/docs/test_sites_page.py` writes it anew.
"""

import os
from pathlib import Path

from slurmddp.assets import asset_folder
from slurmddp.job.site import Site
from slurmddp.sites.catalogue import Catalogue

PAGE = Path(__file__).parents[3] / "docs" / "sites.md"
BEGIN, END = "<!-- profiles: made by tests/unit/docs/test_sites_page.py -->\n", "<!-- end of profiles -->\n"
HEAD = """\
| Profile | Site | Level | GPUs | Scheduler | Runtime | Network | Unverified values |
|---|---|---|---|---|---|---|---|
"""
REQUESTS = {"gres": "`--gres`", "gpus-per-node": "`--gpus-per-node`", "none": "no request for GPUs"}


def row(site: Site) -> str:
    runtime = site.job.get("container", {}).get("runtime", "your choice")
    setup = [*site.job.get("setup", []), *(line for entry in site.when.values() for line in entry.job.get("setup", []))]
    if any("module load" in line and ("tainer" in line or "singularity" in line) for line in setup):
        runtime += " (module)"
    unverified = [key for key, fact in site.facts.items() if not fact.verified]
    cells = (f"`{site.name}`", site.title, site.level, site.gpu or "", features(site), runtime, site.fabric or "")
    return f"| {' | '.join(cells)} | {len(unverified) or ''} |\n"


def features(site: Site) -> str:
    """What its Slurm wants."""
    if not site.queues:
        return "no Slurm"
    found = [REQUESTS[site.gpu_request] + (" by type" if site.gpu_request_type else "")]
    if any(partition.ask is not None for partition in site.partitions.values()):
        found.append("nodes by constraint, QOS or type")
    found += [f"{key.rpartition('.')[2]} required" for key in site.required]
    if any(partition.account for partition in site.partitions.values()):
        found.append("accounts by kind of node")
    if any(entry.max_time or entry.max_nodes for entry in site.when.values()):
        found.append("limits by job")
    if site.unsupported_flags:
        found.append(f"rejects {', '.join(f'`{flag}`' for flag in site.unsupported_flags)}")
    if site.requeue == "chain":
        found.append("no requeue")
    if site.internet_on_nodes is False:
        found.append("no internet on nodes")
    return ", ".join(found)


def table() -> str:
    catalogue = Catalogue({"HOME": "/nowhere"})
    names = sorted(path.stem for path in asset_folder("site_configs").glob("*.yaml"))
    return HEAD + "".join(row(catalogue.load(name)[0]) for name in names)


def test_the_table_shows_every_profile() -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    made = f"{before}{BEGIN}\n{table()}\n{END}{after}"
    if os.environ.get("SLURMDDP_UPDATE_GOLDEN"):
        PAGE.write_text(made, encoding="utf-8")
    else:
        assert page == made, "SLURMDDP_UPDATE_GOLDEN=1 pytest tests/unit/docs/test_sites_page.py"
