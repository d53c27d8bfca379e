"""From the recorded launch to keys of the job file: program, arguments, interpreter, ranks, container, options."""

from __future__ import annotations

import os.path
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from slurmddp.errors import UserError
from slurmddp.job.job import RESERVED
from slurmddp.records.redact import is_secret_name
from slurmddp.scripts.check.launches import Launch
from slurmddp.scripts.check.rules.common import services
from slurmddp.scripts.check.rules.text import SECRET
from slurmddp.scripts.check.values import names_in, symbol, symbol_name
from slurmddp.scripts.imports.imported import Imported
from slurmddp.scripts.imports.prepare import COMPUTED, carry_environment, carry_setup, own_assignments
from slurmddp.scripts.imports.reader import LOGS, MEETING, container_of, meets, option_text, program_of, ranks_of
from slurmddp.scripts.sandbox.evaluate import Evaluated, number
from slurmddp.visible import one_line

#: Options of srun that the job's own resources give, or that make no difference to the ranks.
_OF_SRUN = {
    "nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus", "gpus-per-node", "gres", "label", "unbuffered",
    "kill-on-bad-exit", "wait", "jobid", "mem", "exclusive", "overlap", "exact", "job-name", "partition", "account",
    "cpu-bind", "quiet", "verbose", "nodelist", "relative",
}  # fmt: skip
#: Programs that slurmddp does not run, and how a refusal calls them.
_OTHERS = {
    **{name: name for name in ("mpirun", "mpiexec", "orterun", "prun", "composer", "horovodrun")},
    "mpiexec.hydra": "mpiexec", "ray": "Ray",
}  # fmt: skip
_RAY = re.compile(r"(^|\s)(\S*/)?ray (start|up)\b")
_GLOB = re.compile(r"[*?]|\{[^{}\s]*(,|\.\.)[^{}\s]*\}")


def refuse_others(job: Imported, runs: Sequence[Evaluated]) -> None:
    """Refuse what slurmddp does not run, by name and line. Raises UserError."""
    script, different = job.script, "heterogeneous jobs"
    found = [(each.line, different) for each in script.directives if each.value in ("hetjob", "packjob")]
    # Ray also in a branch that is not taken here.
    found += [(each.line, "Ray") for each in script.commands if _RAY.search(" ".join(each.words))]
    for each in (each for run in runs for each in run.started):
        if each.name in _OTHERS:
            found.append((each.line, _OTHERS[each.name]))
        elif each.name == "srun" and "--het-group" in " ".join(each.words):
            found.append((each.line, different))
    found += [(each.line, "several programs side by side") for each in (services(script) if runs else ())]
    if found:
        named: dict[str, list[str]] = {}
        for line, kind in sorted(set(found)):
            named.setdefault(kind, []).append(str(line))
        text = "; ".join(f"{kind} (line {', '.join(lines)})" for kind, lines in named.items())
        raise UserError(
            f"uses what slurmddp does not run: {text}",
            where=one_line(str(script.path)),
            todo="submit the script with sbatch as before; slurmddp starts one program, with one process per rank",
        )


def main_launch(job: Imported) -> Launch | None:
    """Return the launch that the job is about: the last one of a launcher, else of python, best under srun."""
    found = [each for each in job.script.found.launches if each.program]
    some = [each for each in found if each.kind != "python"] or found
    return next((each for each in reversed(some) if each.step), some[-1] if some else None)


def carry_launch(job: Imported, launch: Launch, runs: Sequence[Evaluated]) -> None:
    """Carry over everything that the launch consists of."""
    job.enter(job.path(launch.folder) or "*")
    _program(job, launch)
    _ranks(job, launch)
    _container(job, launch)
    _options_of_launcher(job, launch)
    _options_of_srun(job, launch)
    _certain(job, launch)
    lines = [*carry_setup(job, launch, runs), *carry_environment(job, launch)]
    for _, text in sorted(lines, key=lambda pair: pair[0]):
        job.add("setup", text)


