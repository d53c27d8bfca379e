"""Proof of an import: the launch of the job file is compared with what bash starts when it evaluates the script.

Whatever the script starts and the job file does not, or differently, and no comment of the job file names, is lost:
the import then fails, by name. What cannot be evaluated is not proven."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from slurmddp.container import SIF_PROGRAMS
from slurmddp.scripts.check.launches import base, launcher_options, programs
from slurmddp.scripts.check.recorded import record, unset_names
from slurmddp.scripts.imports.commands import given_by_others
from slurmddp.scripts.imports.imported import Imported, shown_variable
from slurmddp.scripts.sandbox.evaluate import HOME, SUBMIT, Evaluated, Started, number

_WRAPPERS = {
    "srun", "apptainer", "singularity", "timeout", "nohup", "nice", "ionice", "numactl", "taskset", "stdbuf", "setsid",
    "time", "nsys", "ncu", "strace", "uv", "conda", "mamba", "micromamba", "poetry", "pixi",
}  # fmt: skip
#: Wrappers that change nothing of what the ranks do, or have a key.
_TRANSPARENT = {
    "srun", "apptainer", "singularity", "nohup", "setsid", "time", "uv", "stdbuf", "conda", "mamba", "micromamba",
}  # fmt: skip
#: What only shows something, or becomes a line of setup.
_HARMLESS = {
    "module", "ml", "source", ".", "ulimit", "hostname", "squeue", "sinfo", "sacct", "scontrol", "nvidia-smi", "which",
    "rocm-smi", "git", "nvcc", "id", "nproc", "df", "du", "free", "uname", "ip", "ifconfig", "ss", "lsof", "netstat",
    "spack", "lscpu", "type", "getent", "sync", "ibstat", "ibv_devinfo", "lspci", "python", "python3", "ps", "top",
}  # fmt: skip


def evaluated(job: Imported) -> tuple[Evaluated, ...] | None:
    """Return what the script starts from this shell; None, if bash cannot evaluate it. A variable that only the shell
    may set is another one in the second job: what follows from it is not known to a job file."""
    names = unset_names(job.script.text)
    here = {name: job.environment[name] for name in names if name in job.environment and shown_variable(name)}
    return record(job.script, here, {name: f"@{name}@" for name in names})


def prove(job: Imported, runs: tuple[Evaluated, ...] | None) -> None:
    """Leave, as lost, everything in which the job file would start something else than the script."""
    if runs is None:
        why = "not proven: bash could not evaluate it here (no user namespaces, or it does not end)"
        job.leave(1, "the whole script", why)
        return
    for run in runs[:2]:  # the others have more nodes than the job file
        for line, text, why in _differences(job, run):
            job.leave(line, text, why)


def refuse_started(job: Imported, runs: tuple[Evaluated, ...]) -> list[tuple[int, str]]:
    """Return the lines that start what slurmddp does not run, and its name."""
    kinds = {**dict.fromkeys(("mpirun", "mpiexec", "orterun", "prun"), "mpirun"), "ray": "Ray"}
    kinds |= {name: name for name in ("composer", "horovodrun")}
    return sorted({(each.line, kinds[each.name]) for run in runs for each in run.started if each.name in kinds})


def _differences(job: Imported, run: Evaluated) -> Iterator[tuple[int, str, str]]:
    ours = _Told(job)
    starts = list(programs(run))
    main = [each for each in starts if ours.is_program(each[1], each[2])]
    known = {line for line, _, _ in job.left} | set(job.prints)
    if not main:
        yield 1, "the launch", "bash does not start it when it evaluates the script"
        return
    for start in run.started:
        trains = any(start is each for each, _, _ in starts)
        is_main = any(start is each for each, _, _ in main)
        besides = (trains or start.name not in _WRAPPERS | _HARMLESS) and not is_main
        if besides and start.line not in known and not _prints(start):
            yield start.line, " ".join(start.words), "the script also starts this"
        if start.name in _WRAPPERS - _TRANSPARENT and start.line not in known:
            yield start.line, " ".join(start.words[:3]), "in front of the program"
    for start, kind, arguments in main:
        yield from ours.compare(start, kind, arguments)
    yield from ours.shape(run, main)


def _prints(start: Started) -> bool:
    return start.words[1:2] in (("-c",), ("--version",), ("-V",))


class _Told:
    """What the job file says, as the sandbox would show it."""

    def __init__(self, job: Imported) -> None:
        self.job = job
        self.tree: dict[str, Any] = {".".join(key): value for key, value in job.keys.items()}
        self.environment = {key[1]: str(value) for key, value in job.keys.items() if key[0] == "environment"}
        self.environment |= {
            key[2]: str(value) for key, value in job.keys.items() if key[:2] == ("network", "variables")
        }
        self.from_shell = set(job.keys.get(("environment_from",), []))
        self.setup = [str(each) for each in job.keys.get(("setup",), [])]
        self.args = [str(each) for each in self.tree.get("train.args", [])]
        self.lines = {line for line, _, _ in job.lost}
        self.texts = [text for _, text, _ in job.left]

    def real(self, text: str) -> str:
        """Return a recorded text with the folders and the name of the user instead of the sandbox's."""
        environment = self.job.environment
        text = text.replace(HOME, environment.get("HOME", HOME))
        there, here = SUBMIT, os.getcwd()
        while there != "/":  # `cd ..` leaves the folder of both
            text = text.replace(there, here if here != "/" else "/.")
            there, here = os.path.dirname(there), os.path.dirname(here)
        return text.replace("sandboxuser", environment.get("USER", "sandboxuser"))

    def path(self, text: str, folder: str = "") -> str:
        """Return a path of the job file as a whole path."""
        environment: Mapping[str, str] = {**self.job.environment, "PWD": os.getcwd(), "SLURM_SUBMIT_DIR": os.getcwd()}
        text = re.sub(r"\$\{?(\w+)\}?", lambda match: environment.get(match[1], match[0]), text)
        if text == "~" or text.startswith("~/"):
            text = environment.get("HOME", "~") + text[1:]
        return os.path.normpath(os.path.join(folder or os.getcwd(), text))

    def is_program(self, kind: str, arguments: list[str]) -> bool:
        program, _, _ = _program(kind, arguments)
        script = self.tree.get("train.script")
        if script is None:
            return program == self.tree.get("train.module")
        return base(program) == base(str(script))

    def compare(self, start: Started, kind: str, arguments: list[str]) -> Iterator[tuple[int, str, str]]:
        """Yield in what one task differs from a rank of the job file."""
        program, module, rest = _program(kind, arguments)
        folder = os.path.normpath(self.real(start.folder))
        args = [self.real(each) for each in rest]
        if args != self.args and not any(text.startswith(("argument", "environment")) for text in self.texts):
            there = next(
                (one for one in args if one not in self.args), next((o for o in self.args if o not in args), "")
            )
            yield start.line, f"arguments: {' '.join(args)}", f"the job file has others: {there}"
        if not module and self.path(self.real(program), folder) != self.path(str(self.tree.get("train.script"))):
            yield start.line, program, f"the job file starts {self.tree.get('train.script')}"
        workdir = str(self.tree.get("train.workdir", "."))
        if (
            folder != self.path(workdir)
            and "train.project" not in self.tree
            and not any(t.startswith(("cd", "--chdir")) for t in self.texts)
        ):
            yield start.line, f"cd {start.folder}", "the ranks would start in another folder"
        yield from self._variables(start)
        yield from self._container(start)
        for stream, name in ((0, "input"), (1, "output")):
            target = start.streams[stream]
            if not re.match(r"/dev/|pipe:|socket:|/\.sandbox", target) and start.line not in self.lines:
                yield start.line, self.real(target), f"a file for the ranks' standard {name}"
        python = str(self.tree.get("container.python", ""))
        found = self.real(start.words[0])
        if (
            "/" in found
            and not start.contained
            and os.path.dirname(self.path(found, folder)) != os.path.dirname(self.path(python))
        ):
            if not any(found in text for text in self.texts):
                yield start.line, found, "another Python than the job file's"

    def _variables(self, start: Started) -> Iterator[tuple[int, str, str]]:
        sourced = any(line.split()[:1] in (["source"], ["."], ["module"], ["set"]) for line in self.setup)
        script = self.job.script
        for name, value in start.added.items():
            assigned = script.assigned(name)
            if name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") and self.tree.get("network.interface") == value:
                continue
            written = re.search(rf"\b{re.escape(name)}=", script.text) is not None
            told = self.environment.get(name)
            if given_by_others(name) or name in self.from_shell or self.named(name):
                continue
            if told == self.real(value) or any(re.search(rf"\b{re.escape(name)}\b", each) for each in self.setup):
                continue
            if told is not None:
                yield assigned, f"{name}={self.real(value)}", f"the job file sets {name}={told}"
            elif written or not sourced:
                yield assigned, f"{name}={value}", "the ranks would not have it"
        for name, value in self.environment.items():
            real = self.real(start.environment.get(name, ""))
            if real != value and not name.startswith("ACCELERATE_") and name not in self.texts:
                yield script.assigned(name), f"{name}={real}", f"the job file sets {name}={value}"

    def named(self, name: str) -> bool:
        """Tell whether a comment of the job file names a variable."""
        return any(re.search(rf"\b{re.escape(name)}\b", text) for text in self.texts)

    def _container(self, start: Started) -> Iterator[tuple[int, str, str]]:
        runtime = str(self.tree.get("container.runtime", "none"))
        inside = runtime in SIF_PROGRAMS
        if start.contained != inside and start.line not in self.lines:
            yield start.line, "container", f"the job file has container.runtime: {runtime}"

    def shape(self, run: Evaluated, main: list[tuple[Started, str, list[str]]]) -> Iterator[tuple[int, str, str]]:
        """Compare ranks per node and nodes."""
        start, kind, arguments = main[0]
        steps = {each.step for each, _, _ in main}
        nodes = len(run.job.hosts)
        step_nodes = number(start.environment.get("SLURM_STEP_NUM_NODES", "")) or 1
        there = max(step_nodes, len(steps)) if start.step else 1
        tasks = number(start.environment.get("SLURM_NTASKS", "")) or 1 if start.step else 1
        per_node = max(1, tasks // step_nodes)
        if there != nodes and start.line not in self.lines:
            yield start.line, " ".join(start.words[:2]), f"starts on {there} of {nodes} nodes"
        options = launcher_options(arguments)[0] if kind != "python" else {}
        given = {"torchrun": "nproc-per-node", "accelerate": "num-processes", "deepspeed": "num-gpus"}
        count = options.get(given.get(kind, ""), "")
        if kind != "python" and not count.isdigit():
            return  # gpu, auto, or of a file: as the text says
        ranks = per_node if kind == "python" else (number(count) or 0) * per_node
        if kind == "accelerate":
            machines = number(options.get("num-machines") or str(nodes))
            if machines is None:
                return  # known only when the job runs, as the text says
            ranks = ranks // max(1, machines)
        told = self.tree.get("resources.ranks_per_node", self.tree.get("resources.gpus_per_node", ranks))
        if str(told) != str(ranks) and start.line not in self.lines:
            yield start.line, f"{ranks} ranks per node", f"the job file starts {told}"


def _program(kind: str, arguments: list[str]) -> tuple[str, bool, list[str]]:
    """(program, whether it is a module, its arguments) behind the options of a launcher or of python."""
    module = False
    if kind != "python":
        options, end, _ = launcher_options(arguments)
        module = bool(options.keys() & {"m", "module"})
        arguments = arguments[end:]
    at = 0
    while (at < len(arguments) and arguments[at].startswith("-")) or arguments[at : at + 1] == ["python"]:
        if arguments[at] == "-m":
            return arguments[at + 1] if at + 1 < len(arguments) else "", True, arguments[at + 2 :]
        at += 2 if arguments[at] in ("-W", "-X") else 1
    return (arguments[at] if at < len(arguments) else ""), module, arguments[at + 1 :]
