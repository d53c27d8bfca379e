"""The torchrun line of each node, for clusters without Slurm."""

import os
import shlex

from slurmddp.errors import UserError
from slurmddp.job.plan.model import Plan, Variable
from slurmddp.render.engine import with_run
from slurmddp.render.scripts import without_python_path


def node_commands(plan: Plan, head: str, port: int) -> list[str]:
    """One shell line a node. `head`: host name or address of node 0, reachable from all the others."""
    program, nodes, layout, alone = plan.program, plan.nodes, plan.layout, plan.nodes.max == 1
    if plan.srun is not None:
        raise UserError("launch.mode srun needs Slurm's srun: check --per-node cannot start it")
    # torchrun itself counts GPUs; of cores, it would start a rank on each.
    ranks = str(nodes.ranks_per_node or ("gpu" if layout.gpus_per_node else "RANKS"))
    lines = [
        f"# {plan.job.name}: {nodes.max} node{'s' * (nodes.max > 1)}; the first is {head}, with port {port}",
        "# First write RUN_FOLDER, which all nodes see: this command with --write RUN_FOLDER, not --per-node",
    ]
    if not alone:
        lines += [f"# First, on each node: {line}" for line in _place(plan, head)]
    lines += [f"# First, on each node: {line}" for line in plan.job.setup]
    if program.own and plan.workdir != plan.cwd:
        lines.append(f"# First, on each node: {_enter(plan.workdir)}")
    passed = plan.container.environment_prefix
    lines += [
        f"# First, on each node, as a separate line: export {passed}{name}=..." for name in plan.job.environment_from
    ]
    if nodes.world is None:
        cores = "" if layout.gpus_per_node else f". RANKS is one per {layout.threads_per_rank} cores"
        lines.append(f"# First, on each node: export OMP_NUM_THREADS=N; N is its cores divided by its ranks{cores}")
    entry = ["slurmddp.runtime.train", "RUN_FOLDER"]
    if program.own:
        entry = ["slurmddp.runtime.begin", *(with_run(word, "RUN_FOLDER") for word in program.words(program.source))]
    agent = ["slurmddp.runtime.agent"]
    if plan.accelerate:
        agent = ["slurmddp.runtime.agent.accelerate", "RUN_FOLDER/accelerate.yaml"]
    variables = [f"{variable.name}={with_run(variable.value, 'RUN_FOLDER')}" for variable in _variables(plan)]
    if plan.job.recovery.preflight:
        lines.append(
            "# Preflight: one line per node, all at once. Exit code 0: the nodes can train; if not, the first says why"
        )
        lines += [_preflight(plan, head, port, node, variables) for node in range(nodes.max)]
    lines.append(
        f"# Ranks: one line per node, the first on {head}, all within {plan.job.timeouts.join} s. "
        "To stop: touch RUN_FOLDER/stop. To resume: remove that file, and increase SLURMDDP_ATTEMPT in every line"
    )
    for node in range(nodes.max):
        words = [
            *_container(plan),
            plan.container.python,
            *("-m", *agent, "RUN_FOLDER"),
            f"--nnodes={nodes.max}",
            f"--nproc-per-node={ranks}",
            f"--max-restarts={plan.max_restarts}",
            *_rendezvous(plan, head, port, node),
        ]
        started = [*(with_run(word, "RUN_FOLDER") for word in program.wrapper), "-m", *entry]
        here, address = f'{passed}SLURMDDP_NODE="$(hostname)"', ""
        if not alone:
            here += f' {passed}GLOO_SOCKET_IFNAME="${{interface:?}}"'
            address = ' --local-addr="${address:?}"'
        lines.append(f"env {here} {shlex.join([*variables, *words])}{address} {shlex.join(started)}")
    return lines


