"""From the recorded launch to keys of the job file: program, arguments, ranks, container, environment, setup."""

from __future__ import annotations

import os.path
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from slurmddp.container import SIF_PROGRAMS
from slurmddp.errors import UserError
from slurmddp.job.job import RESERVED
from slurmddp.records.redact import is_secret_name
from slurmddp.scripts.check.launches import Launch, launcher_options
from slurmddp.scripts.check.rules.common import services
from slurmddp.scripts.check.rules.text import SECRET
from slurmddp.scripts.check.shell import Command
from slurmddp.scripts.check.values import PER_TASK, number, symbol, symbol_name, symbols
from slurmddp.scripts.imports.imported import Imported
from slurmddp.scripts.sandbox.evaluate import HOME, SUBMIT, USER, Evaluated
from slurmddp.visible import one_line

#: How agents meet is slurmddp's own matter, by options and by variables; the names of the latter are the script's own.
_OPTIONS_OF_MEETING = re.compile(
    r"nnodes|nproc-per-node|rdzv-.*|master-.*|node-rank|standalone|num-(machines|processes|nodes|gpus)|machine-rank|"
    r"main-process-.*|multi-gpu|same-network|use-env|m|module|no-python|mixed-precision|local-addr|dynamo-backend=no"
)
_MEETING = re.compile(
    r"(MASTER|HEAD|RDZV|RENDEZVOUS|MAIN_PROCESS)_(NODE_)?(ADDR|ADDRESS|HOST|IP|PORT|ID)|NODE_RANK|NNODES|NUM_PROCESSES|"
    r"NPROC_PER_NODE"
)
_GIVEN = re.compile(r"(SLURM|SLURMDDP_|SANDBOX|PET_|TORCHELASTIC_|SBATCH_|SRUN_)\w*|HOSTNAME|PWD")
_FOR_OTHERS = re.compile(r"(CUDA|ROCR|HIP)_VISIBLE_DEVICES|(APPTAINER|SINGULARITY)_\w+")
_NETWORK = re.compile(r"(NCCL|GLOO|TORCH_NCCL|RCCL|FI|UCX)_")
#: What node.sh sets behind the setup lines, so that a setup line would not do.
_SET_LATER = re.compile(
    r"OMP_NUM_THREADS|HF_HOME|(TRITON|TORCHINDUCTOR)_CACHE_DIR|MIOPEN_\w+|TORCH_\w+|PYTHON(UNBUFFERED|NOUSERSITE)"
)
#: Options of srun that the job's own resources give, or that make no difference to the ranks.
_OF_SRUN = {
    "nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus", "gpus-per-node", "gres", "label", "unbuffered",
    "kill-on-bad-exit", "wait", "jobid", "mem", "exclusive", "overlap", "exact", "job-name", "partition", "account",
    "cpu-bind", "quiet", "verbose", "nodelist", "relative",
}  # fmt: skip
_OF_SHELL = re.compile(r"(unset|umask) |set [-+]\w*a|set [-+]o allexport")
VENV = "source $SLURM_SUBMIT_DIR/.venv/bin/activate"  # what `uv run` does
_PLACES = {SUBMIT: "$SLURM_SUBMIT_DIR", HOME: "$HOME"}
_SETUP = {"module", "ml", "source", ".", "conda", "mamba", "micromamba", "spack", "ulimit", "pyenv", "mkdir"}
_MPI = ("mpirun", "mpiexec", "orterun", "prun", "composer", "horovodrun")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_NAME = re.compile(r"\$\{?#?([A-Za-z_]\w*)")
#: What is another value in each rank, or for a program that a container may lack.
_COMPUTED = re.compile(r"\$\((?!\(|pwd\))|`|\$\{?S?RANDOM|\$\$")
_GLOB = re.compile(r"[*?]|\{[^{}\s]*(,|\.\.)[^{}\s]*\}")
_WITH_VALUE = {"-B", "--bind", "--mount", "--pwd", "-W", "--env", "-H", "--home", "-o", "--overlay", "--workdir", "-S",
               "--scratch", "--env-file", "--app", "--add-caps", "--drop-caps", "--security"}  # fmt: skip
_BINDS = ("-B", "--bind")
_OF_SITE = ("--nv", "--rocm", "--env")  # options that its profile chooses; the recorded launch has the variables
_LONG = {"-e": "--cleanenv", "-c": "--contain", "-C": "--containall"}
#: What the script sets for Slurm, and makes no difference to the ranks.
_FOR_SLURM = re.compile(r"(SLURM|SRUN)_(CPU_BIND\w*|LABELIO|UNBUFFEREDIO)")


