"""The launch: what runs on the ranks, how many of them, and in which container."""

from __future__ import annotations

import re

from slurmddp.check.launches import Launch
from slurmddp.check.rules.launchers import ranks_per_launcher
from slurmddp.check.rules.text import SECRET
from slurmddp.check.shell import Command
from slurmddp.check.values import expand_words, number, symbol_name
from slurmddp.launch.import_script.commands import add_setup
from slurmddp.launch.import_script.imported import Imported
from slurmddp.spec.sensitive import is_secret_name

#: How agents meet is slurmddp's own matter.
_MEETING = re.compile(
    r"nnodes|nproc-per-node|rdzv-.*|master-.*|node-rank|standalone|num-(machines|processes|nodes|gpus)|machine-rank|"
    r"main-process-.*|multi-gpu|same-network|use-env|m|module|no-python"
)
_SRUN = {"nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus", "gpus-per-node", "gpus-per-task", "gres",
         "label", "unbuffered", "u", "l", "kill-on-bad-exit", "K", "wait", "jobid", "export", "mem", "exclusive",
         "overlap", "exact", "output", "error", "job-name", "time", "partition", "account"}  # fmt: skip
_WITH_VALUE = {"-B", "--bind", "--mount", "--pwd", "-W", "--env", "-H", "--home", "-o", "--overlay", "--workdir", "-S",
               "--scratch", "--env-file", "--app", "--add-caps", "--drop-caps", "--security"}  # fmt: skip


def main_launch(job: Imported) -> Launch | None:
    """Return the launch that the job is about: the last one of a launcher, else of python, best under srun."""
    found = job.script.found.launches
    for kinds in (("torchrun", "accelerate", "deepspeed"), ("python",)):
        some = [each for each in found if each.kind in kinds and each.program]
        if some:
            chosen = next((each for each in reversed(some) if each.step), some[-1])
            for each in some:
                if each is not chosen and each.program[:1] != chosen.program[:1]:
                    text = " ".join([each.kind, *each.program])
                    job.leave(each.line, text, "another program: a job file starts only one")
            return chosen
    return None


def launch_commands(job: Imported, launch: Launch | None) -> list[Command]:
    """Return the commands that start the program: the launcher's, and those around it."""
    started = [each.command for each in job.script.found.launches]
    around = [
        command for command, words, scope in job.script.found.seen
        if "srun" in words and (launch is None or (launch.step and launch.step.line in command.lines))
    ]  # fmt: skip
    return [*started, *around]


def carry_program(job: Imported, launch: Launch) -> None:
    """Carry over program, arguments, ranks and container."""
    words = _words(job, launch)
    at, module = _program(launch)
    word = launch.program[at] if at < len(launch.program) else ""
    program = job.path(word) if word else None
    if program is None and (end := re.fullmatch("\0[^\0]*\0/([^\0]+)", word)):
        job.leave(launch.line, word, "its folder is known only when the job runs")
        program = end[1]
    if program is None or program.startswith("-"):
        shown = " ".join(launch.program[: at + 1])
        job.leave(launch.line, shown, "the program is known only when the job runs: set train.script")
    elif module:
        job.set("train.module", program)
        if job.folder:
            job.set("train.project", job.folder)
    elif program.endswith(".py"):
        job.set("train.script", job.inside(program))
    else:
        job.leave(launch.line, program, "the program must be a Python file or module: set train.script or train.module")
    _arguments(job, launch, launch.program[at + 1 :])
    _ranks(job, launch)
    _container(job, launch, words)
    _options(job, launch)
    before = [word for word in launch.program[:at] if word not in ("-u", "-m")]
    if before:
        job.leave(launch.line, " ".join(before), f"option of {launch.kind}")
    around = [word for word in (launch.remote, *launch.wrapper) if word not in ("", "exec", "time")]
    if around and not {"apptainer", "singularity", "shifter", "uv"} & {word.rpartition("/")[2] for word in around}:
        job.leave(launch.line, " ".join(around), f"in front of {launch.kind}; set its variables in environment")


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
        elif name == "max-restarts" and launch.kind == "torchrun" and number(value) is not None:
            if restarts := number(value):
                job.set("launch.max_restarts", restarts)
        elif not _MEETING.fullmatch(name):
            job.leave(launch.line, f"--{name}={value}", f"option of {launch.kind}")
    for word in launch.opaque:
        job.leave(launch.line, _raw(launch, word), f"options of {launch.kind} that are known only when the job runs")
    for name, value in (launch.step.options if launch.step else {}).items():
        line, text = launch.step.line if launch.step else 0, f"--{name}={value}".removesuffix("=")
        if name == "export" and "=" in value:
            names = re.sub(r"=[^,]*", "=...", value)
            job.leave(line, f"--export={names}", "set its variables in environment")
        elif name not in _SRUN and not name.startswith("container"):
            job.leave(line, text, "option of srun")


def _words(job: Imported, launch: Launch) -> list[str]:
    """Return the expanded words around the program, from srun on."""
    line = launch.step.line if launch.step else launch.line
    own = [words for command, words, _ in job.script.found.seen if command is launch.command]
    around = [words for command, words, _ in job.script.found.seen if line in command.lines and "srun" in words]
    return [word for words in [*around[:1], *own[:1]] for word in words]


def _program(launch: Launch) -> tuple[int, bool]:
    """(index of the script in the program's words, whether it is the name of a module)."""
    if launch.kind != "python":
        return 0, bool({"m", "module"} & launch.options.keys())
    at = 0
    while at < len(launch.program) and launch.program[at].startswith("-"):
        if launch.program[at] == "-m":
            return at + 1, True
        at += 2 if launch.program[at] in ("-W", "-X") else 1
    return at, False