def _certain(job: Imported, launch: Launch) -> None:
    """Leave what decides whether and how often the program starts."""
    step, text = launch.step, " ".join(launch.command.words)
    outer = step.command if step else launch.command
    if outer.branch:
        job.leave(launch.line, text, "in a branch: the job file always starts it")
    elif launch.unsure:
        job.leave(launch.line, text, "whether it starts so is known only when the job runs")
    if outer.loops and not launch.fan_out:
        job.leave(launch.line, text, "in a loop: the job file starts it once")


def _program(job: Imported, launch: Launch) -> None:
    program = program_of(launch.options, launch.program)
    path = job.path(program.word) if program.word else None
    if launch.kind == "python" and program.word and set(program.options) - {"-u", "-m"}:
        job.leave(launch.line, " ".join(program.options), "option of python")
    if path is None or path.startswith("-"):
        todo = "the program is known only when the job runs: set train.script"
        job.leave(launch.line, job.raw(launch, program.word), todo, about="program")
    elif program.module:
        job.set("train.module", path)
        if job.folder:
            job.set("train.project", job.folder)
    elif path.endswith(".py"):
        job.set("train.script", job.inside(path))
    else:
        todo = "the program must be a Python file or module: set train.script or train.module"
        job.leave(launch.line, path, todo, about="program")
    _arguments(job, launch, program.arguments, program.word)
    _interpreter(job, launch)


def _arguments(job: Imported, launch: Launch, words: list[str], program: str) -> None:
    """Carry over the arguments; if some are known only when the job runs, run.sh has them."""
    args, unknown = list[str](), list[tuple[str, str]]()
    secret = False  # the word before it is an option that takes a secret
    for word in words:
        value = job.text(word)
        name, equals, given = word.partition("=")
        option = args[-1] if args and args[-1].startswith("-") and "=" not in args[-1] else ""
        takes = secret and not word.startswith("--")
        if takes or (equals and name[:1] == "-" and is_secret_name(name) and given):
            name = args.pop() if takes else name
            variable = name.lstrip("-").replace("-", "_").upper()
            job.add("environment_from", variable)
            why = f"a secret: let the script read {variable} from its environment"
            job.leave(launch.line, f"argument {name} ...", why, about="arguments")
        elif value and SECRET.search(value):
            text = f"argument {args.pop()} ..." if option else "argument ..."
            why = "a secret: revoke it, and let the script read it from its environment"
            job.leave(launch.line, text, why, about="arguments")
        elif value is None:
            raw = job.raw(launch, word, option, behind=program)
            why = "from sbatch's command line: add it behind --" if re.search(r"\$\{?[@*1-9]", raw) else ""
            if job.environment.get(symbol_name(word, "?")):
                why = "a variable of your shell, which may be a secret: write its value yourself"
            unknown.append((f"{args.pop()} {raw}" if option.startswith("--") else raw, why))
        elif _GLOB.search(value) and not re.search(r"['\"][^'\"]*[*?{]", raw := job.raw(launch, word, behind=program)):
            why = "bash replaces it by names of files or several words"
            job.leave(launch.line, f"argument {raw}", why, about="arguments")
        else:
            args.append(value)
        secret = not secret and not equals and word.startswith("--") and is_secret_name(word)
    kept = unknown and not any(why for _, why in unknown) and "arguments" not in job.named
    if kept and _run_sh(job, launch, program):
        return
    for text, why in unknown:
        job.leave(launch.line, f"argument {text}", why or "known only when the job runs", about="arguments")
    if args:
        job.set("train.args", args)


