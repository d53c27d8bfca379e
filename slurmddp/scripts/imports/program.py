"""The launch: what runs on the ranks, how many of them, and in which container."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slurmddp.container import SIF_PROGRAMS
from slurmddp.errors import UserError
from slurmddp.job.sensitive import is_secret_name
from slurmddp.scripts.check.launches import Launch, Step, base
from slurmddp.scripts.check.rules.common import nodes_option, services
from slurmddp.scripts.check.rules.launchers import ranks_per_launcher
from slurmddp.scripts.check.rules.text import SECRET
from slurmddp.scripts.check.shell import Command
from slurmddp.scripts.check.values import number, symbol_name
from slurmddp.scripts.imports.commands import add_setup, given_by_others, only_prints
from slurmddp.scripts.imports.imported import Imported
from slurmddp.visible import one_line

#: How agents meet is slurmddp's own matter.
_MEETING = re.compile(
    r"nnodes|nproc-per-node|rdzv-.*|master-.*|node-rank|standalone|num-(machines|processes|nodes|gpus)|machine-rank|"
    r"main-process-.*|multi-gpu|same-network|use-env|m|module|no-python"
)
_SRUN = {
    "nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus", "gpus-per-node", "gres", "label", "unbuffered",
    "kill-on-bad-exit", "wait", "jobid", "mem", "exclusive", "overlap", "exact", "job-name", "partition", "account",
}  # fmt: skip
_SAME_FOR_RANKS = {
    "cpu-bind", "label", "unbuffered", "kill-on-bad-exit", "wait", "overlap", "exact", "quiet", "verbose",
}  # fmt: skip
_MPI = {"mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prun", "composer", "horovodrun"}
_GLOB = re.compile(r"[*?]|\{[^{}\s]*(,|\.\.)[^{}\s]*\}")
_TRANSPARENT = {"exec", "time", "command", "nohup", "env"}
_WITH_VALUE = {"-B", "--bind", "--mount", "--pwd", "-W", "--env", "-H", "--home", "-o", "--overlay", "--workdir", "-S",
               "--scratch", "--env-file", "--app", "--add-caps", "--drop-caps", "--security"}  # fmt: skip


def main_launch(job: Imported) -> Launch | None:
    """Return the launch that the job is about: the last one of a launcher, else of python, best under srun."""
    found = job.script.found.launches
    for kinds in (("torchrun", "accelerate", "deepspeed"), ("python",)):
        some = [each for each in found if each.kind in kinds and each.program]
        if some:
            chosen = next((each for each in reversed(some) if each.step), some[-1])
            for each in found:
                if each is not chosen and not _same_start(each, chosen):
                    text = " ".join([each.kind, *each.program])
                    job.leave(each.line, text, "another program: a job file starts only one, once")
            return chosen
    return None


def _same_start(one: Launch, other: Launch) -> bool:
    """Return whether two launches are the same one on several nodes."""
    steps = one.step is not None and other.step is not None and one.step.fan_out and other.step.fan_out
    return steps and (one.kind, one.program) == (other.kind, other.program) and (one.background or other.background)


def refuse_others(job: Imported, started: Sequence[tuple[int, str]] = ()) -> None:
    """Refuse what slurmddp does not run, by name and line. started: what bash starts of it. Raises UserError."""
    script = job.script
    found = [
        (each.line, "heterogeneous jobs") for each in script.directives if each.value in ("hetjob", "packjob")
    ]  # fmt: skip
    found += started
    found += [(each.line, "several programs side by side") for each in services(script) if not only_prints(job, each)]
    for command in script.commands:
        words = command.words or [""]
        names = [base(word) for word in words]
        if any(word.startswith("--het-group") for word in words):
            found.append((command.line, "heterogeneous jobs"))
        elif "ray" in names and {"start", "up", "symmetric-run"} & set(names):
            found.append((command.line, "Ray"))
        elif _MPI & set(names[:8]) and names[0] not in ("module", "ml", "which", "echo", "export"):
            found.append((command.line, next(name for name in names if name in _MPI)))
    if found:
        kinds: dict[str, list[str]] = {}
        for line, kind in sorted(found):
            kinds.setdefault(kind, []).append(str(line))
        named = "; ".join(f"{kind} (line {', '.join(dict.fromkeys(lines))})" for kind, lines in kinds.items())
        raise UserError(
            f"uses what slurmddp does not run: {named}",
            where=one_line(str(script.path)),
            todo="submit the script with sbatch as before; slurmddp starts one program, with one process per rank",
        )


def launch_commands(job: Imported, launch: Launch | None) -> list[Command]:
    """Return the commands that start the program: the launcher's, and those around it."""
    found = job.script.found.launches
    started = [each.command for each in found] + [each.step.command for each in found if each.step]
    return started if launch else []