def meets(option: str) -> bool:
    """Return whether an option of a launcher is only about how its ranks find each other, or has a key."""
    return _OPTIONS_OF_MEETING.fullmatch(option) is not None


def given_by_others(name: str) -> bool:
    """Return whether Slurm, torchrun or slurmddp gives the ranks a variable, in its own way."""
    return name in RESERVED | PER_TASK or bool(_GIVEN.fullmatch(name) or _MEETING.fullmatch(name))


def program_of(kind: str, arguments: Sequence[str]) -> tuple[str, bool, list[str]]:
    """(program, whether it is a module, its arguments) behind the options of a launcher or of python."""
    module, words = False, list(arguments)
    if kind != "python":
        options, end, _ = launcher_options(words)
        module = bool(options.keys() & {"m", "module"})
        words = words[end:]
    at = 0
    while (at < len(words) and words[at].startswith("-")) or words[at : at + 1] == ["python"]:
        if words[at] == "-m":
            return words[at + 1] if at + 1 < len(words) else "", True, words[at + 2 :]
        at += 2 if words[at] in ("-W", "-X") else 1
    return (words[at] if at < len(words) else ""), module, words[at + 1 :]


class SifOptions(NamedTuple):
    """The words behind `apptainer exec`. folder: of --pwd; more: options but those that the site chooses."""

    image: str
    binds: tuple[str, ...]
    folder: str | None
    more: tuple[tuple[str, str], ...]


def sif_options(words: Sequence[str]) -> SifOptions:
    """Read the words behind `apptainer exec`."""
    options, at = list[tuple[str, str]](), 0
    while at < len(words) and words[at].startswith("-"):
        name, equals, value = words[at].partition("=")
        at += 1
        if not equals and name in _WITH_VALUE and at < len(words):
            value, at = words[at], at + 1
        options.append((_LONG.get(name, name), value))
    return SifOptions(
        words[at] if at < len(words) else "",
        tuple(bind for name, value in options if name in _BINDS for bind in value.split(",")),
        next((value for name, value in options if name == "--pwd"), None),
        tuple((name, value) for name, value in options if name not in (*_BINDS, "--pwd", *_OF_SITE)),
    )


def refuse_others(job: Imported, runs: Sequence[Evaluated]) -> None:
    """Refuse what slurmddp does not run, by name and line. Raises UserError."""
    script = job.script
    separate = (each.line for each in script.directives if each.value in ("hetjob", "packjob"))
    found = [(line, "heterogeneous jobs") for line in separate]
    kinds = {**{name: name for name in _MPI}, "mpiexec.hydra": "mpiexec", "ray": "Ray"}
    ray = (each.line for each in script.commands if re.search(r"(^|\s)(\S*/)?ray (start|up)\b", " ".join(each.words)))
    found += [(line, "Ray") for line in ray]  # also in a branch that is not taken here
    for run in runs:
        found += [(each.line, kinds[each.name]) for each in run.started if each.name in kinds]
        het = (each for each in run.started if each.name == "srun" and "--het-group" in " ".join(each.words))
        found += [(each.line, "heterogeneous jobs") for each in het]
    found += [(each.line, "several programs side by side") for each in (services(script) if runs else ())]
    if found:
        named: dict[str, list[str]] = {}
        for line, kind in sorted(found):
            named.setdefault(kind, []).append(str(line))
        text = "; ".join(f"{kind} (line {', '.join(dict.fromkeys(lines))})" for kind, lines in named.items())
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
    _options(job, launch)
    _certain(job, launch)
    lines = [*_setup(job, launch, runs), *_environment(job, launch)]
    for _, text in sorted(lines, key=lambda pair: pair[0]):
        job.add("setup", text)


