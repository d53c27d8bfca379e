"""How often, and on how many nodes, a launcher or a program starts, where its ranks meet, and what they are told."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slurmddp.scripts.check.finding import Finding
from slurmddp.scripts.check.fix import Draft, fixes
from slurmddp.scripts.check.fixes.places import (
    HEAD,
    PORT,
    VALUE,
    Place,
    assignments,
    behind_launcher,
    code_lines,
    cut,
    head_variable,
    launch_fixes,
    launcher,
    option,
    places,
    replaced,
    set_option,
    set_world_size,
    without,
)
from slurmddp.scripts.check.launches import AGENTS, Launch
from slurmddp.scripts.check.rules.common import launches
from slurmddp.scripts.check.script import Script
from slurmddp.scripts.check.values import symbol_name
from slurmddp.scripts.sandbox.evaluate import number

_NODES = r"tasks|--(nnodes|num-machines|num-processes)"
_PYTHON = r"(?<![\w./-])[\w./-]*python[\d.]*(?=\s)"
_KINDS = (*AGENTS, "python")
_MEETING = r"--(rdzv-\w+|master-\w+|main-process-\w+)|(MASTER_ADDR|MASTER_PORT|HEAD_NODE|FIRST_NODE)"
_OWN_NAME = re.compile(r"\$\(hostname[^()]*\)|`hostname[^`]*`|\$\{?(?:HOSTNAME|SLURMD_NODENAME)\b\}?")
_ADDRESSES = ("rdzv-endpoint", "master-addr", "main-process-ip", "dist-url", "init-method")
_HOST = re.compile(r"(tcp://)?(?:\[[^]]*\]|\$\((?:[^()]|\([^()]*\))*\)|\$\{[^}]*\}|`[^`]*`|[^:])*")


def _once_per_node(script: Script) -> str:
    """Return the options of srun that start one task per node with all CPUs of the node's tasks."""
    job, tasks = script.job, script.job.tasks_per_node or 1
    counted = job.ntasks is not None or (job.ntasks_per_node or 1) > 1
    options = (["--ntasks=$SLURM_NNODES"] if counted else []) + ["--ntasks-per-node=1"]
    if script.option("cpus-per-task"):
        cpus = f"$(({tasks} * SLURM_CPUS_PER_TASK))" if tasks > 1 else "$SLURM_CPUS_PER_TASK"
        options.append(f"--cpus-per-task={cpus}")
    return " ".join(options)


@launch_fixes("one-node-only", kinds=AGENTS, changes="tasks")
def one_node_only(draft: Draft, finding: Finding, launch: Launch) -> Iterator[Draft]:
    """Srun stands before all words but assignments and what only bash has."""
    written = list(zip(launch.command.words, launch.command.lines, strict=True))
    while written[1:] and re.match(r"[A-Za-z_]\w*\+?=|(exec|time|nohup)\Z", written[0][0]):
        del written[0]
    for word, line in written[:1] if launch.step is None else ():
        if start := re.search(rf"(?<![\w./=-]){re.escape(word.partition(chr(10))[0])}", draft.line(line)):
            yield draft.splice(line, start.start(), start.start(), f"srun {_once_per_node(draft.script)} ")


@launch_fixes("srun-in-turn", kinds=AGENTS)
def srun_in_turn(draft: Draft, finding: Finding, launch: Launch) -> Iterator[Draft]:
    end = launch.line
    while draft.line(end).endswith("\\"):
        end += 1
    done = next((at for at in range(end + 1, len(draft.lines) + 1) if re.match(r"\s*done\b", draft.line(at))), 0)
    if draft.line(done).strip() == "done" and "#" not in draft.line(end):
        wait = draft.line(done).rstrip().replace("done", "wait")
        yield draft.put(end, draft.line(end).rstrip() + " &").insert(done + 1, wait)


@launch_fixes("launcher-per-task", kinds=AGENTS, changes="tasks")
def launcher_per_task(draft: Draft, finding: Finding, launch: Launch) -> Iterator[Draft]:
    match = re.search(r"(?<![\w./-])srun(?=\s|$)", draft.line(launch.step.line)) if launch.step else None
    if launch.step is None or match is None or "all of them have local rank 0" in finding.message:
        return
    if "srun" not in launch.command.words and re.search(r"SLURM_(N?TASKS|NPROCS)", " ".join(launch.command.words)):
        return  # in the task, they would be those of the new step
    line, added = launch.step.line, " " + _once_per_node(draft.script)
    draft = draft.splice(line, match.end(), match.end(), added)
    names = {"ntasks": "--ntasks|-n", "ntasks-per-node": "--ntasks-per-node|--tasks-per-node"}
    names |= {"cpus-per-task": "--cpus-per-task|-c"} if "--cpus-per-task" in added else {}
    for name in names.keys() & launch.step.options.keys():
        old = re.compile(rf"(?<!\S)(?:{names[name]})(?:=|\s+|(?=\d)){VALUE}")
        for at in range(line, max([*launch.command.lines, launch.line]) + 1):
            if found := old.search(draft.line(at), match.end() + len(added) if at == line else 0):
                draft = without(draft, (at, found))
                break
    yield draft


