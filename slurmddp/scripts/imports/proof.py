"""Proof of an import: what the job file starts is compared with what the script starts.

The job file is planned as `submit` plans it and written as a script. Bash evaluates it in the same imagined jobs as the
script. Each program that only one of them starts, and each difference between both launches, is lost by name."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from slurmddp.container import SIF_PROGRAMS
from slurmddp.job.plan.build import make_plan
from slurmddp.job.plan.model import Context, Plan
from slurmddp.launch.prepare import Prepared
from slurmddp.records.redact import is_secret_name
from slurmddp.scripts.check.directives import exported
from slurmddp.scripts.check.launches import launcher_options, programs, srun_options
from slurmddp.scripts.check.recorded import beside, imagined, place
from slurmddp.scripts.check.script import parse
from slurmddp.scripts.imports import reader
from slurmddp.scripts.imports.imported import Imported
from slurmddp.scripts.imports.prepare import VENV
from slurmddp.scripts.sandbox.evaluate import SUBMIT, Evaluated, Started, Unavailable, evaluate, number

#: What starts the words behind it, and changes nothing of them that the job file does not hold.
_TRANSPARENT = {"srun", "apptainer", "singularity", "nohup", "setsid", "time", "stdbuf"}
#: What only shows something.
_HARMLESS = {
    "hostname", "squeue", "sinfo", "sacct", "scontrol", "nvidia-smi", "which", "rocm-smi", "nvcc", "id", "nproc", "df",
    "du", "free", "uname", "ip", "ifconfig", "ss", "lsof", "netstat", "lscpu", "type", "getent", "sync", "ibstat",
    "ibv_devinfo", "lspci", "ps", "top", "lsmod", "rocminfo", "clear", "whoami", "git",
}  # fmt: skip
_BY_CONFIG = "as the config file says"  # which `_ranks` has read
_OF_PROGRAM = ("program", "arguments", "python", "folder")
_STREAMS = ("standard input", "standard output", "standard error")
_NO_FILE = re.compile(r"/dev/null|/\.sandbox|/proc/")


class Launched(NamedTuple):
    """What one task starts. facts: by name, as a reader sees them."""

    start: Started
    facts: dict[str, Any]
    variables: dict[str, str]


def prove(job: Imported, line: int, runs: Sequence[Evaluated], prepared: Prepared) -> None:
    """Leave, as lost, all in which the job file would start something else than the script. line: of its launch."""
    plan = make_plan(prepared.resolved, Context(cwd=SUBMIT, python="python3"))
    script = parse(rendered(plan), job.script.path)
    mine = imagined(script, {}, {})[0]
    theirs = [each for each in runs if len(each.job.hosts) == len(mine.hosts)]  # another has more nodes than asked for
    given = _exported(job)
    jobs = [
        replace(
            each.job, tasks_per_node=mine.tasks_per_node, slurm=mine.slurm, folder="",
            variables={name: value for name, value in each.job.variables.items() if name not in given},
        )
        for each in theirs
    ]  # fmt: skip
    files = {**beside(job.script), **({job.run_name: job.run_text} if job.run_text else {})}
    try:
        ours = evaluate(script.text, jobs, place(job.script.path), files)
    except Unavailable:
        ours = []
    if not ours or not all(each.ended for each in ours):
        job.leave(line, "the whole script", "not proven: bash could not evaluate what the job file starts")
        return
    for one, other in zip(theirs, ours, strict=True):
        if not _compare(job, one, other, plan):
            if "program" not in job.named:
                why = "bash does not start the job file's program when it evaluates the script"
                why = f"{job.run_name} would not start the same in each task" if job.run_text else why
                job.leave(line, "the launch", why, about="program")
            return


def rendered(plan: Plan) -> str:
    """Return a script that starts what the plan starts, in the way of node.sh."""
    ranks, nodes, container, program = plan.nodes.ranks_per_node, plan.nodes.min, plan.container, plan.program
    inside = [f"cd {_path(plan.workdir)}"]
    for group in plan.environment:
        shown = [each for each in group.variables if not each.base]
        inside += [f"export {container.environment_prefix}{each.name}={shlex.quote(each.value)}" for each in shown]
    binds, image = [bind.spec for bind in container.binds], list[str]()
    options = [f"--nodes={nodes}", f"--ntasks-per-node={ranks if plan.srun else 1}", *(plan.srun or (0, ()))[1]]
    if container.made_by_srun:
        options += [f"--container-image={container.image}", f"--container-workdir={plan.workdir}"]
        options += [f"--container-mounts={','.join(binds)}", *container.options]
    elif container.image:
        image = container._replace(options=(*container.options, f"--pwd={plan.workdir}")).words(binds)
    words = program.words(program.source)
    python, folder = container.python, container.python.rpartition("/")[0]
    launcher = [python, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={ranks or 'gpu'}"]
    if plan.accelerate:
        launcher = [f"{folder}/accelerate" if folder else "accelerate", "launch", f"--config_file={plan.accelerate}"]
        launcher += [f"--num_machines={nodes}", f"--num_processes={nodes * (ranks or 0)}"]
    if plan.job.launch.max_restarts is not None:
        launcher.append(f"--max-restarts={plan.job.launch.max_restarts}")
    if plan.srun:
        starts = [words if program.bash else [python, *words]]
    else:
        starts = [[*launcher, "--no-python", *words], words] if program.bash else [[*launcher, *words]]
    inside += [" ".join(map(_path, [*image, *each])) for each in starts]
    text = "\n".join([*plan.job.setup, *inside])
    head = [f"#SBATCH {option}" for option in plan.sbatch]
    return "\n".join(["#!/bin/bash", *head, f"srun {' '.join(map(_path, options))} bash -c {shlex.quote(text)}", ""])


def _path(text: str) -> str:
    """Return a word in which a variable that is not set here stays one."""
    return f'"{text}"' if re.search(r"\$\{[A-Za-z_]\w*\}", text) else shlex.quote(text)


def _compare(job: Imported, theirs: Evaluated, ours: Evaluated, plan: Plan) -> bool:
    """Return whether both start the same program."""
    launched = list(_launched(job, ours))
    mine = _merged(launched)
    started = list(_launched(job, theirs))
    name = mine.facts["program"].rpartition("/")[2] if mine else None
    main = [each for each in started if each.facts["program"].rpartition("/")[2] == name]
    if not mine or not main:
        return False
    _others(job, theirs, ours, [each.start for each in main])
    spread, expected = _spread(theirs, main), {**mine.facts, **_spread(ours, [mine])}
    added = [bind.spec for bind in plan.container.binds if bind.by_site or bind.destination in (plan.cwd, plan.workdir)]
    implied = {job.real(each) for each in added} - {bind for each in main for bind in each.facts["binds"]}
    implied |= set((job.site.get("container") or {}).get("options") or ())
    for name in ("binds", "options of the container"):
        expected[name] = tuple(each for each in mine.facts[name] if each not in implied)
    for each in main:
        for name, found in {**each.facts, **spread}.items():
            elsewhere = name == "program" and "folder" in job.named  # relative to it
            if found not in (expected[name], _BY_CONFIG) and name not in job.named and not elsewhere:
                why = f"the job file has: {_shown(expected[name])}"
                job.leave(each.start.line, f"{name}: {_shown(found)}", why, about=name)
        _variables(job, each, [one for one in launched if one.start.procid is not None], plan)
    return True


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _merged(mine: list[Launched]) -> Launched | None:
    """Return the launch of the job file. run.sh starts the program: the launcher of run.sh gives the ranks."""
    launcher = next((each for each in mine if each.facts["program"].endswith("/bash")), None)
    program = next((each for each in mine if each is not launcher), None)
    same = all(each.facts == program.facts for each in mine if program and not each.facts["program"].endswith("/bash"))
    if launcher is None or program is None or not same:
        return program if same else None  # run.sh is another one in each task
    return program._replace(facts=launcher.facts | {name: program.facts[name] for name in _OF_PROGRAM})


def _launched(job: Imported, run: Evaluated) -> Iterator[Launched]:
    for start, kind, arguments in programs(run):
        options, end, _ = launcher_options(kind, arguments)
        program = reader.program_of(options, arguments[end:])
        facts: dict[str, Any] = _container(run, start)
        folder, path = facts["folder"], start.words[0]
        python = os.path.dirname(_whole(start.folder, path)) if "/" in path else ""
        facts |= {
            "program": program.word if program.module else _whole(folder, program.word),
            "arguments": program.arguments,
            "python": python or (start.name if re.fullmatch(r"python\d\.\d+", start.name) else "python of PATH"),
            "options of the launcher": sorted(
                f"--{name}={_whole(folder, value) if name == 'config-file' else value}"
                for name, value in options.items() if not reader.meets(name, value) and name not in reader.LOGS
            ),
            "ranks per node": _ranks(run, start, kind, options),
            "how ranks start": "srun" if kind == "python" and start.step else "torchrun",
            **dict(zip(_STREAMS, map(_file, start.streams), strict=True)),
        }  # fmt: skip
        given = {name: start.environment[name] for name in _exported(job) if name in start.environment}
        variables = {key: job.real(value) for key, value in {**given, **start.added}.items()}
        if precision := options.get("mixed-precision"):
            variables["ACCELERATE_MIXED_PRECISION"] = precision
        for name, value in facts.items():
            facts[name] = job.real(value) if isinstance(value, str) else tuple(map(job.real, value))
        facts["binds"] = tuple(sorted(facts["binds"]))
        yield Launched(start, facts, variables)


def _exported(job: Imported) -> dict[str, str]:
    return exported(job.script.option("export"))


def _whole(folder: str, path: str) -> str:
    return os.path.normpath(os.path.join(folder, path)).replace("//", "/", 1)


def _file(stream: str) -> str:
    return "none" if _NO_FILE.match(stream) else "a pipe" if stream.startswith(("pipe:", "socket:")) else stream


def _ranks(run: Evaluated, start: Started, kind: str, options: Mapping[str, str]) -> str:
    nodes, tasks = (number(start.task.get(name, "")) or 1 for name in ("SLURM_STEP_NUM_NODES", "SLURM_NTASKS"))
    if kind == "python":
        return str(tasks // nodes) if tasks % nodes == 0 else f"{tasks} on {nodes} nodes"
    if "config-file" in options and "num-processes" not in options:
        return _BY_CONFIG
    given = {"nproc-per-node": start.environment.get("PET_NPROC_PER_NODE", "1"), **options}
    count = reader.ranks_of(kind, given.get)
    count = str(run.job.gpus) if count in ("gpu", "auto") or (count is None and run.job.gpus == 1) else count
    if count is None:
        return f"those of {start.name} by default"
    return f"{count}" + (f" in each of {tasks // nodes} launchers" if tasks // nodes > 1 else "")


def _spread(run: Evaluated, launched: Iterable[Launched]) -> dict[str, str]:
    """Return on how many nodes a launch starts, and how often."""
    starts = [each.start for each in launched]
    hosts = {each.task.get("SLURMD_NODENAME") for each in starts}
    most = max(number(each.task.get("SLURM_STEP_NUM_NODES", "")) or 1 for each in starts)
    times = Counter((each.task.get("SLURMD_NODENAME"), each.procid) for each in starts)
    return {"nodes": str(max(most, len(hosts))), "starts of each task": str(max(times.values()))}


def _container(run: Evaluated, start: Started) -> dict[str, Any]:
    """Return the facts of a launch that its container decides, the folder among them."""
    task = [each for each in run.started if (each.step, each.procid) == (start.step, start.procid)]
    around = [each for each in task if each.name in SIF_PROGRAMS and each.order < start.order and start.contained]
    step = next((each for each in run.started if each.order == start.step and start.step), start)
    outer = around[-1] if around else step
    found = reader.container_of(outer.words, {} if around else dict(srun_options(list(step.words[1:]))[0]))
    folder, image = start.folder, found.image
    if found.runtime != "none" and folder == outer.folder:  # else a shell in the container may have gone elsewhere
        default = "that of the image" if found.runtime == "pyxis" else folder
        folder = default if found.folder is None else _whole(folder, found.folder)
    if "://" not in image and (found.runtime != "pyxis" or re.match(r"[./$~]", image)):
        image = _whole(outer.folder, image)
    kind = " ".join(filter(None, [found.runtime, found.command, image]))
    return {
        "folder": folder,
        "container": "none" if found.runtime == "none" else kind,
        "binds": sorted({_spec(outer.folder, bind) for bind in found.binds}),
        "options of the container": sorted(found.more),
    }


def _spec(folder: str, bind: str) -> str:
    source, destination, mode = [*bind.split(":"), "", ""][:3]
    source = _whole(folder, source)
    return f"{source}:{destination or source}:{mode or 'rw'}"


def _variables(job: Imported, their: Launched, mine: Sequence[Launched], plan: Plan) -> None:
    asked = {**plan.job.environment, **plan.job.network.variables}
    for name in sorted((their.variables.keys() | asked.keys()) - job.named - set(plan.job.environment_from)):
        found, all_told = their.variables.get(name), {each.variables.get(name) for each in mine}
        told = next((each for each in all_told if each != found), found)
        by_site = found is None and name in job.site_variables()
        by_key = name in reader.INTERFACES and plan.job.network.interface == found
        if found == told or by_site or by_key or reader.given_by_others(name):
            continue
        shown = "..." if is_secret_name(name) else found
        why = "the ranks would not have it" if told is None else f"the job file sets {name}={told}"
        text = f"unset {name}" if found is None else f"{name}={shown}"
        job.leave(job.line_of(their.start.line, name), text, why, about=name)


def _others(job: Imported, theirs: Evaluated, ours: Evaluated, main: Sequence[Started]) -> None:
    """Leave each program that the script starts beside the launch and the job file does not."""
    known = {_words(job, each) for each in ours.started}
    venv = VENV in job.keys.get(("setup",), [])
    steps = {each.step for each in theirs.started}
    for each in theirs.started:
        around = each.name in _TRANSPARENT or (venv and each.words[:2] == ("uv", "run") and each.words[2][:1] != "-")
        if "--pty" in each.words and each.order not in steps:  # a shell, which waits for its user
            around = False
        if each.name in SIF_PROGRAMS:  # with a program behind the image
            around = reader.container_of(each.words, {}).image not in ("", each.words[-1])
        name = each.words[1] if each.name == "source" and each.words[1:] else each.name
        said = any(one.lost and one.line == each.line and name in one.text for one in job.left)
        if any(each is one for one in main) or around or _words(job, each) in known or said:
            continue
        if not _only_prints(job, each):
            front = any(each.words[-len(one.words) :] == one.words for one in main)
            text = " ".join(each.words[: len(each.words) - len(main[0].words)] if front else each.words)
            if text == str(theirs.job.unknown):  # the text of a file that is not here
                text = job.script.lines[each.line - 1].strip()
            job.leave(each.line, job.real(text), "in front of the launch" if front else "the script also starts this")


def _only_prints(job: Imported, start: Started) -> bool:
    """Return whether a program only shows something, or what it prints becomes a value, which is known or not."""
    if "open(" in " ".join(start.words):
        return False
    text = "".join(job.script.lines[start.line - 1 : start.line])
    value = re.match(rf"\s*(export\s+)?\w+=.*\$\(.*{re.escape(start.name)}", text)
    shows = start.name in _HARMLESS or start.words[1:2] == ("-c",) or start.words[1:] in (("--version",), ("-V",))
    return shows or (start.streams[1].startswith("pipe:") and value is not None)


def _words(job: Imported, start: Started) -> tuple[str, ...]:
    return (start.name, *map(job.real, reader.with_whole_paths(start)[1:]))
