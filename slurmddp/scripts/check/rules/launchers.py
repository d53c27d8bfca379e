"""How often, and where, a launcher starts, how many ranks it starts there, and what reaches them."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator

from slurmddp.scripts.check.directives import components
from slurmddp.scripts.check.finding import Hit, rule
from slurmddp.scripts.check.launches import AGENTS, Launch
from slurmddp.scripts.check.rules.common import launch_rule, launches
from slurmddp.scripts.check.script import Script
from slurmddp.scripts.check.values import SET_BY_SHELL, names_in, symbol, symbol_name, symbols
from slurmddp.scripts.sandbox.evaluate import number

_SPREADS = re.compile(
    r"\b(srun|mpirun|mpiexec|ssh|pdsh|clush|ray|horovodrun|sbatch|colossalai|parallel|submitit|dask)\b"
)
_ASKS = {"help", "h", "version", "config-file"}
#: Why a value is no number in the job, by its symbol.
_NO_NUMBER = {
    "unset": "Slurm does not set {} in this job",
    "compressed": "{} is written as 4(x2), not as a number",
    "unexported": "{} is not exported, so it is empty in the task",
    "nosuch": "Slurm has no variable {}",
}
_READS_SLURM = re.compile(r"lightning|\bpl_|idr_torch|litgpt", re.IGNORECASE)
_TRAINER = re.compile(r"(?<!\S)[-+]*trainer\.(devices|num_nodes)[= ](\d{1,4})(?!\S)")
_RANK_ARGUMENT = re.compile(
    r"--?(local[-_]?rank|rank|global[-_]?rank|node[-_]?rank|dist[-_]rank|gpu|device|world[-_]?rank)\b"
)
_ONE_WORD = re.compile(r"--?[A-Za-z][^\s=]*\s+\S[^\0]*")
_SLOW = {
    "NCCL_IB_DISABLE": "NCCL does not use InfiniBand or RoCE",
    "NCCL_P2P_DISABLE": "NCCL does not use NVLink and PCIe between GPUs",
    "NCCL_SHM_DISABLE": "NCCL does not use shared memory in a node",
    "NCCL_NET_DISABLE": "NCCL does not use the network plugin",
}


@rule
def one_node_only(script: Script) -> Iterator[Hit]:
    found = [each for each in launches(script) if each.step is None] if (script.job.nodes or 1) > 1 else []
    only = f"starts on the first of {script.job.nodes} nodes only"
    for launch in found:
        hostfile = launch.opaque or {"hostfile", "deepspeed-hostfile"} & launch.options.keys()
        if launch.kind == "torchrun" or (launch.kind != "python" and not hostfile):
            ranked = symbol_name(launch.option("machine-rank") or "", "early")  # meant to start on each node
            doubt = "config-file" in launch.options and not ranked  # the file may name a hostfile of DeepSpeed
            yield Hit(f"{launch.names.shown} {only}", launch.line, "warning" if doubt else None)
    spread = any(_SPREADS.search(" ".join(words)) for _, words in script.found.started)
    if found and not spread and all(each.kind == "python" for each in script.found.launches):
        yield Hit(f"the program {only}", found[-1].line)


@launch_rule(*AGENTS, "deepspeed")
def launcher_per_task(script: Script, launch: Launch) -> Iterator[Hit]:
    step, name = launch.step, launch.names.shown
    if step is None or step.fan_out or "no-ssh" in launch.options:
        return
    tasks, most = step.resources.tasks, number((launch.expected_nodes or "1").rpartition(":")[2])
    if launch.per_node is None and tasks and most and tasks > most:
        yield Hit(f"srun starts {name} {tasks} times, for {most} node{'s' * (most > 1)}")
    message, ranks = f"srun starts {name} {launch.per_node} times per node", launch.ranks
    if (launch.per_node or 1) > 1 and ranks == 1:
        yield Hit(f"{message}, each with one rank: all of them have local rank 0", severity="warning")
    elif (launch.per_node or 1) > 1:
        yield Hit(message + (f", each with {ranks} ranks" if ranks else ""))


@launch_rule("deepspeed", "accelerate", where="several_nodes")
def deepspeed_per_node(script: Script, launch: Launch) -> Iterator[Hit]:
    if launch.step is None or launch.step.fan_out:
        return
    if launch.kind == "deepspeed":
        if "no-ssh" not in launch.options and launch.per_node == 1 and not launch.opaque:
            yield Hit(f"srun starts deepspeed on each of {launch.nodes} nodes")
    elif "use-deepspeed" in launch.options and "deepspeed-hostfile" not in launch.options and not launch.has_config:
        if (launch.option("deepspeed-multinode-launcher") or "pdsh") == "pdsh":  # which is its default
            yield Hit(f"on each of {launch.nodes} nodes, accelerate starts deepspeed with pdsh")


@launch_rule(*AGENTS)
def nnodes(script: Script, launch: Launch) -> Iterator[Hit]:
    agents, told = launch.nodes, launch.expected_nodes
    if agents is None or (launch.per_node or 1) > 1 or (launch.step is None and (script.job.nodes or 1) > 1):
        return
    if launch.farmed or "-" in (script.option("nodes") or ""):
        return
    option = f"--{launch.names.nodes.replace('-', '_')}"
    if told is None:
        if agents > 1 and not launch.has_config and "standalone" not in launch.options:
            if launch.kind == "torchrun":
                yield Hit(f"no {option}: each of {agents} nodes trains alone")
            else:
                yield Hit(f"no {option} on {agents} nodes: only a config file can give it", severity="warning")
    elif match := re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", told):
        least, most = int(match[1]), int(match[2] or match[1])
        more = most > agents and not launch.step and script.option("nodes") is None  # maybe on sbatch's command line
        if not least <= agents <= most and not more:
            yield Hit(f"{option} is {told}, but the launcher starts on {agents} node{'s' * (agents > 1)}")


@launch_rule("torchrun", where="several_nodes")
def standalone(script: Script, launch: Launch) -> Iterator[Hit]:
    own_work = any("task" in symbols(word) for word in launch.program)  # each node trains something else
    if "standalone" in launch.options and not launch.farmed and not own_work:
        yield Hit(f"--standalone on {launch.nodes} nodes")


def _ranks_and_gpus(script: Script, launch: Launch) -> tuple[int, int]:
    """(ranks that one task of srun starts, or that srun starts on a node, GPUs that are there for them); 0 for what is
    not known. Of launchers that start several times per node, launcher-per-task tells."""
    step = launch.step.resources if launch.step else script.job
    if launch.kind == "python":
        return (launch.per_node or 0) * (launch.step is not None and not launch.fan_out), script.job.gpus_per_node or 0
    told, gpus = launch.env("CUDA_VISIBLE_DEVICES") or "", step.gpus_per_node
    if re.fullmatch(r"\d+(,\d+)*", told):
        gpus = told.count(",") + 1
    elif launch.step and step.gpus_per_task:
        gpus = step.gpus_per_task
    return (launch.ranks or 0) * ((launch.per_node or 1) == 1), gpus or 0


@launch_rule("python", *AGENTS)
def too_many_ranks(script: Script, launch: Launch) -> Iterator[Hit]:
    ranks, gpus = _ranks_and_gpus(script, launch)
    if not 0 < gpus < ranks or "cpu" in launch.options:
        return
    if launch.kind == "python":  # many tasks may be meant for CPUs
        sure = ranks <= 8 or launch.env("MASTER_ADDR") is not None
        yield Hit(f"srun starts {ranks} tasks per node for {gpus} GPU(s)", severity=None if sure else "warning")
    else:
        yield Hit(f"{launch.names.shown} starts {ranks} ranks per node, and {gpus} GPU(s) are there for them")


@launch_rule("python", *AGENTS)
def idle_gpus(script: Script, launch: Launch) -> Iterator[Hit]:
    ranks, gpus = _ranks_and_gpus(script, launch)
    if launch.kind == "torchrun" and launch.option("nproc-per-node") is None and not launch.opaque:
        ranks = int((launch.per_node or 1) == 1)
    if launch.fan_out or launch.command.background or not 0 < ranks < gpus:
        return  # several launches may share the node
    if launch.kind != "python":
        yield Hit(f"{launch.names.shown} starts {ranks} rank(s) per node for {gpus} GPUs")
    elif ranks > 1:
        yield Hit(f"srun starts {ranks} tasks per node for {gpus} GPUs")


@rule
def empty_variable(script: Script) -> Iterator[Hit]:
    for step in script.found.steps:
        for name, value in step.options.items():
            if variable := symbol_name(value, "unset"):
                yield Hit(f"srun --{name}: {_NO_NUMBER['unset'].format(variable)}", step.line)
    if any(each.step for each in launches(script, "python")):
        line = script.assigned("WORLD_SIZE")  # which is empty if bash cannot calculate with it
        for variable in re.findall(r"SLURM_\w+", script.lines[line - 1]):
            if symbols(script.slurm.get(variable, "")) & {"unset", "compressed"}:
                yield Hit(f"WORLD_SIZE: Slurm does not set {variable} to a number in this job", line)
    for launch in launches(script, *AGENTS):
        for name in (launch.names.nodes, launch.names.ranks, launch.names.rank):
            value = launch.options.get(name, "")
            for kind, message in _NO_NUMBER.items():
                if variable := symbol_name(value, kind):
                    yield Hit(f"--{name}: {message.format(variable)}", launch.line)
                    break
            if name == "nproc-per-node" and re.fullmatch(r"(gpu:)?[a-z]\w*:\d+", value):
                yield Hit(f"--{name} is {value!r}: the type of the GPU is part of the variable", launch.line)


@launch_rule(*AGENTS)
def undefined_variable(script: Script, launch: Launch) -> Iterator[Hit]:
    needed = {*launch.names, "rdzv-endpoint"} - {launch.names.rank}
    for name in [] if script.sourced else needed & launch.options.keys():
        variable = symbol_name(launch.options[name], "?")
        if variable and not variable.startswith("SLURM") and not SET_BY_SHELL.fullmatch(variable):
            yield Hit(f"--{name} uses {variable}, which the script never sets")
    unread = {name for _, name in script.found.assigned} - names_in(script.text)
    for variable in {symbol_name(word, "?") for word in launch.program} - {""}:
        if close := difflib.get_close_matches(variable, sorted(unread), 1, 0.85):
            yield Hit(f"{variable} is never set; did you mean {close[0]}?")


@rule
def ntasks_wins(script: Script) -> Iterator[Hit]:
    job = script.job
    if job.nodes and job.ntasks and job.ntasks_per_node and job.ntasks < job.nodes * job.ntasks_per_node:
        sure = job.ntasks_per_node == job.gpus_per_node and any(each.step for each in launches(script, "python"))
        message = f"--ntasks={job.ntasks} wins: not {job.ntasks_per_node} tasks on each of {job.nodes} node(s)"
        yield Hit(message, script.line_of("ntasks"), "error" if sure else "warning")


@rule
def no_program(script: Script) -> Iterator[Hit]:
    for launch in script.found.idle:
        words = launch.command.words
        program = any(each.endswith((".py", ".sh", '"$@"', "$@")) for each in words)
        program |= any(each[:1] in '$"' or launch.unsure for each in words[-1:])  # what it holds is open
        if launch.kind != "python" and launch.options and not program and not _ASKS & launch.options.keys():
            yield Hit(f"{launch.names.shown} is given no program", launch.line)


@launch_rule(*AGENTS)
def srun_in_turn(script: Script, launch: Launch) -> Iterator[Hit]:
    step = launch.step
    waits = step is not None and step.fan_out and bool(step.command.loops) and not step.command.background
    if waits and launch.expected_nodes not in (None, "1", "1:1") and (script.job.nodes or 2) > 1:
        body = itertools.takewhile(lambda text: text.strip()[:4] != "done", script.lines[launch.line - 1 :])
        if not any(re.search(r"(?<![&>])&(?![&>\d])", text) for text in body):
            yield Hit("the loop starts one node after the other")


@launch_rule("python")
def rank_in_batch_shell(script: Script, launch: Launch) -> Iterator[Hit]:
    tasks = launch.tasks
    if tasks < 2:
        return
    one_per_node = launch.env("RANK") is None and launch.per_node == 1  # so all local ranks are 0
    for name in ("RANK",) if one_per_node else ("RANK", "LOCAL_RANK"):
        if variable := symbol_name(launch.env(name) or "", "early"):
            doubt = _READS_SLURM.search(script.text)
            message = f"{name}=${variable} is 0 in all {tasks} tasks"
            yield Hit(message, script.assigned(name), "warning" if doubt else None)
    for before, word in zip(["", *launch.program], launch.program, strict=False):
        variable = symbol_name(word, "early")
        if variable and _RANK_ARGUMENT.match(word if "=" in word else before):
            yield Hit(f"the batch shell expands ${variable}, so it is 0 in all {tasks} tasks")


@launch_rule("python")
def world_size(script: Script, launch: Launch) -> Iterator[Hit]:
    told, tasks, line = launch.env("WORLD_SIZE") or "", launch.tasks, script.assigned("WORLD_SIZE")
    if re.fullmatch(r"\d+(\*\d+)+", told):
        yield Hit(f"WORLD_SIZE is the text {told}; write $(( ))", line)
    ranks = number(told)
    if ranks and tasks not in (1, ranks) and launch.env("MASTER_ADDR") and (ranks < tasks or launch.per_node != 1):
        sure = ranks < tasks and not _READS_SLURM.search(script.text)
        yield Hit(f"WORLD_SIZE is {ranks}, but srun starts {tasks} tasks", line, None if sure else "warning")


@launch_rule()
def gpus_per_task(script: Script, launch: Launch) -> Iterator[Hit]:
    step = launch.step
    if step is None or launch.tasks < 2 or (launch.per_node or 1) < 2:
        return
    bind = step.options.get("gpu-bind") or script.option("gpu-bind") or "verbose"
    if bind != "none" and not bind.startswith("verbose"):
        yield Hit(f"--gpu-bind={bind}", step.line if "gpu-bind" in step.options else script.line_of("gpu-bind"))
    elif bind != "none" and step.resources.gpus_per_task:
        where = step.line if "gpus-per-task" in step.options else script.line_of("gpus-per-task")
        yield Hit(f"--gpus-per-task with {launch.per_node} tasks per node", where)


@launch_rule("python", where="several_nodes")
def not_exported(script: Script, launch: Launch) -> Iterator[Hit]:
    for name in sorted({"MASTER_ADDR", "MASTER_PORT"} & launch.hidden) if launch.step else ():
        if not re.search(rf"\$\{{?{name}", script.text):
            yield Hit(f"{name} is set, but not exported", script.assigned(name))


@launch_rule("python")
def lightning_devices(script: Script, launch: Launch) -> Iterator[Hit]:
    given = launch.step.resources if launch.step else script.job
    expected = {
        "devices": ("--ntasks-per-node", given.ntasks_per_node), "num_nodes": ("--nodes", given.nodes),
    }  # fmt: skip
    for name, value in _TRAINER.findall(" ".join(launch.program)):
        option, number_there = expected[name]
        if number_there and int(value) != number_there:
            yield Hit(f"trainer.{name} is {value}, and {option} is {number_there}")


@launch_rule()
def quoted_list(script: Script, launch: Launch) -> Iterator[Hit]:
    for before, word in zip(launch.program, launch.program[1:], strict=False):
        if _ONE_WORD.fullmatch(word) and not before.startswith("-"):
            yield Hit(f"'{word[:60]}' is one argument: the quotes keep the blanks in it")


@launch_rule()
def literal_tilde(script: Script, launch: Launch) -> Iterator[Hit]:
    given = [f"{name}={value}" for name, value in launch.environment.items() if "tilde" in symbols(value)]
    for word in [*given, *launch.words]:
        if "tilde" in symbols(word) or "=~/" in word:
            yield Hit(f"bash leaves the ~ of {word.replace(symbol('tilde'), '~')[:60]} as it is")


@rule
def option_twice(script: Script) -> Iterator[Hit]:
    for part in components(script.directives):
        given: dict[str, str] = {}
        for each in part:
            if each.name and given.get(each.name, each.value) != each.value:
                yield Hit(f"--{each.name} is given twice: {given[each.name]} is ignored", each.line)
            given[each.name] = each.value
    for launch in launches(script, *AGENTS):
        before = launch.words[: len(launch.words) - len(launch.program)]
        names = [word.partition("=")[0].lstrip("-").replace("_", "-") for word in before if word.startswith("--")]
        for name in sorted({name for name in names if names.count(name) > 1} & launch.options.keys()):
            yield Hit(f"{launch.names.shown} is given --{name} twice: the first one is ignored", launch.line)


@rule
def nccl_disabled(script: Script) -> Iterator[Hit]:
    for name, effect in _SLOW.items():
        if script.found.value(name) == "1":
            yield Hit(f"{name}=1: {effect}", script.assigned(name))


@rule
def loopback_interface(script: Script) -> Iterator[Hit]:
    if any(each.several_nodes for each in launches(script)):
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            if (script.found.value(name) or "").lstrip("=") == "lo":
                yield Hit(f"{name}=lo in a job of several nodes", script.assigned(name))