def _run_sh(job: Imported, launch: Launch, program: str) -> bool:
    """Write run.sh, in which the words are the script's own; return whether that is possible."""
    words = launch.command.words
    at = next((at for at, word in enumerate(words) if word.strip("'\"").endswith(program)), None)
    if at is None or "\0" in program or not program or launch.command.function:
        return False
    tail = " ".join([*(["-m"] if at and re.fullmatch(r"-[A-Za-z]*m|--module", words[at - 1]) else []), *words[at:]])
    lines = own_assignments(job, tail, launch.line)
    if lines is None or COMPUTED.search(tail):
        return False
    assigned = {line.partition("=")[0].rstrip("+") for line in lines}
    if any(not re.match(r"SLURM_|(HOME|USER|PWD)$", name) for name in names_in(tail) - assigned):
        return False  # of the shell that submits, or of a file that the script sources: run.sh would not have it
    names = assigned.union(names_in(tail), *map(names_in, lines))
    if any(name in RESERVED or MEETING.fullmatch(name) or name.startswith("TORCHELASTIC") for name in names):
        return False  # which differ between ranks
    head = f"#!/bin/bash\n# Made by `slurmddp import {one_line(job.script.path.name)}`: what only the job knows."
    job.run_text = "\n".join([head, *lines, "exec python3 \\", f"    {tail}\n"])
    job.set("train.script", job.run_name)
    for key in ("module", "project"):
        job.keys.pop(("train", key), None)
    return True


def _interpreter(job: Imported, launch: Launch) -> None:
    """Name the Python that starts the ranks, unless it is python or python3 in PATH. It may start in their folder."""
    name = job.text(launch.name.replace(symbol("?:SLURM_SUBMIT_DIR"), os.getcwd()))
    folder, slash, program = (name or "").rpartition("/")
    if name is None:
        why = "the Python is known only when the job runs"
        job.leave(launch.line, job.raw(launch, launch.name), why, about="python")
    elif slash or re.fullmatch(r"python\d\.\d+", program):
        python = f"{folder}{slash}{program if program.startswith('python') else 'python3'}"
        job.set("container.python", python)
        job.run_text = job.run_text.replace("exec python3 ", f"exec {shlex.quote(python)} ")


def _ranks(job: Imported, launch: Launch) -> None:
    step = launch.step
    if launch.kind == "python":
        ranks = (step.resources.tasks_per_node or 0) if step and not step.fan_out else 1
        if step and "container-image" not in step.options:
            job.set("launch.mode", "srun")
        binds = {step.options.get("gpu-bind") if step else None, job.script.option("gpu-bind")} - {None}
        if step and binds != {"none"} and (step.resources.gpus_per_task or "gpu-bind" in step.options):
            job.leave(step.line, "--gpus-per-task, --gpu-bind", "each rank sees all GPUs: choose by LOCAL_RANK")
    else:
        config = _config(job, launch)
        told = ranks_of(launch.kind, lambda name: config.get(name) if (own := launch.option(name)) is None else own)
        one = told is None and launch.kind == "torchrun" and not launch.opaque  # torchrun's default
        ranks = 1 if one else number(told) or 0
    old = "torch.distributed.launch" in launch.words and "use-env" not in launch.options
    if launch.kind == "deepspeed" or old:
        job.leave(launch.line, launch.name, "gives the program --local_rank; slurmddp sets LOCAL_RANK only")
    if ranks and ranks != job.script.job.gpus_per_node:
        job.set("resources.ranks_per_node", ranks)


