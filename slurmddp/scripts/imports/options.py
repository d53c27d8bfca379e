"""#SBATCH lines as keys of the job file."""

from __future__ import annotations

import math
import re

from slurmddp.cluster.duration import limit_of
from slurmddp.job.types import SBATCH, memory, slurm_time
from slurmddp.scripts.check.directives import EXPORTED, REMOVED, SRUN_ONLY, Directive, exported
from slurmddp.scripts.imports.imported import Imported
from slurmddp.scripts.imports.reader import option_text
from slurmddp.scripts.sandbox.evaluate import number

_SAME = ("account", "partition", "qos", "constraint")
#: What `carry_options` reads all together, and what the recorded launch has: its folder.
_ELSEWHERE = {"ntasks", "ntasks-per-node", "gpus", "gpus-per-node", "gpus-per-task", "cpus-per-task", "cpus-per-gpu",
              "mem", "mem-per-cpu", "mem-per-gpu", "chdir"}  # fmt: skip
_OWN = {
    **dict.fromkeys(("output", "error"), "logs are in the run folder: slurmddp logs"),
    "open-mode": "logs are never overwritten",
    "input": "no key for the standard input of the ranks",
    "array": "submit once per task, for example in a loop: slurmddp submit job.yaml --name NAME -- ARGS",
    "no-kill": "resources.nodes: 2-4 lets a run continue without a lost node",
    "wait": "slurmddp status shows the state",
    "wrap": "the job file names the program",
    "test-only": "slurmddp check asks Slurm",
}
#: What slurmddp does in its own way; the ranks do the same.
_HARMLESS = {"output", "error", "open-mode", "wait"}
_MIB = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}


def carry_options(job: Imported) -> None:
    """Carry over each #SBATCH option, or leave it with a reason."""
    script, asked = job.script, job.script.job
    last = {each.name: each for each in script.directives}
    for each in script.directives:
        if last[each.name] is each or not each.name:
            _carry(job, each)
    if asked.nodes and "nodes" not in last:
        job.set("resources.nodes", asked.nodes)
    if asked.gpus_per_node:
        job.set("resources.gpus_per_node", asked.gpus_per_node)
    for name in ("gpus-per-node", "gpus", "gres", "gpus-per-task", "nodes", "ntasks"):
        value, counts_nodes = script.option(name), name in ("nodes", "ntasks")
        kind = re.search(r"(?:^|gpu:)([A-Za-z][\w.-]*)(?::\d+|$)", value or "")
        if kind and kind[1] != "gpu" and not counts_nodes:
            job.set("resources.gpu_type", kind[1])
        if value is not None and (asked.unread if counts_nodes else asked.gpus_per_node is None):
            todo = "set resources.nodes, gpus_per_node and ranks_per_node"
            job.leave(script.line_of(name), f"--{name}={value}", todo)
    cpus = (asked.cpus_per_task or 0) * (asked.tasks_per_node or 0)
    cpus = cpus or (number(script.option("cpus-per-gpu")) or 0) * (asked.gpus_per_node or 0)
    if cpus:
        job.set("resources.cpus_per_node", cpus)
    _carry_memory(job, cpus)


def _carry_memory(job: Imported, cpus: int) -> None:
    for name, times in (("mem", 1), ("mem-per-cpu", cpus), ("mem-per-gpu", job.script.job.gpus_per_node or 0)):
        value = job.script.option(name)
        match = re.fullmatch(r"(\d+)\s*([KMGT]?)B?", (value or "").upper())
        if match and times and int(match[1]):
            job.set("resources.mem_per_node", memory(math.ceil(int(match[1]) * _MIB[match[2]]) * times))
        elif match and times:
            job.add("resources.sbatch_extra", "--mem=0")
        elif value is not None:
            job.leave(job.script.line_of(name), f"--{name}={value}", "set resources.mem_per_node")


def _carry(job: Imported, each: Directive) -> None:
    name, value = each.name, each.value
    text = option_text(f"--{name}", value)
    gpus = name == "gres" and all(part.partition(":")[0] == "gpu" for part in value.split(","))
    if name in _ELSEWHERE or gpus:
        return
    if name in _OWN:
        job.leave(each.line, text, _OWN[name], lost=name not in _HARMLESS)
    elif name == "job-name":
        if clean := re.sub(r"[^A-Za-z0-9._+-]+", "-", value).strip("-._+")[:100]:
            job.set("name", clean)
    elif name == "nodes" and re.fullmatch(r"\d{1,5}(-\d{1,5})?", value):
        job.set("resources.nodes", int(value) if value.isdigit() else value)
    elif name in _SAME and re.fullmatch(SBATCH, value):
        job.set(f"resources.{name}", value)
    elif name == "time" and (seconds := limit_of(value)):
        job.set("resources.time", slurm_time(seconds))
    elif name == "exclusive" and value in ("", "exclusive"):
        job.set("resources.exclusive", True)
    elif name in ("requeue", "no-requeue"):
        job.set("recovery.requeue", "auto" if name == "requeue" else "never")
    elif name == "signal":
        job.set("timeouts.stop", f"{value.partition('@')[2] or 60}s")
        why = "imported as timeouts.stop; job.sh sends its own signal (docs/recovery.md)"
        job.leave(each.line, text, why, lost=False)
    elif name.startswith("container"):
        job.leave(each.line, text, "set container.image and container.binds: the whole script runs in this container")
    elif name == "export":
        _carry_export(job, each)
    elif not name:
        job.leave(each.line, value, "not an option of sbatch")
    elif name in SRUN_ONLY | REMOVED.keys() | {"gres", "nodes", "time", *_SAME}:
        job.leave(each.line, text, "not an option of sbatch, or not a value that it accepts")
    elif re.fullmatch(SBATCH, value or "x") and re.fullmatch(r"[A-Za-z][A-Za-z0-9-]+", name):
        job.add("resources.sbatch_extra", text)  # no key, but sbatch reads it
    else:
        job.leave(each.line, text, "slurmddp accepts no blanks, quotes or variables there")


def _carry_export(job: Imported, each: Directive) -> None:
    job.keys |= {("environment", variable): given for variable, given in exported(each.value).items()}
    for part in EXPORTED.split(each.value):
        if "=" not in part and part not in ("ALL", "NONE", "NIL"):
            job.leave(each.line, f"--export={part}", "set its variables in environment")
    if each.value != "ALL":
        why = "the job starts with a clean environment; see environment"
        job.leave(each.line, f"--export={each.value}", why, lost=False)
