"""`slurmddp debug shell`, `forward` and `stacks`: what runs beside the ranks of a running job, on their nodes."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurmddp.cluster.base import JobId, clean_environment
from slurmddp.cluster.client import ask
from slurmddp.errors import ExternalError, UserError
from slurmddp.records.events import of
from slurmddp.records.job_events import AttemptStarted
from slurmddp.render.scripts import python_of_submit
from slurmddp.run import manifest
from slurmddp.run.gate import OwnRun
from slurmddp.run.layout import RunFolder
from slurmddp.run.state import judge, observe
from slurmddp.shared.units import listed

#: What a shell is in an image that may have no bash. Its start-up files would change the environment.
_SHELL = ("/bin/sh", "-c", "if command -v bash >/dev/null; then exec bash --norc; else exec sh; fi")


@dataclass(frozen=True)
class Attempt:
    """The attempt of a run whose ranks are there now. name: its rendezvous id, by which its processes are found."""

    folder: OwnRun
    job: JobId
    number: int
    nodes: tuple[str, ...]
    name: str

    def step(self, nodes: Sequence[str], *options: str) -> tuple[str, ...]:
        """Return the words that start a command on these nodes, one process on each; none without Slurm."""
        if self.job.is_local:
            return ()
        cluster = ("-M", self.job.cluster) if self.job.cluster else ()
        count = str(len(nodes))
        where = (f"--jobid={self.job.id}", f"--nodelist={','.join(nodes)}", "--nodes", count, "--ntasks", count)
        # --mem=0: all of the job's. Without it, a step waits for memory that the ranks have.
        return ("srun", *cluster, "--overlap", *where, "--ntasks-per-node=1", "--cpu-bind=none", "--mem=0", *options)


def running_attempt(folder: OwnRun) -> Attempt:
    """Return the attempt whose ranks run now.

    Raises UserError where none runs or another version has made the run, ExternalError where Slurm does not answer.
    """
    manifest.require_version(folder)
    facts, view = observe(folder)
    if facts.job_id is None:
        raise UserError(f"run {folder.id} is not running: it was never submitted")
    state = judge(view, facts)
    if state.state not in ("running", "stopping"):
        raise UserError(f"run {folder.id} is not running: {state.line}")
    started, start = next(of(facts.events[::-1], AttemptStarted), (None, None))
    number = started.attempt if started else None
    if not started or not start or number is None or number != facts.attempt or facts.attempt_ended is not None:
        raise UserError(f"run {folder.id} has no ranks at the moment", todo=f"wait: slurmddp logs {folder.id} -f")
    nodes = tuple(start.nodes.split())
    return Attempt(folder, facts.job_id, number, nodes, f"{folder.id}-{started.job_id}-{number}")


def ranks_program(folder: RunFolder) -> tuple[str, ...]:
    """Return the command that starts the supervisor's program `ranks` on a node; its arguments follow."""
    return ("bash", str(folder.python_sh), python_of_submit(), str(folder.code_archive), "ranks")


def chosen_nodes(attempt: Attempt, node: str | None) -> tuple[str, ...]:
    """Return this node, or all of the attempt's. Raises UserError for one that is not among them."""
    if node is None:
        return attempt.nodes
    if node not in attempt.nodes:
        todo = f"nodes: {listed(attempt.nodes, 20)}"
        raise UserError(f"run {attempt.folder.id} has no ranks on node {node}", todo=todo)
    return (node,)


def attach(
    folder: OwnRun, node: str | None, command: Sequence[str], environment: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the command line, and its environment, that runs a command, or a shell, as the ranks of a node run.

    node: the attempt's first if None. Raises UserError, ExternalError.
    """
    on_terminal = ("--pty",) if sys.stdin.isatty() and sys.stdout.isatty() else ()
    return attach_command(folder, node, command or _SHELL, environment, *on_terminal)


def attach_command(
    folder: OwnRun, node: str | None, command: Sequence[str], environment: Mapping[str, str], *options: str
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return what attach returns. command: where it begins with -m, for the ranks' Python. options: of srun."""
    attempt = running_attempt(folder)
    where = chosen_nodes(attempt, node)[:1]
    words = (*attempt.step(where, "--export=ALL", *options), "bash", str(folder.node_sh), *command)
    return words, {
        **clean_environment(environment),
        "SLURMDDP_STEP": "attach",
        "SLURMDDP_ATTACH_NODES": " ".join(attempt.nodes),
        "SLURMDDP_NODES": str(len(attempt.nodes)),
        "SLURMDDP_RUN": str(folder.path),
        "SLURMDDP_LOGS": str(folder.attempt_logs(attempt.number)),
        "SLURMDDP_JOB_ID": attempt.name.removeprefix(f"{folder.id}-").rpartition("-")[0],
        "SLURMDDP_ATTEMPT": str(attempt.number),
        "SLURMDDP_RENDEZVOUS_ID": attempt.name,
        "SLURMDDP_PORT": "0",
    }


def become(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Become this command, so that terminal, signals and exit code are its own. Raises UserError if it is not here."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(words[0], list(words), dict(environment))
    except FileNotFoundError:
        raise UserError(f"{words[0]} is not on this machine", todo="use a login node of the cluster") from None


def raw_stacks(folder: OwnRun, node: str | None) -> tuple[Attempt, str, str]:
    """Return the attempt, what the program `ranks` printed on its nodes, and what failed ("" if nothing did).

    Raises UserError, ExternalError.
    """
    attempt = running_attempt(folder)
    where = attempt.step(chosen_nodes(attempt, node), "--cpus-per-task=1", "--gres=none")
    done = ask((*where, *ranks_program(folder), "stacks", attempt.name))
    if done.missing:
        todo = "use a login node of the cluster"
        raise UserError(f"{where[0] if where else 'bash'} is not on this machine", todo=todo)
    if done.code != 0 and not done.out:
        raise ExternalError(f"the stacks of run {folder.id} cannot be read:\n{done.text}")
    return attempt, done.out, done.err.strip() if done.code != 0 else ""