def _certain(job: Imported, launch: Launch) -> None:
    """Leave what decides whether and where the program starts."""
    step, text = launch.step, " ".join(launch.command.words)
    outer = step.command if step else launch.command
    if outer.branch:
        job.leave(launch.line, text, "in a branch: the job file always starts it")
    elif launch.unsure:
        job.leave(launch.line, text, "whether it starts so is known only when the job runs")
    for word in step.opaque if step else ():
        job.leave(launch.line, job.raw(launch, word), "options of srun that are known only when the job runs")
    if outer.loops and not launch.fan_out:
        job.leave(launch.line, text, "in a loop: the job file starts it once")
    asked, options = job.script.job, step.options if step else {}
    total = (asked.gpus_per_node or 0) * (asked.nodes or 1)
    if step and (
        step.resources.gpus_per_node != asked.gpus_per_node or number(options.get("gpus")) not in (None, total)
    ):
        job.leave(step.line, text, "the step has other GPUs than the job")
    tasks = 1 if step and step.fan_out else (step.resources.tasks_per_node or 0) if step else 0
    cores = (asked.cpus_per_task or 0) * (asked.tasks_per_node or 0)
    for name in {"cpus-per-task", "mem"} & options.keys():
        same = (
            options[name] == job.script.option("mem")
            if name == "mem"
            else number(options[name]) == cores / (tasks or 1)
        )
        if not same or not tasks:
            job.leave(launch.line, f"--{name}={options[name]}", "the step has other limits than the job")


def _program(job: Imported, launch: Launch) -> None:
    word, module, arguments = program_of(launch.kind, launch.program)
    if launch.kind != "python":
        module |= bool({"m", "module"} & launch.options.keys())
    program = job.path(word) if word else None
    options = launch.program[: launch.program.index(word)] if launch.kind == "python" and word else []
    if set(options) - {"-u", "-m"}:
        job.leave(launch.line, " ".join(options), "option of python")
    if program is None or program.startswith("-"):
        todo = "the program is known only when the job runs: set train.script"
        job.leave(launch.line, job.raw(launch, word), todo, about="program")
    elif module:
        job.set("train.module", program)
        if job.folder:
            job.set("train.project", job.folder)
    elif program.endswith(".py"):
        job.set("train.script", job.inside(program))
    else:
        todo = "the program must be a Python file or module: set train.script or train.module"
        job.leave(launch.line, program, todo, about="program")
    _arguments(job, launch, arguments, word)
    _interpreter(job, launch)


def _arguments(job: Imported, launch: Launch, words: list[str], program: str) -> None:
    """Carry over the arguments; if some are known only when the job runs, run.sh has them."""
    args: list[str] = []
    unknown: list[tuple[str, str]] = []
    secret = False
    for word in words:
        value = job.text(word)
        name, equals, given = word.partition("=")
        option = args[-1] if args and args[-1].startswith("-") and "=" not in args[-1] else ""
        if (secret and not word.startswith("--")) or (equals and name[:1] == "-" and is_secret_name(name) and given):
            name = args.pop() if secret and not word.startswith("--") else name
            variable = name.lstrip("-").replace("-", "_").upper()
            job.add("environment_from", variable)
            why = f"a secret: let the script read {variable} from its environment"
            job.leave(launch.line, f"argument {name} ...", why, about="arguments")
        elif value and SECRET.search(value):
            why = "a secret: revoke it, and let the script read it from its environment"
            text = f"argument {args.pop() if option else ''} ...".replace("  ", " ")
            job.leave(launch.line, text, why, about="arguments")
        elif value is None:
            raw = job.raw(launch, word, option, behind=program)
            text = " ".join(filter(None, [args.pop() if option.startswith("--") else "", raw]))
            why = "from sbatch's command line: add it behind --" if re.search(r"\$\{?[@*1-9]", raw) else ""
            if job.environment.get(symbol_name(word, "?")):
                why = "a variable of your shell, which may be a secret: write its value yourself"
            unknown.append((text, why))
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
    module = at > 0 and words[at - 1] in ("-m", "--module")
    tail = [*(["-m"] if module else []), *words[at:]]
    lines = _lines(job, " ".join(tail), launch.line)
    names = {name for text in [*tail, *(lines or ())] for name in [*_NAME.findall(text), text.partition("=")[0]]}
    given = names - {match[1] for line in lines or () if (match := _ASSIGNMENT.match(line))}
    if any(not re.match(r"SLURM_|(HOME|USER|PWD)$|\W|$", name) for name in given & set(_NAME.findall(" ".join(tail)))):
        return False  # of the shell that submits, or of a file that the script sources: run.sh would not have it
    of_rank = any(name in RESERVED or _MEETING.fullmatch(name) or name.startswith("TORCHELASTIC") for name in names)
    if lines is None or of_rank or _COMPUTED.search(" ".join(tail)):
        return False
    head = f"#!/bin/bash\n# Made by `slurmddp import {one_line(job.script.path.name)}`: what only the job knows."
    job.run_text = "\n".join([head, *lines, "exec python3 \\", f"    {' '.join(tail)}\n"])
    job.set("train.script", job.run_name)
    for key in ("module", "project"):
        job.keys.pop(("train", key), None)
    return True