def _arguments(job: Imported, launch: Launch, words: list[str]) -> None:
    """Arguments are passed unchanged, so each must be known now."""
    args: list[str] = []
    secret = False
    for word in words:
        value = job.text(word)
        name, equals, given = word.partition("=")
        if (secret and not word.startswith("--")) or (
            equals and name.startswith("-") and is_secret_name(name) and given
        ):
            _leave_secret(job, launch, args.pop() if secret and not word.startswith("--") else name)
        elif value and SECRET.search(value):
            option = args.pop() if args and args[-1].startswith("-") and "=" not in args[-1] else ""
            why = "a secret: revoke it, and let the script read it from its environment"
            job.leave(launch.line, f"argument {option} ...".replace("  ", " "), why)
        elif value is None:
            option = args.pop() if args and args[-1].startswith("--") and "=" not in args[-1] else ""
            text = " ".join(filter(None, [option, _raw(launch, word)]))
            from_sbatch = re.search(r"\$\{?[@*1-9]", text)
            reason = "from sbatch's command line: add it behind --" if from_sbatch else "known only when the job runs"
            if job.environment.get(symbol_name(word, "?")):
                reason = "a variable of your shell, which may be a secret: write its value yourself"
            job.leave(launch.line, f"argument {text}", reason)
        else:
            args.append(value)
        secret = not secret and not equals and word.startswith("--") and is_secret_name(word)
    if args:
        job.set("train.args", args)


def _raw(launch: Launch, word: str) -> str:
    """Return an argument as it is written."""
    return next((raw for raw in launch.command.words if word in expand_words(raw, launch.scope)), word)


def _leave_secret(job: Imported, launch: Launch, option: str) -> None:
    name = option.lstrip("-").replace("-", "_").upper()
    job.add("environment_from", name)
    job.leave(launch.line, f"argument {option} ...", f"a secret: let the script read {name} from its environment")


def _ranks(job: Imported, launch: Launch) -> None:
    asked = job.script.job
    if launch.kind == "python":
        step = launch.step.resources if launch.step and not launch.step.fan_out else None
        ranks = (step.tasks_per_node if step else 1) or 1
    else:
        ranks = ranks_per_launcher(launch) or 0
        if launch.kind == "torchrun" and launch.option("nproc-per-node") is None and not launch.opaque:
            ranks = 1
        if symbol_name(launch.option("nproc-per-node") or "", "?"):
            ranks = 0
    if ranks and ranks != asked.gpus_per_node:
        job.set("resources.ranks_per_node", ranks)
    reads = re.search(r"SLURM_(PROCID|LOCALID|NTASKS)", job.script.text)
    if launch.kind == "python" and launch.step and (reads or ranks > 1):
        why = "ranks are torchrun's: the program must read RANK, LOCAL_RANK and WORLD_SIZE, or set launch.mode: srun"
        job.leave(launch.line, f"srun python, {ranks} task(s) per node", why)


def _container(job: Imported, launch: Launch, words: list[str]) -> None:
    options = launch.step.options if launch.step else {}
    at = next((at for at, word in enumerate(words) if word.rpartition("/")[2] in ("apptainer", "singularity")), None)
    if "container-image" in options:
        job.set("container.runtime", "pyxis")
        _image(job, launch, options["container-image"])
        for bind in filter(None, options.get("container-mounts", "").split(",")):
            _bind(job, launch, bind)
        for name in options:
            if name.startswith("container") and name not in ("container-image", "container-mounts"):
                job.leave(launch.line, f"--{name}={options[name]}", "option of pyxis")
    elif at is not None and words[at + 1 : at + 2] in (["exec"], ["run"], ["shell"]):
        job.set("container.runtime", words[at].rpartition("/")[2])
        _runtime_options(job, launch, words[at + 2 :])
    elif "shifter" in words:
        job.leave(launch.line, "shifter", "make an image with slurmddp build-image, and name it in container.image")
    else:
        job.set("container.runtime", "none")
        if "uv" in words:
            add_setup(job, "source .venv/bin/activate", {})
            job.leave(launch.line, "uv run", "setup activates .venv instead")
        launcher = re.compile(r"(/[\w./-]*/)(python[\d.]*|torchrun|accelerate)")
        if python := next(filter(None, map(launcher.fullmatch, words)), None):
            job.set("container.python", python[1] + (python[2] if python[2].startswith("python") else "python3"))


def _runtime_options(job: Imported, launch: Launch, words: list[str]) -> None:
    at = 0
    while at < len(words) and words[at].startswith("-"):
        name, equals, value = words[at].partition("=")
        at += 1
        if not equals and name in _WITH_VALUE and at < len(words):
            value, at = words[at], at + 1
        if name in ("-B", "--bind"):
            for bind in value.split(","):
                _bind(job, launch, bind)
        elif name in ("--nv", "--rocm", "-e", "--cleanenv"):
            continue  # slurmddp chooses them by the site
        elif name.startswith("--") and (text := job.text(f"{name}={value}" if value else name)):
            job.add("container.options", text)
        else:
            job.leave(launch.line, f"{name} {value}".strip(), "option of the container runtime")
    if at < len(words):
        _image(job, launch, words[at])


def _image(job: Imported, launch: Launch, word: str) -> None:
    image = job.path(word)
    if image is None or "://" in image:
        job.leave(launch.line, word, "set container.image to a file (slurmddp build-image makes one)")
    else:
        job.set("container.image", job.inside(image))


def _bind(job: Imported, launch: Launch, bind: str) -> None:
    text = job.path(bind.strip())
    if text and re.fullmatch(r"[^:,\"\\]+(:[^:,\"\\]+(:(ro|rw))?)?", text):
        job.add("container.binds", text)
    else:
        job.leave(launch.line, f"bind {bind}", "container.binds: source:destination:ro")