@fixes("gpus-per-task", "too-many-ranks")
def gpus_per_task(draft: Draft, finding: Finding) -> Iterator[Draft]:
    """The GPUs of a node's tasks become those of the node."""
    tasks = draft.script.job.tasks_per_node
    lines = [each.line for each in draft.script.directives if each.name == "gpus-per-task"]
    if finding.rule.id == "gpus-per-task":
        lines = [finding.line]
        steps = [each.step for each in launches(draft.script) if each.step]
        steps = [each for each in steps if each.line == finding.line] or steps
        tasks = steps[0].resources.tasks_per_node if steps else tasks
    for line in lines:
        match = re.search(r"--gpus-per-task(?:=|\s+)((?:[\w-]+:)?)(\d+)", draft.line(line))
        if match and tasks:
            yield draft.splice(line, *match.span(), f"--gpus-per-node={match[1]}{int(match[2]) * tasks}")


@launch_fixes("standalone", kinds=("torchrun",), changes="--standalone")
def standalone(draft: Draft, finding: Finding, launch: Launch) -> Iterator[Draft]:
    for line, match in places(draft, launch, r"\s--standalone(?!\S)"):
        yield draft.splice(line, *match.span(), "")


@launch_fixes("nnodes", kinds=AGENTS, changes=_NODES)
def nnodes(draft: Draft, finding: Finding, launch: Launch) -> Iterator[Draft]:
    job, expected = draft.script.job, number(launch.expected_nodes)
    if expected is not None and expected == job.nodes and launch.step and launch.step.resources.nodes != job.nodes:
        yield _one_task_per_node(draft)  # sbatch allocates no more nodes than tasks
        yield from launcher_per_task(draft, finding, launch)
    elif launch.kind == "torchrun":
        yield from set_option(draft, launch, "$SLURM_NNODES", "nnodes")
    else:  # accelerate counts the ranks of all nodes, so their number follows
        ranks = number(launch.option(launch.names.ranks))
        for after in replaced(draft, launch, "$SLURM_NNODES", launch.names.nodes) if expected else ():
            if ranks and expected and ranks % expected == 0:
                yield from replaced(after, launch, f"$((SLURM_NNODES * {ranks // expected}))", launch.names.ranks)
            elif ranks is None:
                yield after


def _one_task_per_node(draft: Draft) -> Draft:
    new = "" if draft.script.option("ntasks-per-node") else "--ntasks-per-node=1"
    if (draft.script.job.ntasks or 0) < (draft.script.job.nodes or 0):
        draft = draft.sub(draft.script.line_of("ntasks"), r"(?:--ntasks[= ]|-n ?)\d+(?!\S)", new)
    return draft


@launch_fixes("empty-variable", changes=rf"{_NODES}|--nproc-per-node|WORLD_SIZE")
def empty_variable(draft: Draft, finding: Finding, launch: Launch) -> Iterator[Draft]:
    """Slurm's variable for this is put in its place; for a step, the job's own value then holds."""
    meant = {launch.names.nodes: "$SLURM_NNODES", "nproc-per-node": "$SLURM_GPUS_ON_NODE"}
    name = re.search(r"--([\w-]+)", finding.message)
    if finding.message.startswith("WORLD_SIZE"):
        yield from set_world_size(draft, launch)
    elif name and name[1] in meant and "is not exported" not in finding.message:
        yield from replaced(draft, launch, meant[name[1]], name[1])
    elif name and finding.message.startswith("srun"):
        yield from (without(draft, place) for place in option(draft, launch, name[1]))


@launch_fixes("idle-gpus", kinds=("torchrun",), changes="--nproc-per-node")
def idle_gpus(draft: Draft, finding: Finding, launch: Launch) -> Iterator[Draft]:
    """One rank is torchrun's default, and nobody's wish."""
    if launch.option("nproc-per-node") is None:
        yield from behind_launcher(draft, launch, f" --nproc_per_node={draft.script.job.gpus_per_node}")