def _lines(job: Imported, text: str, before: int) -> list[str] | None:
    """Return the script's own assignments of the variables in a text; None, if they are more than assignments."""
    needed, found = set(_NAME.findall(text)), list[str]()
    named = job.script.option("job-name") == job.keys.get(("name",))
    commands = [each for each in job.script.commands if 0 < each.line < before]
    for command in reversed(commands):
        for word in reversed(_assigned(command)):
            name, value = _ASSIGNMENT.fullmatch(word).groups()  # type: ignore[union-attr]
            if name in needed:
                if command.branch or command.loops or command.function or "\n" in value or _COMPUTED.search(value):
                    return None
                found.insert(0, word)
                needed |= set(_NAME.findall(value))
    return found if named or "SLURM_JOB_NAME" not in needed else None  # slurmddp's job has another name


def _assigned(command: Command) -> list[str]:
    """Return the assignments of a command that is nothing else."""
    declares = command.words[:1] and command.words[0] in ("export", "declare", "typeset", "readonly")
    words = [word for word in command.words[bool(declares) :] if not word.startswith("-")]
    found = [word for word in words if _ASSIGNMENT.fullmatch(word)]
    return found if len(found) == len(words) or declares else []


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
    asked, step = job.script.job, launch.step
    if launch.kind == "python":
        ranks = (step.resources.tasks_per_node or 0) if step and not step.fan_out else 1
        if step and "container-image" not in step.options:
            job.set("launch.mode", "srun")
        if step and (step.resources.gpus_per_task or "gpu-bind" in step.options):
            job.leave(step.line, "--gpus-per-task, --gpu-bind", "each rank sees all GPUs: choose by LOCAL_RANK")
    elif launch.kind == "torchrun":
        told = launch.option("nproc-per-node")
        ranks = number(told) or (1 if told is None and not launch.opaque else 0)
    else:
        counts = {"num_processes": None, "num_machines": 1} | _config(job, launch)
        counts |= {key: value for key in counts if (value := launch.option(key.replace("_", "-")))}
        total, machines = (number(str(each)) for each in counts.values())
        ranks = total // (machines or 1) if total else 0
    old = "torch.distributed.launch" in launch.command.words and "use-env" not in launch.options
    if launch.kind == "deepspeed" or old:
        job.leave(launch.line, launch.name, "gives the program --local_rank; slurmddp sets LOCAL_RANK only")
    if ranks and ranks != asked.gpus_per_node:
        job.set("resources.ranks_per_node", ranks)


