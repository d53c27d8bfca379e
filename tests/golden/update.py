"""`python -m tests.golden.update`: writes the scripts of all sites anew, and removes those of sites that are gone."""

from __future__ import annotations

from pathlib import Path

from slurmddp.assets import asset_folder
from slurmddp.plan.build import make_plan
from slurmddp.plan.model import Context
from slurmddp.render.scripts import job_script, node_script
from slurmddp.sites.catalogue import Catalogue
from slurmddp.spec.resolve import Sources, resolve

HERE = Path(__file__).resolve().parent
SITES = sorted(path.stem for path in asset_folder("site_configs").glob("*.yaml"))

#: What only a user knows; a variable of a profile that is not here stays as written.
ENVIRONMENT = {"HOME": "/home/alice", "USER": "alice"}
CONTEXT = Context("/home/alice/project", "/usr/bin/python3")

KINDS = {
    "lm": [
        ("name", "gpt-books"),
        ("train.task", "lm"),
        ("train.data", {"path": "/data/books", "context": 1024}),
        ("train.batch", {"global": 512, "micro": 16}),
        ("network.debug", "true"),
    ],
    "script": [
        ("name", "own"),
        ("train.script", "src/train.py"),
        ("train.args", ["--lr", "3e-4", "--text", "it's $HOME"]),
        ("environment", {"WANDB_MODE": "offline"}),
        ("setup", ["module load tools"]),
    ],
}


def scripts(site: str, kind: str) -> dict[str, str]:
    """Name -> text of one job's scripts."""
    catalogue = Catalogue(ENVIRONMENT)
    profile, layer = catalogue.load(site)
    options = [("site", site), *KINDS[kind]]
    if profile.scheduler == "local":
        options.append(("resources.ranks_per_node", "2"))
    else:
        options += [("resources.nodes", "2"), ("resources.time", "1h")]
    options += [("resources.account", "my_project")] if "resources.account" in profile.required else []
    if profile.scheduler == "slurm" and not profile.partitions:
        options += [("resources.partition", "gpu"), ("resources.gpus_per_node", "4"), ("resources.cpus_per_node", "32")]
    container = layer.tree.get("container", {})
    if container.get("runtime") != "none" and "image" not in container:
        options.append(("container.image", "/images/torch.sif"))
    sources = Sources(None, [(key, value, f"--set {key}") for key, value in options], ENVIRONMENT, [])
    resolved = resolve(sources, catalogue.load, lambda: None, strict=False)
    plan = make_plan(resolved, CONTEXT)._replace(version="0.0.0")
    return {"job.sh": job_script(plan), "node.sh": node_script(plan)}


def expected() -> dict[Path, str]:
    """Path -> text of every golden file."""
    return {
        HERE / site / f"{kind}-{name}": text
        for site in SITES
        for kind in KINDS
        for name, text in scripts(site, kind).items()
    }


def present() -> set[Path]:
    """The golden files that are there."""
    return set(HERE.glob("*/*.sh"))


def main() -> None:
    files = expected()
    for path in present() - set(files):
        path.unlink()
    for path, text in files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(f"{len(files)} files in {HERE}")


if __name__ == "__main__":
    main()