@launch_fixes(
    "local-rendezvous", "rendezvous-address", "fixed-host", "hostname-ip", kinds=_KINDS, changes=_MEETING
)  # fmt: skip
def address(draft: Draft, finding: Finding, launch: Launch) -> Iterator[Draft]:
    name, assigned = head_variable(draft, launch)
    if "no address is given" in finding.message:
        for after in _added(draft, launch, name):
            yield assigned(after)
        return
    if unexported := re.match(r"(\w+) is not exported", finding.message):
        yield from _exported(draft, launch, unexported[1])
    yield from _reassigned(draft, launch)
    for place in option(draft, launch, *_ADDRESSES):
        yield assigned(_at_host(draft, place, name))
    if "own name" in finding.message:  # in the shell of the task
        for line in range(launch.step.line if launch.step else launch.line, launch.line + 1):
            draft = draft.put(line, _OWN_NAME.sub(f"${name}", draft.line(line)))
        yield assigned(draft)


def _added(draft: Draft, launch: Launch, name: str) -> Iterator[Draft]:
    if launch.kind == "accelerate":
        yield from behind_launcher(draft, launch, f" --main_process_ip=${name} --main_process_port={PORT}")
    elif "node-rank" in launch.options and launch.static:
        yield from behind_launcher(draft, launch, f" --master_addr=${name} --master_port={PORT}")
    else:
        backend = " --rdzv_backend=c10d" if launch.static else ""
        number = "" if "rdzv-id" in launch.options else " --rdzv_id=$SLURM_JOB_ID"
        yield from behind_launcher(draft, launch, f"{backend}{number} --rdzv_endpoint=${name}:{PORT}")


def _reassigned(draft: Draft, launch: Launch) -> Iterator[Draft]:
    """Yield drafts in which a variable of the address holds the first node's name."""
    names = {"MASTER_ADDR"}
    for _, match in option(draft, launch, *_ADDRESSES):
        names |= set(re.findall(r"\$\{?(\w+)", match[2].partition(":$")[0]))
    seen = list(assignments(draft, launch))
    for _ in range(3):
        names |= {name for _, each in seen if each[1] in names for name in re.findall(r"\$\{?([A-Za-z_]\w*)", each[2])}
    for line, match in seen:
        if match[1] in names and line < (launch.step.line if launch.step else launch.line):
            default = re.fullmatch(r"\"?\$\{\w+:?-(.*)\}\"?", match[2])
            yield cut(draft, (line, match), f"${{{match[1]}:-{HEAD}}}" if default else HEAD)


def _at_host(draft: Draft, place: Place, name: str) -> Draft:
    """Put the first node's name in the place of the host of an address."""
    old, host = place[1][2].strip('"'), _HOST.match(place[1][2].strip('"'))
    port = old[host.end() if host else 0 :]
    if port in ("", ":0") and "endpoint" in place[1][1]:
        port = f":{PORT}"
    return cut(draft, place, f"{'tcp://' if old.startswith('tcp://') else ''}${name}{port}")


def _exported(draft: Draft, launch: Launch, name: str) -> Iterator[Draft]:
    for line, match in assignments(draft, launch, name):
        if match.string.lstrip().startswith(f"{name}="):
            yield draft.splice(line, match.start(), match.start(), "export ")


@launch_fixes("not-exported")
def not_exported(draft: Draft, finding: Finding, launch: Launch) -> Iterator[Draft]:
    yield from _exported(draft, launch, finding.message.partition(" ")[0])


@launch_fixes("random-per-node", kinds=_KINDS, changes=_MEETING)
def random_per_node(draft: Draft, finding: Finding, launch: Launch) -> Iterator[Draft]:
    if finding.message.startswith("--rdzv-id"):
        yield from set_option(draft, launch, "$SLURM_JOB_ID", "rdzv-id")
    yield from replaced(draft, launch, PORT, launch.names.port or "master-port")
    for place in option(draft, launch, "rdzv-endpoint"):
        yield cut(draft, place, f"{place[1][2].strip(chr(34)).partition(':')[0]}:{PORT}")


