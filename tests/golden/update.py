"""`python -m tests.golden.update`: writes all golden files anew, and removes those of kinds and sites that are gone."""

import difflib
import re
import sys
from pathlib import Path
from typing import Any

from slurmddp.assets import asset_folder
from slurmddp.job.plan.build import make_plan
from slurmddp.job.plan.model import Context, Plan
from slurmddp.render.plain import plain_script
from slurmddp.render.scripts import alert_files, job_script, node_script
from slurmddp.sites.catalogue import Catalogue
from slurmddp.job.document import Document
from slurmddp.job.resolve import Request, resolve
from slurmddp.job.site import Partition, Site

HERE = Path(__file__).resolve().parent
SITES = sorted(path.stem for path in asset_folder("site_configs").glob("*.yaml"))

#: What only a user knows; a variable of a profile that is not here stays as written.
ENVIRONMENT = {"HOME": "/home/alice", "USER": "alice"}
CONTEXT = Context("/home/alice/project", "/usr/bin/python3")
#: A site's runtime gives every variable another name: that alone is no difference worth a line, nor is the site's name.
_PREFIX = re.compile(r"^export (APPTAINERENV_|SINGULARITYENV_)", re.MULTILINE)

LM: dict[str, Any] = {
    "name": "gpt-books",
    "train.task": "lm",
    "train.data": {"path": "/data/books", "context": 1024},
    "train.batch": {"global": 512, "micro": 16},
}
TWO_NODES: dict[str, Any] = {"resources.nodes": "2", "resources.time": "1h"}

#: One full set of scripts per kind of job: its site, and its options. Every branch of the templates is in one of them.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "simple": ("generic", LM | TWO_NODES),
    "script": (
        "leonardo",
        TWO_NODES
        | {
            "name": "own",
            "train.script": "src/train.py",
            "train.args": ["--lr", "3e-4", "--text", "it's $HOME"],
            "launch.wrap": ["strace", "--output={run}/logs/it's $RANK {rank}"],
            "environment": {"WANDB_MODE": "offline", "PYTHONPATH": "/own lib"},
            "environment_from": ["WANDB_API_KEY"],
            "setup": ["module load tools"],
        },
    ),
    "one": ("generic", LM | {"resources.time": "1h", "recovery.preflight": "false", "network.debug": "true"}),
    "alerts": (
        "testcluster",
        LM
        | TWO_NODES
        | {
            "alerts": [
                {"to": "slack", "url_env": "HOOK"},
                {"to": "discord", "insecure": True},
                {"to": "teams"},
                {"to": "ntfy", "name": "phone", "on": ["started", "failed"]},
                {"to": "json", "url_file": "~/hook", "on": ["failed"]},
            ],
            "environment_from": ["TOKEN"],
        },
    ),
    "elastic": (
        "generic",
        LM
        | {
            "resources.nodes": {"min": 2, "max": 4, "spares": 1},
            "resources.time": "1h",
            "network.interface": "=ib0",
            "launch.rendezvous": "static",
        },
    ),
    "chain": ("generic", LM | TWO_NODES),
    "no-requeue": ("generic", LM | TWO_NODES | {"recovery.requeue": "never", "container.runtime": "singularity"}),
    "auto": ("generic", LM | TWO_NODES | {"resources.ranks_per_node": "auto"}),
    "contained": ("lumi", LM | TWO_NODES | {"container.options": ["--containall"], "paths.cache": "/scratch/cache"}),
    "local": (
        "local",
        {
            "name": "own",
            "train.script": "train.py",
            "snapshot": "false",
            "resources.ranks_per_node": "2",
            "setup": ["source env/bin/activate"],
        },
    ),
    "local-lm": (
        "local",
        LM | {"launch.wrap": ["perf", "stat"], "resources.ranks_per_node": "2", "environment": {"PYTHONPATH": "/own"}},
    ),
}

#: Of `submit --plain`.
PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "plain-image": (
        "leonardo",
        TWO_NODES
        | {
            "name": "own",
            "snapshot": "false",
            "train.script": "src/train.py",
            "train.project": ".",
            "train.args": ["--lr", "3e-4", "--text", "it's $HOME"],
            "environment": {"WANDB_MODE": "offline", "PYTHONPATH": "/own lib"},
            "environment_from": ["WANDB_API_KEY"],
        },
    ),
    "plain-conda": (
        "generic",
        TWO_NODES
        | {
            "name": "own",
            "snapshot": "false",
            "train.module": "pkg.train",
            "resources.nodes": "2-4",
            "container.runtime": "none",
            "setup": ["module load cuda", "conda activate gpt"],
        },
    ),
}


