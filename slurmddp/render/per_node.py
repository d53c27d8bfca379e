"""The torchrun line of each node, for clusters without Slurm."""

from __future__ import annotations

import shlex

from slurmddp.plan.model import Plan, Variable


def node_commands(plan: Plan, head: str, port: int) -> list[str]:
    """One shell line a node. `head`: host name or address of node 0, reachable from all the others."""
    program, layout = plan.program, plan.layout
    # torchrun itself counts GPUs; of cores, it would start a rank on each.
    ranks = str(layout.ranks_per_node or ("gpu" if layout.gpus_per_node else "RANKS"))
    lines = [
        f"# {plan.name}: line N on node N, all within {plan.join_timeout} s; head node {head}, port {port}",
    ]
    if not program.script:
        lines.append("# RUN_FOLDER, at the same path on all nodes: slurmddp render JOB.yaml -o RUN_FOLDER")
    lines += [f"# on each node first: {line}" for line in plan.setup]
    passed = plan.container.environment_prefix
    lines += [f"# on each node first, not in this line: export {passed}{name}=..." for name in plan.environment_from]
    if layout.world is None:
        cores = "" if layout.gpus_per_node else f"; RANKS: one for each {layout.threads_per_rank} cores"
        lines.append(f"# on each node first: export OMP_NUM_THREADS=N, its cores divided by its ranks{cores}")
    start = [program.script, *program.args] if program.script else ["-m", "slurmddp.runtime.train", "RUN_FOLDER"]
    if program.script and program.in_snapshot and program.project:
        start[0] = f"{program.project}/{program.script.removeprefix('code/project/')}"
    for node in range(layout.nodes):
        words = [
            *_container(plan),
            plan.container.python,
            *("-m", "torch.distributed.run"),
            f"--nnodes={layout.nodes}",
            f"--nproc-per-node={ranks}",
            f"--max-restarts={plan.max_restarts}",
            *_rendezvous(plan, head, port, node),
            *start,
        ]
        variables = [f"{variable.name}={variable.value}" for variable in _variables(plan)]
        lines.append(shlex.join(["env", *variables, *words]))
    return lines


def _variables(plan: Plan) -> list[Variable]:
    own = [item for group in plan.environment for item in group.variables if not item.base]
    return own if plan.program.script else [*own, Variable("PYTHONPATH", "RUN_FOLDER/code")]


def _container(plan: Plan) -> list[str]:
    container = plan.container
    if container.image is None:
        return []
    binds = [word for bind in container.binds for word in ("--bind", bind.spec)]
    if not plan.program.script:
        binds += ["--bind", "RUN_FOLDER"]
    return [container.executable, "exec", *container.options, *binds, container.image]


def _rendezvous(plan: Plan, head: str, port: int, node: int) -> list[str]:
    if plan.rendezvous == "static":
        return [
            "--rdzv-backend=static",
            f"--master-addr={head}",
            f"--master-port={port}",
            f"--node-rank={node}",
        ]
    return [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={head}:{port}",
        f"--rdzv-id={plan.name}",
        f"--rdzv-conf=is_host={int(node == 0)},join_timeout={plan.join_timeout}",
    ]