@launch_fixes("fixed-port", changes=r"--(standalone|master-port|main-process-port)")
def fixed_port(draft: Draft, finding: Finding, launch: Launch) -> Iterator[Draft]:
    """The port follows from the job's number, unless another program may use it, too."""
    port = re.escape(finding.message.split()[1])
    code = [text for text in draft.lines if not text.lstrip().startswith("#")]
    if len(re.findall(rf"(?<!\w){port}(?!\w)", "\n".join(code))) > 1:
        return
    for line in dict.fromkeys([finding.line, *code_lines(draft, launch)]):
        if match := re.search(rf"(?<=[\s=:'\"-])(?:(?<=(['\"])){port}\1|{port}(?![\w.]))", draft.line(line)):
            yield draft.splice(line, match.start() - bool(match[1]), match.end(), PORT)
    # The port is a default.
    meets = {"rdzv-endpoint", "rdzv-backend", "master-addr", "master-port"} & launch.options.keys()
    alone = draft.script.job.nodes == 1 and (launch.option("nnodes") or "1") == "1"
    if launch.kind == "torchrun" and alone and not meets:
        old = "torch.distributed.launch" in launch.words  # which has --standalone since PyTorch 1.9
        yield from behind_launcher(draft, launch, f" --master_port={PORT}" if old else " --standalone")
    for place in option(draft, launch, "rdzv-endpoint"):
        if ":" not in place[1][2]:
            yield cut(draft, place, f"{place[1][2].strip(chr(34))}:{PORT}")
    if launch.kind == "accelerate" or (launch.kind == "torchrun" and "master-addr" in launch.options):
        yield from set_option(draft, launch, PORT, launch.names.port)


@launch_fixes("node-rank", kinds=AGENTS, changes="--(node|machine)-rank")
def node_rank(draft: Draft, finding: Finding, launch: Launch) -> Iterator[Draft]:
    """A shell of the task expands the node's number: the one that is there, or one of its own."""
    name = launch.names.rank
    if "srun" not in launch.command.words:
        yield from set_option(draft, launch, "$SLURM_NODEID", name)
        yield from set_option(draft, launch, "\\$SLURM_NODEID", name)
        return
    for place in [*option(draft, launch, name)][:1]:
        draft = without(draft, place)
    for line, match in launcher(draft, launch):
        wrapped = f'bash -c \'exec {match[0]} --{name.replace("-", "_")}="$SLURM_NODEID" "$@"\' bash'
        yield draft.splice(line, *match.span(), wrapped)


@launch_fixes("rank-in-batch-shell", kinds=("python",), changes=r"(LOCAL_)?RANK|argument -\S*(?i:rank)\S*")
def rank_in_batch_shell(draft: Draft, finding: Finding, launch: Launch) -> Iterator[Draft]:
    """A shell of the task expands the variables."""
    if "srun" not in launch.command.words:
        return
    ranks = {name: symbol_name(launch.env(name) or "", "early") for name in ("RANK", "LOCAL_RANK")}
    values = " ".join(f"{name}=${variable}" for name, variable in ranks.items() if variable)
    if argument := re.match(r"the batch shell expands \$(\w+),", finding.message):
        for place in places(draft, launch, rf"(--?[\w-]+)(=|\s+)\"?\$\{{?{argument[1]}\}}?\"?(?!\S)"):
            moved = f'{place[1][1]}{place[1][2][:1]}"${argument[1]}"'
            yield from _in_shell(without(draft, place), launch, f'exec "$@" {moved}')
    else:
        yield from _in_shell(draft, launch, f'export {values}; exec "$@"')


def _in_shell(draft: Draft, launch: Launch, shell: str) -> Iterator[Draft]:
    for line, match in [*places(draft, launch, _PYTHON)][:1]:
        yield draft.splice(line, match.start(), match.start(), f"bash -c '{shell}' bash ")


@launch_fixes("world-size", kinds=("python",), changes="WORLD_SIZE")
def world_size(draft: Draft, finding: Finding, launch: Launch) -> Iterator[Draft]:
    if not finding.message.endswith("write $(( ))"):
        yield from set_world_size(draft, launch)
        return
    for place in assignments(draft, launch, "WORLD_SIZE"):
        yield cut(draft, place, f"$(({place[1][2]}))")


@launch_fixes("lightning-devices", kinds=("python",), changes=r"argument (--)?trainer\.(devices|num_nodes)")
def lightning_devices(draft: Draft, finding: Finding, launch: Launch) -> Iterator[Draft]:
    if match := re.match(r"(trainer\.(?:devices|num_nodes)) is (\d+), and --[\w-]+ is (\d+)", finding.message):
        meant = "$SLURM_NNODES" if match[1].endswith("num_nodes") else match[3]
        for place in places(draft, launch, rf"({re.escape(match[1])}[= ])({match[2]})(?!\S)"):
            yield cut(draft, place, meant)