def needed(profile: Site) -> dict[str, Any]:
    """What the job has to say because the site requires it, or the profile does not know it."""
    own = {"account": "my_project", "gpu_type": "a100", "time": "1h"}
    options = {key: own[key.rpartition(".")[2]] for key in profile.required if key.rpartition(".")[2] in own}
    if "container.runtime" in profile.required:
        options["container.runtime"] = "none"
    if profile.name == "generic":
        options["resources.partition"] = "gpu"
    resources = profile.job.get("resources", {})
    partition = profile.partitions.get(resources.get("partition", ""), Partition.model_construct())
    if partition.gpus_per_node is None:
        options["resources.gpus_per_node"] = "4"
    if partition.cpus_per_node is None:
        options["resources.cpus_per_node"] = "32"
    return options


def plan_of(site: str, kind: str) -> Plan:
    """The plan of one kind of job on a site."""
    catalogue = Catalogue(ENVIRONMENT)

    def load(name: str) -> tuple[Site, Document]:
        profile, layer = catalogue.load(name)
        return profile.model_copy(update={"requeue": "chain"} if kind == "chain" else {}), layer

    profile, layer = load(site)
    options = {"site": site, **(KINDS | PLAIN)[kind][1]}
    if not profile.queues:
        options |= {"resources.ranks_per_node": "2"}
        options = {key: value for key, value in options.items() if key not in TWO_NODES}
    if profile.queues:
        options |= needed(profile)
    container = layer.tree.get("container", {})
    runtime = options.get("container.runtime") or container.get("runtime")
    if runtime != "none" and "image" not in container:
        options["container.image"] = f"/images/torch.{'sqsh' if runtime == 'pyxis' else 'sif'}"
    sets = [(key, value, f"--set {key}") for key, value in options.items()]
    resolved = resolve(Request(options=sets, environment=ENVIRONMENT), [], load, lambda: None, strict=False)
    earlier = ("/runs/own-1/checkpoints", "/runs/own-0/checkpoints") if kind == "script" else ()
    return make_plan(resolved, CONTEXT._replace(resume_from=earlier))._replace(version="0.0.0")


def scripts(site: str, kind: str) -> dict[str, str]:
    """Name -> text of the scripts of one kind of job on a site."""
    plan = plan_of(site, kind)
    payloads = {f"{name.replace('/', '-')}.txt": text for name, text in alert_files(plan).items()}
    own_python = getattr(sys, "_base_executable", sys.executable)
    scripts = {"job.sh": job_script(plan), "node.sh": node_script(plan)}
    return {**{name: text.replace(own_python, "/opt/bin/python3") for name, text in scripts.items()}, **payloads}


def plain(site: str, kind: str) -> str:
    """The script of `submit --plain`."""
    plan = plan_of(site, kind)
    return plain_script(plan, f"{plan.job.name}.sbatch")


def difference(site: str) -> str:
    """What the simple job's scripts are on a site, as a difference to those of the kind, without context."""
    common = scripts(KINDS["simple"][0], "simple")
    lines: list[str] = []
    for name, text in scripts(site, "simple").items():
        text = text.replace(f", site {site}. Made by", f", site {KINDS['simple'][0]}. Made by", 1)
        before, after = (_PREFIX.sub("export ", each).splitlines() for each in (common[name], text))
        changes = list(difflib.unified_diff(before, after, n=0, lineterm=""))
        lines += [f"=== {name}", *changes[2:]] if changes else []
    return "".join(f"{line}\n" for line in lines)


def expected() -> dict[Path, str]:
    """Path -> text of every golden file."""
    files = {
        HERE / "kinds" / f"{kind}-{name}": text
        for kind, (site, _) in KINDS.items()
        for name, text in scripts(site, kind).items()
    }
    files |= {HERE / "kinds" / f"{kind}.sh": plain(site, kind) for kind, (site, _) in PLAIN.items()}
    return files | {HERE / "sites" / f"{site}.diff": difference(site) for site in SITES if site != KINDS["simple"][0]}


def present() -> set[Path]:
    """The golden files that are there."""
    return {*HERE.glob("*/*.sh"), *HERE.glob("*/*.txt"), *HERE.glob("*/*.diff")}


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