def _place(plan: Plan, head: str) -> list[str]:
    """Shell lines that find this node's address and interface in the network between the nodes."""
    wanted = plan.job.network.interface or ""
    if wanted and not wanted.startswith("^"):
        name = wanted.lstrip("=").split(",")[0]
        exact = f'$2 == "{name}"' if wanted.startswith("=") else f'index($2, "{name}") == 1'
        return [
            f"interface=$(ip -o -4 addr show up | awk {shlex.quote(exact + ' {print $2; exit}')})",
            'address=$(ip -o -4 addr show dev "$interface" | awk \'{sub("/.*", "", $4); print $4; exit}\')',
        ]
    towards = f"$(getent ahostsv4 {shlex.quote(head)} | awk '{{print $1; exit}}')"
    return [
        f'address=$(ip -o -4 route get "{towards}" | sed \'s/.* src //; s/ .*//\'); echo "$address"'
        f" # 127.x: {head} names the network between the nodes nowhere but here; give its address as --head",
        "interface=$(ip -o -4 addr show to \"$address\" | awk '{print $2; exit}')",
    ]


def _enter(workdir: str) -> str:
    folder = shlex.quote(with_run(workdir, "RUN_FOLDER"))
    return f"mkdir -p {folder} && cd {folder}"


def _preflight(plan: Plan, head: str, port: int, node: int, variables: list[str]) -> str:
    """The line of one node: what node.sh would tell the preflight, with names for nodes that nobody has named."""
    names = [f"node{number}" for number in range(plan.nodes.max)]
    settings = {
        "NODE": names[node],
        "PREFLIGHT_NODES": " ".join(names),
        "HEAD": head,
        "PORT": str(port),
        "LOGS": "RUN_FOLDER/logs",
        "GPUS": str(plan.layout.gpus_per_node),
    }
    prefix = plan.container.environment_prefix
    assignments = [f"{prefix}SLURMDDP_{name}={value}" for name, value in settings.items()]
    words = [*_container(plan), plan.container.python, "-m", "slurmddp.runtime.preflight", "RUN_FOLDER"]
    address = f'{prefix}SLURMDDP_ADDRESS="${{address:?}}" ' if plan.nodes.max > 1 else ""
    return f"env {address}{shlex.join([*assignments, *variables, *words])}"


def _variables(plan: Plan) -> list[Variable]:
    groups = without_python_path(plan.environment)
    others = [item for group in groups for item in group.variables if not item.base]
    path = list(filter(None, [plan.variable("PYTHONPATH")]))
    project = [os.path.join("RUN_FOLDER", item) for item in plan.program.python_path]
    values = {
        "RUN": "RUN_FOLDER",
        "ATTEMPT": "0",
        "RENDEZVOUS_ID": plan.job.name,
        "STOP_FILE": "RUN_FOLDER/stop",
        "PROGRESS_FILE": "RUN_FOLDER/progress",
        "NO_PROGRESS": str(plan.job.recovery.no_progress),
    }
    runtime = [Variable(f"{plan.container.environment_prefix}SLURMDDP_{name}", text) for name, text in values.items()]
    return [*others, *runtime, Variable("PYTHONPATH", ":".join(["RUN_FOLDER/code/slurmddp.zip", *project, *path]))]


def _container(plan: Plan) -> list[str]:
    container = plan.container
    if container.made_by_srun:
        raise UserError(f"container.runtime {container.runtime} needs Slurm's srun: check --per-node cannot start it")
    return container.words([*(bind.spec for bind in container.binds), "RUN_FOLDER"])


def _rendezvous(plan: Plan, head: str, port: int, node: int) -> list[str]:
    backend, conf = "c10d", f"is_host={int(node == 0)},join_timeout={plan.job.timeouts.join}"
    if plan.job.launch.rendezvous == "static":
        backend, conf = "static", f"rank={node}"
    named = [f"--rdzv-backend=slurmddp-{backend}", f"--rdzv-endpoint={head}:{port}", f"--rdzv-id={plan.job.name}"]
    return [*named, f"--rdzv-conf={conf}"]