def _config(job: Imported, launch: Launch) -> dict[str, object]:
    """Return how many ranks and nodes the config file of Accelerate names, where it is on this machine."""
    import yaml

    path = job.path(launch.options.get("config-file", ""))
    try:
        tree = yaml.safe_load(Path(os.path.expanduser(job.inside(path or ""))).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return {key: tree[key] for key in ("num_processes", "num_machines") if isinstance(tree, dict) and key in tree}


def _container(job: Imported, launch: Launch) -> None:
    options, words = launch.step.options if launch.step else {}, list(launch.words)
    at = next((at for at, word in enumerate(words) if word.rpartition("/")[2] in SIF_PROGRAMS), None)
    more: list[tuple[str, str]] = []
    folder = options.get("container-workdir")
    if "container-image" in options:
        job.set("container.runtime", "pyxis")
        image, binds = options["container-image"], options.get("container-mounts", "").split(",")
        taken = ("container-image", "container-mounts", "container-workdir")
        own = (pair for pair in options.items() if pair[0].startswith("container"))
        more = [(f"--{name}", value) for name, value in own if name not in taken]
    elif at is not None and words[at + 1 : at + 2] in (["exec"], ["run"], ["shell"]):
        job.set("container.runtime", words[at].rpartition("/")[2])
        given = sif_options(words[at + 2 :])
        image, binds, folder, more = given.image, [*given.binds], given.folder, [*given.more]
        if words[at + 1] != "exec":
            job.leave(launch.line, f"{words[at]} {words[at + 1]}", "starts the image's own script", about="container")
    else:
        job.set("container.runtime", "none")
        return
    if folder and (there := job.path(folder)) and there[0] in "/$~":
        job.set("train.workdir", there)
        if not job.run_text and not job.keys.get(("train", "script"), "/").startswith(("/", "$", "~")):
            why = "in a folder of the container: name its path on this machine"
            job.leave(launch.line, str(job.keys[("train", "script")]), why, about="program")
    path = job.path(image)
    if path is None or "://" in path:
        todo = "set container.image to a file (slurmddp build-image makes one)"
        job.leave(launch.line, job.raw(launch, image), todo, about="container")
    else:
        job.set("container.image", job.inside(path))
    for bind in filter(None, binds):
        text = job.path(bind.strip())
        if text and re.fullmatch(r"[^:,\"\\]+(:[^:,\"\\]+(:(ro|rw))?)?", text):
            job.add("container.binds", job.inside(text))
        else:
            job.leave(launch.line, f"bind {bind}", "container.binds: source:destination:ro", about="binds")
    for name, value in more:
        if name.startswith("--") and (text := job.text(f"{name}={value}" if value else name)):
            job.add("container.options", text)
        else:
            job.leave(launch.line, f"{name} {value}".strip(), "option of the container runtime")


def _options(job: Imported, launch: Launch) -> None:
    """Carry over the options of launcher and srun that have a key, and name the others."""
    for name, value in launch.options.items():
        if name == "config-file" and launch.kind == "accelerate" and (config := job.path(value)):
            job.set("launch.accelerate", job.inside(config))
        elif name == "mixed-precision" and launch.kind == "accelerate" and (precision := job.text(value)):
            if "config-file" in launch.options:  # whose variables replace those of `environment`
                job.leave(launch.line, f"--mixed_precision={precision}", "set mixed_precision in the config file")
            else:
                job.keys[("environment", "ACCELERATE_MIXED_PRECISION")] = precision
        elif name == "mixed-precision":
            why = f"option of {launch.kind}"
            job.leave(launch.line, f"--{name}={value}", why, about="ACCELERATE_MIXED_PRECISION")
        elif name == "max-restarts" and launch.kind == "torchrun" and number(value) is not None:
            job.set("launch.max_restarts", number(value))
        elif not meets(name):
            job.leave(launch.line, f"--{name}={value}", f"option of {launch.kind}", about="options of the launcher")
    for word in launch.opaque:
        why = f"options of {launch.kind} that are known only when the job runs"
        job.leave(launch.line, job.raw(launch, word), why)
    for name, value in (launch.step.options if launch.step else {}).items():
        if name == "mpi" and (launch.kind != "python" or job.keys.get(("launch", "mode")) == "srun"):
            if launch.kind == "python":
                job.set("launch.mpi", value)
        elif f"{name}={value}" == "kill-on-bad-exit=0" or (
            name not in _OF_SRUN and not name.startswith("container") and f"{name}={value[:3]}" != "export=ALL"
        ):
            lost = name not in ("output", "error")  # the run folder has the logs
            text = f"--{name}={value}".removesuffix("=")
            job.leave(launch.step.line if launch.step else 0, text, "option of srun", lost=lost)


def _setup(job: Imported, launch: Launch, runs: Sequence[Evaluated]) -> list[tuple[int, str]]:
    """(line, setup line) of each command that prepares a shell, and that all jobs start before the launch."""
    lines = []
    for command in job.script.commands:
        text, certain = " ".join(command.words), not (command.branch or command.loops or command.function)
        if certain and command.line < launch.line and _OF_SHELL.match(text):
            lines.append((command.line, text))
    known = set[tuple[str, ...]].intersection(*({each.words for each in run.started} for run in runs))
    for each in runs[0].started:
        words, paths = list(each.words), {"source": 2, ".": 2, "mkdir": len(each.words)}.get(each.name, 0)
        wanted = each.name in _SETUP and words[1:2] not in (["init"], ["info"], ["run"], ["create"], ["install"])
        if each.step or not wanted or each.words not in known or each.line > launch.line:
            continue
        if each.name == "mkdir" and words[1:2] != ["-p"]:  # which another node would have made
            continue
        for at in range(1, paths):
            words[at] = words[at] if words[at][:1] == "-" else os.path.join(each.folder, words[at])
        text = " ".join(map(_shell_word, words))
        hook = words[1:] and re.match(r"shell\.|hook", words[1])
        lines.append((each.line, f'eval "$({text})"' if hook else text))
    if "uv" in launch.words:
        lines.append((launch.line, VENV))
    return lines


def _shell_word(word: str) -> str:
    """Return a recorded word for a setup line: the sandbox's folders as what they stand for."""
    plain = re.fullmatch(r"[\w@%+=:,./~^-]+", word)
    word = word.replace(USER, "$USER") if plain else shlex.quote(word).replace(USER, "'$USER'")
    if word.strip("'").startswith("/.conda"):
        return f'"$(conda info --base){word.strip(chr(39))[7:]}"'
    return re.sub(rf"^({SUBMIT}|{HOME})(?=/|$)", lambda match: _PLACES[match[1]], word)


def _environment(job: Imported, launch: Launch) -> list[tuple[int, str]]:
    """Carry over what the tasks find in their environment; return (line, setup line) of what only the job knows."""
    lines, used = [], _used(job, launch)
    for (line, name), value in job.script.found.assigned.items():
        same = f"{name}={value}" == f"SRUN_CPUS_PER_TASK={job.script.job.cpus_per_task}" or name in used
        if re.match("(SLURM|SRUN)_", name) and line < launch.line and not same and not _FOR_SLURM.fullmatch(name):
            job.leave(line, f"{name}=...", "a variable that srun reads", about=name)
    for name, value in launch.environment.items():
        line = job.line_of(launch.line, name)
        written = re.search(rf"(\b|ENV_){re.escape(name)}\+?=", job.script.text) is not None
        if not written or (given_by_others(name) and not _MEETING.fullmatch(name)):
            continue  # a file that setup sources sets it
        text = job.text(value)
        adds = re.search(rf"\b{name}=\S*\$\{{?{name}\b", job.script.text)  # to what a module may set
        if _MEETING.fullmatch(name):
            own = name in RESERVED | PER_TASK | used  # another one may be read by the program
            job.leave(line, name, "slurmddp has its own way for ranks to meet", lost=not own, about=name)
        elif _FOR_OTHERS.fullmatch(name):
            job.leave(line, name, "not a variable of the ranks alone: see container and resources", about=name)
        elif is_secret_name(name) and not value.startswith("\0"):
            job.add("environment_from", name)
            why = f"a secret: revoke it, and export {name} in your shell before you submit"
            job.leave(line, f"{name}=...", why, lost=False)
        elif _NETWORK.match(name) and text is not None:
            _network(job, line, name, text)
        elif text is not None and (("\0" not in value and not adds) or _SET_LATER.fullmatch(name)):
            job.keys[("environment", name)] = text
        elif not _SET_LATER.fullmatch(name) and (kept := _lines(job, f"${name}", launch.line + 1)):
            lines += [(line, f"export {each}" if each.startswith(f"{name}=") else each) for each in kept]
        else:
            hosts = symbols(value) & {"head", "own", "host", "nodelist"}  # by which the ranks meet
            part = name in used and bool(hosts or re.search("torchrun|launch|python|srun| --", value))
            why = "a part of the launch" if part else "known only when the job runs: set it in environment"
            job.leave(line, f"{name}=...", why, lost=not part, about=name)
    return lines


def _used(job: Imported, launch: Launch) -> set[str]:
    """Return the variables that the launch's text consists of: what it starts has their values."""
    commands = [launch.command, *([launch.step.command] if launch.step else [])]
    found, texts = set[str](), [word for each in commands for word in each.words]
    while texts:
        new = {name for text in texts for name in _NAME.findall(text)} - found
        found |= new
        pairs = [match for each in job.script.commands for match in map(_ASSIGNMENT.fullmatch, each.words) if match]
        texts = [pair[2] for pair in pairs if pair[1] in new]
    return found


def _network(job: Imported, line: int, name: str, value: str) -> None:
    """The profile knows the network of its site; other values than its own need a reason."""
    interface = name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    by_site = job.site_variables().get(name, (job.site.get("network") or {}).get("interface") if interface else None)
    if by_site is not None:
        why = f"the site's profile sets {name}: {by_site}"
        job.leave(line, f"{name}={value}", why, lost=str(by_site) != value, about=name)
    elif interface:
        job.set("network.interface", value)
    else:
        job.keys[("network", "variables", name)] = value