def carry_program(job: Imported, launch: Launch) -> None:
    """Carry over program, arguments, ranks and container."""
    words = list(launch.words)
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
    _interpreter(job, launch)
    _options(job, launch)
    _start(job, launch)
    before = [word for word in launch.program[:at] if word not in ("-u", "-m")]
    if before:
        job.leave(launch.line, " ".join(before), f"option of {launch.kind}")
    _environment(job, launch)
    around = list(launch.wrapper)
    while around and around[0] in _TRANSPARENT:
        around.pop(0)
    if around and base(around[0]) not in (*SIF_PROGRAMS, "shifter", "uv"):
        job.leave(launch.line, " ".join(around), f"in front of {launch.kind}")


def _environment(job: Imported, launch: Launch) -> None:
    """Carry over what only the tasks have: of env, of a shell in the task, or before the program's name."""
    batch = {name for _, name in job.script.found.assigned}
    for name, value in launch.environment.items():
        if name in batch or given_by_others(name) or not re.search(rf"\b{re.escape(name)}=", job.script.text):
            continue
        if (text := job.text(value)) is not None:
            job.keys[("environment", name)] = text
        else:
            job.leave(launch.line, f"{name}=...", "its value is known only when the job runs")


def _start(job: Imported, launch: Launch) -> None:
    """Leave what decides whether, how often, on which nodes and with which files the program starts."""
    step, nodes, text = launch.step, job.script.job.nodes, " ".join(launch.command.words)
    outer = step.command if step else launch.command
    calls = [each for each in job.script.commands if each.words[:1] == [outer.function] and not each.branch]
    if outer.branch or (outer.function and len(calls) != 1):
        job.leave(launch.line, text, "in a branch or function: the job file always starts it, once")
    elif launch.unsure:
        job.leave(launch.line, text, "whether it starts so is known only when the job runs")
    if outer.loops and not (step and step.fan_out):
        job.leave(launch.line, text, "in a loop: the job file starts it once")
    told = number(nodes_option(launch))
    if step and step.resources.gpus_per_node != job.script.job.gpus_per_node:
        job.leave(step.line, text, "the step has other GPUs than the job")
    for name in {"cpus-per-task", "mem"} & (step.options.keys() if step else set()):
        if step and not _as_the_job(job, step, name):
            job.leave(step.line, f"--{name}={step.options[name]}", "the step has other limits than the job")
    if step is None:
        if (nodes or 1) > 1:
            job.leave(launch.line, text, f"starts on the first of {nodes} nodes only; the job file starts it on all")
        elif told is not None and nodes is not None and told != nodes:
            job.leave(launch.line, text, f"expects {told} nodes; the script asks for {nodes}")
    elif step.fan_out:
        if told != nodes:
            job.leave(step.line, text, "known only when the job runs on how many nodes it starts")
    elif step.opaque:
        for word in step.opaque:
            job.leave(launch.line, _raw(launch, word), "options of srun that are known only when the job runs")
    elif step.resources.unread or step.resources.nodes != nodes or (told is not None and told != nodes):
        job.leave(step.line, text, "starts on a part of the nodes, or on nodes that are known only when the job runs")
    if nodes is None and told not in (None, 1):
        job.leave(launch.line, text, "set resources.nodes: no #SBATCH line names the nodes")
    before = [word for word in (step.before if step else ()) if word not in _TRANSPARENT]
    if before:
        job.leave(launch.line, " ".join(before), "in front of srun")
    for command in {id(each): each for each in (launch.command, step.command if step else launch.command)}.values():
        for sign, target in (("<", command.input), (">", command.output)):
            if target and target != "/dev/null":
                job.leave(command.line, f"{sign} {target}", "a file for the ranks' standard input or output")
        if command.then in ("|", "|&"):
            job.leave(command.line, f"{text} |", "a pipe behind the launch: slurmddp logs keeps the output")
        if command.here and command is launch.command and base(command.words[0]) not in ("bash", "sh", "cat"):
            job.leave(command.line, "<<", "text for the standard input of the ranks")