def _config(job: Imported, launch: Launch) -> dict[str, str]:
    """Return what the config file of Accelerate has, where it is on this machine, under the names of options."""
    import yaml

    path = job.path(launch.options.get("config-file", ""))
    try:
        tree = yaml.safe_load(Path(os.path.expanduser(job.inside(path or ""))).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return {str(name).replace("_", "-"): str(value) for name, value in tree.items()} if isinstance(tree, dict) else {}


def _container(job: Imported, launch: Launch) -> None:
    found = container_of(launch.words, launch.step.options if launch.step else {})
    job.set("container.runtime", found.runtime)
    if found.runtime == "none":
        return
    if found.command not in ("", "exec"):
        text = f"{found.runtime} {found.command}"
        job.leave(launch.line, text, "starts the image's own script", about="container")
    if found.folder and (there := job.path(found.folder)) and there[0] in "/$~":
        job.set("train.workdir", there)
        if not job.run_text and not job.keys.get(("train", "script"), "/").startswith(("/", "$", "~")):
            why = "in a folder of the container: name its path on this machine"
            job.leave(launch.line, str(job.keys[("train", "script")]), why, about="program")
    path = job.path(found.image)
    if path is None or "://" in path:
        todo = "set container.image to a file (slurmddp build-image makes one)"
        job.leave(launch.line, job.raw(launch, found.image), todo, about="container")
    else:
        job.set("container.image", job.inside(path))
    for bind in found.binds:
        text = job.path(bind) or ""
        if re.fullmatch(r"[^:,\"\\]+(:[^:,\"\\]+(:(ro|rw))?)?", text):
            job.add("container.binds", job.inside(text))
        else:
            job.leave(launch.line, f"bind {bind}", "container.binds: source:destination:ro", about="binds")
    for option in found.more:
        if option.startswith("--") and (known := job.text(option)):
            job.add("container.options", known)
        else:
            job.leave(launch.line, option, "option of the container runtime")


def _options_of_launcher(job: Imported, launch: Launch) -> None:
    """Carry over the options that have a key, and name the others."""
    accelerate, configured = launch.kind == "accelerate", "config-file" in launch.options
    for name, value in launch.options.items():
        precision = name == "mixed-precision"
        if accelerate and name == "config-file" and (config := job.path(value)):
            job.set("launch.accelerate", job.inside(config))
        elif accelerate and precision and not configured and (known := job.text(value)):
            job.keys[("environment", "ACCELERATE_MIXED_PRECISION")] = known
        elif launch.kind == "torchrun" and name == "max-restarts" and number(value) is not None:
            job.set("launch.max_restarts", number(value))
        elif name in LOGS:
            job.leave(launch.line, f"--{name}={value}", "logs are in the run folder: slurmddp logs", lost=False)
        elif precision or not meets(name, value):
            # The variables of the config file replace those of `environment`.
            why = "set mixed_precision in the config file" if precision and configured else f"option of {launch.kind}"
            about = "ACCELERATE_MIXED_PRECISION" if precision else "options of the launcher"
            job.leave(launch.line, f"--{name}={value}", why, about=about)
    for word in launch.opaque:
        why = f"options of {launch.kind} that are known only when the job runs"
        job.leave(launch.line, job.raw(launch, word), why)


def _options_of_srun(job: Imported, launch: Launch) -> None:
    """Leave what the step has and the job has not: other GPUs, limits, and options that make a difference."""
    step, asked = launch.step, job.script.job
    if not step:
        return
    for word in step.opaque:
        job.leave(launch.line, job.raw(launch, word), "options of srun that are known only when the job runs")
    total = (asked.gpus_per_node or 0) * (asked.nodes or 1)
    if step.resources.gpus_per_node != asked.gpus_per_node or number(step.options.get("gpus")) not in (None, total):
        job.leave(step.line, " ".join(launch.command.words), "the step has other GPUs than the job")
    tasks = 1 if step.fan_out else step.resources.tasks_per_node
    cores = (asked.cpus_per_task or 0) * (asked.tasks_per_node or 0)
    for name, value in step.options.items():
        text, whole = option_text(f"--{name}", value), f"{name}={value}"
        if name == "mpi" and (launch.kind != "python" or "container-image" not in step.options):
            if launch.kind == "python":
                job.set("launch.mpi", value)
        elif name in ("cpus-per-task", "mem"):
            same = value == job.script.option("mem") if name == "mem" else number(value) == cores / (tasks or 1)
            if not same or not tasks:
                job.leave(launch.line, text, "the step has other limits than the job")
        elif whole == "kill-on-bad-exit=0" or not (
            name in _OF_SRUN
            or name.startswith("container")
            or whole.startswith("export=ALL")
            or value == job.script.option(name)
        ):  # the run folder has the logs
            job.leave(step.line, text, "option of srun", lost=name not in ("output", "error"))
