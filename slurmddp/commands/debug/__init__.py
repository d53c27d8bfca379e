"""debug shell, port, stacks, profile, bundle: a look into a running job, and what support needs to know of a run."""

import os

from slurmddp.commands import options as opt
from slurmddp.commands.debug.bundle import bundle as bundle_
from slurmddp.commands.debug.port import port as port_
from slurmddp.commands.debug.profile import profile as profile_
from slurmddp.commands.debug.stacks import stacks as stacks_
from slurmddp.commands.help import App
from slurmddp.commands.listed import BY_NAME
from slurmddp.launch.find import find_own_run
from slurmddp.launch.inside import attach, become


def shell(
    run: opt.Run = opt.LAST,
    command: list[str] | None = opt.argument("-- COMMAND", "Command to run in place of a shell, after RUN --"),
    node: str | None = opt.value("NAME", "Node to run on  [default: the first of the attempt]"),
) -> None:
    """Open a shell beside the ranks of a running job: same node, image, binds and environment."""
    become(*attach(find_own_run(run, os.environ, to="look into its job"), node, command or (), os.environ))


group = App(name="debug", help=BY_NAME["debug"].summary)
group.add(shell, example="slurmddp debug shell last --node node2 -- nvidia-smi")
group.add(port_, example="slurmddp debug port last 6006")
group.add(stacks_, example="slurmddp debug stacks last")
group.add(profile_, example="slurmddp debug profile last --steps 10")
group.add(bundle_, example="slurmddp debug bundle last")