def _as_the_job(job: Imported, step: Step, name: str) -> bool:
    """Return whether an option of srun gives a node what the job's options give it."""
    asked, value = job.script.job, step.options[name]
    if name == "mem":
        return value == job.script.option("mem")
    tasks = 1 if step.fan_out else step.resources.tasks_per_node or 0
    return tasks > 0 and (number(value) or 0) * tasks == (asked.cpus_per_task or 0) * (asked.tasks_per_node or 0)


def _interpreter(job: Imported, launch: Launch) -> None:
    """Name the Python that starts the ranks, unless it is python or python3 in PATH."""
    name = job.text(launch.name)
    folder, slash, program = (name or "").rpartition("/")
    if name is None:
        job.leave(launch.line, _raw(launch, launch.name), "the Python is known only when the job runs")
    elif slash or re.fullmatch(r"python\d\.\d+", program):
        python = f"{folder}{slash}{program if program.startswith('python') else 'python3'}"
        job.set("container.python", job.inside(python) if slash else python)


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
            job.set("launch.max_restarts", number(value))
        elif not _MEETING.fullmatch(name):
            job.leave(launch.line, f"--{name}={value}", f"option of {launch.kind}")
    for word in launch.opaque:
        job.leave(launch.line, _raw(launch, word), f"options of {launch.kind} that are known only when the job runs")
    for name, value in (launch.step.options if launch.step else {}).items():
        line, text = launch.step.line if launch.step else 0, f"--{name}={value}".removesuffix("=")
        if name == "export":
            for part in re.split(r",(?=\w+=|ALL\b)", value):
                variable, equals, given = part.partition("=")
                if equals and (known := job.text(given)) is not None:
                    job.keys[("environment", variable)] = known
                elif part != "ALL":
                    job.leave(line, f"--export={variable}=...", "set its variables in environment")
        elif name == "mpi" and job.keys.get(("launch", "mode")) == "srun":
            job.set("launch.mpi", value)
        elif name not in _SRUN and not name.startswith("container"):
            each_node = launch.step and launch.step.fan_out and name in ("nodelist", "relative")  # judged by _start
            same = name in _SAME_FOR_RANKS or (name == "mpi" and launch.kind != "python") or each_node
            job.leave(line, text, "option of srun", lost=not same)


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
            text = " ".join(filter(None, [option, _raw(launch, word, option)]))
            from_sbatch = re.search(r"\$\{?[@*1-9]", text)
            reason = "from sbatch's command line: add it behind --" if from_sbatch else "known only when the job runs"
            if job.environment.get(symbol_name(word, "?")):
                reason = "a variable of your shell, which may be a secret: write its value yourself"
            job.leave(launch.line, f"argument {text}", reason)
        elif _GLOB.search(value) and not re.search(r"['\"][^'\"]*[*?{]", raw := _raw(launch, word)):
            job.leave(launch.line, f"argument {raw}", "bash replaces it by names of files or several words")
        else:
            args.append(value)
        secret = not secret and not equals and word.startswith("--") and is_secret_name(word)
    if args:
        job.set("train.args", args)


def _raw(launch: Launch, word: str, option: str = "") -> str:
    """Return an argument as it is written. option: the word before it."""
    written: list[str] = [*launch.command.words, *(launch.step.command.words if launch.step else ())]
    name = symbol_name(word, "?")
    parts = [part for part in re.split("\0[^\0]*\0", word) if part]
    if option in written[:-1]:
        return written[written.index(option) + 1]
    for raw in written:
        if name and re.search(rf"\$\{{?{name}\b|\$[@*]", raw):
            return raw
        if word == raw.strip("'\"") or (not name and "\0" in word and re.search("[$`]", raw) and _holds(raw, parts)):
            return raw
    return word


def _holds(raw: str, parts: list[str]) -> bool:
    return all(part in raw for part in parts)


def _leave_secret(job: Imported, launch: Launch, option: str) -> None:
    name = option.lstrip("-").replace("-", "_").upper()
    job.add("environment_from", name)
    job.leave(launch.line, f"argument {option} ...", f"a secret: let the script read {name} from its environment")


def _ranks(job: Imported, launch: Launch) -> None:
    asked = job.script.job
    if launch.kind == "python":
        step = launch.step.resources if launch.step and not launch.step.fan_out else None
        ranks = (step.tasks_per_node or asked.tasks_per_node or 0) if step else 1
        if step and not step.tasks_per_node and not (launch.step and launch.step.opaque):
            job.leave(launch.line, "srun python", "its tasks per node are not the same on each node, or unknown")
    else:
        ranks = ranks_per_launcher(launch) or 0
        if launch.kind == "torchrun" and launch.option("nproc-per-node") is None and not launch.opaque:
            ranks = 1
        told = launch.option("nproc-per-node" if launch.kind == "torchrun" else "num-processes") or ""
        if "\0" in told or (launch.kind == "accelerate" and told and not ranks):
            ranks = 0
            job.leave(launch.line, f"ranks: {told}", "known only when the job runs: set resources.ranks_per_node")
        each_node = launch.step.resources.tasks_per_node if launch.step and not launch.step.fan_out else 1
        if each_node not in (1, None):
            job.leave(launch.line, f"srun {launch.name}", f"starts it {each_node} times per node; the job file once")
        per_rank = "torch.distributed.launch" in launch.command.words and "use-env" not in launch.options
        if launch.kind == "deepspeed" or per_rank:
            job.leave(launch.line, launch.name, "gives the program --local_rank; slurmddp sets LOCAL_RANK only")
    if ranks and ranks != asked.gpus_per_node:
        job.set("resources.ranks_per_node", ranks)
    if launch.kind == "python" and launch.step and ranks:
        if "container-image" in launch.step.options:
            why = "torchrun starts the ranks: the program must read RANK, LOCAL_RANK and WORLD_SIZE"
            job.leave(launch.line, f"srun python, {ranks} task(s) per node", why)
        else:
            job.set("launch.mode", "srun")
        if launch.step.resources.gpus_per_task or "gpu-bind" in launch.step.options:
            job.leave(
                launch.step.line,
                "--gpus-per-task, --gpu-bind",
                "each rank sees all GPUs: choose by LOCAL_RANK",
            )


def _container(job: Imported, launch: Launch, words: list[str]) -> None:
    options = launch.step.options if launch.step else {}
    at = next((at for at, word in enumerate(words) if word.rpartition("/")[2] in SIF_PROGRAMS), None)
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
        if words[at + 1] != "exec":
            job.leave(launch.line, f"{words[at]} {words[at + 1]}", "starts the image's own script; slurmddp uses exec")
    elif "shifter" in words:
        job.leave(launch.line, "shifter", "make an image with slurmddp build-image, and name it in container.image")
    else:
        job.set("container.runtime", "none")
        if "uv" in words:
            add_setup(job, "source .venv/bin/activate", {})
            given = [word for word in launch.wrapper if word.startswith("-")]
            job.leave(launch.line, " ".join(["uv run", *given]), "setup activates .venv instead", lost=bool(given))


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
        job.add("container.binds", job.inside(text))
    else:
        job.leave(launch.line, f"bind {bind}", "container.binds: source:destination:ro")
