"""What Slurm says of a job before it is submitted: partition, nodes, accounts, and when it would start."""

import getpass
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from slurmddp.cluster import describe
from slurmddp.cluster.client import Answer, ask
from slurmddp.cluster.duration import limit_of
from slurmddp.cluster.parse import is_unreachable
from slurmddp.errors import ExternalError

_SECONDS = 20.0  # for one answer: a controller that needs longer is too busy to be asked for advice
_STARTS = re.compile(r"to start at (?P<start>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d).*? on nodes? (?P<nodes>\S+)", re.ASCII)


class Nodes(NamedTuple):
    """Nodes of one kind in a partition. memory: MiB; gres: as sinfo prints it, such as gpu:a100:4."""

    cpus: int
    memory: int
    gres: str

    def gpus(self) -> dict[str, int]:
        """Return how many GPUs of each type a node has; the type is "" where Slurm knows none."""
        return describe.gpus_of(self.gres)


class Account(NamedTuple):
    """One association of the user's. Empty texts mean no limit."""

    account: str
    partition: str
    qos: tuple[str, ...]


class Trial(NamedTuple):
    """What `sbatch --test-only` says. start: the cluster's local time; refusal: Slurm's words."""

    start: str | None
    nodes: str
    refusal: str | None


class Cluster:
    """Slurm's answers, each asked for once and only where a rule needs it.

    None means that Slurm did not say: its command is missing, not allowed here, or failed (`silent` lists those).
    """

    def __init__(self, run: Callable[..., Answer] | None = None) -> None:
        self._run = run or ask
        self.silent: list[str] = []
        self._trials: dict[tuple[str, ...], Trial | None] = {}
        self._hangs = False  # a controller that let one command wait is not asked again

    @cached_property
    def config(self) -> dict[str, str] | None:
        """Return the settings of `scontrol show config`."""
        text = self._say("scontrol", "show", "config")
        return None if text is None else describe.settings(text)

    @cached_property
    def all_nodes(self) -> list[describe.Node] | None:
        """Return every node that the user may see."""
        text = self._say("scontrol", "--oneliner", "show", "node")
        return None if text is None else describe.nodes(text)

    @cached_property
    def partitions(self) -> dict[str, dict[str, str]] | None:
        """Return the fields of `scontrol show partition` by partition, all that the user may see."""
        text = self._say("scontrol", "--oneliner", "show", "partition")
        if text is None:
            return None
        return {row["PartitionName"]: row for row in describe.records(text, "PartitionName")}

    def partition(self, name: str | None) -> dict[str, str] | None:
        """Return the fields of a partition; the default one's where no name is given."""
        rows = self.partitions or {}
        if name is not None:
            return rows.get(name)
        return next((row for row in rows.values() if row.get("Default") == "YES"), None)

    def nodes(self, partition: str) -> list[Nodes] | None:
        """Return the kinds of nodes of a partition."""
        text = self._say("sinfo", "--noheader", f"--partition={partition}", "--format=%c|%m|%G")
        if text is None:
            return None
        kinds = []
        for line in text.splitlines():
            cpus, memory, gres = line.split("|", 2)
            kinds.append(Nodes(_number(cpus), _number(memory), gres.strip()))
        return kinds

    def cpus(self, node: describe.Node, row: Mapping[str, str]) -> int:
        """Return the CPUs that a job in the partition of these fields can have of a node."""
        return _capped(node.cpus, row.get("MaxCPUsPerNode"))

    def memory(self, node: describe.Node, row: Mapping[str, str]) -> int:
        """Return the MiB that a job in the partition of these fields can have of a node."""
        most = node.memory
        for where in (row, self.config or {}):
            most = _capped(most, where.get("MaxMemPerNode"))
            per_cpu = limit(where.get("MaxMemPerCPU"))
            most = min(most, per_cpu * self.cpus(node, row)) if per_cpu else most
        return most

    @cached_property
    def accounts(self) -> list[Account] | None:
        """Return the user's associations; None where the site keeps no accounting."""
        user = getpass.getuser()
        columns = "format=Account,Partition,QOS"
        text = self._say("sacctmgr", "--noheader", "--parsable2", "show", "associations", f"user={user}", columns)
        rows = [line.split("|") for line in (text or "").splitlines() if line.count("|") == 2]
        known = [Account(account, partition, tuple(filter(None, qos.split(",")))) for account, partition, qos in rows]
        return known or None

    @cached_property
    def qos_limits(self) -> dict[str, int | None]:
        """Return the longest time of each QOS in seconds; None for no limit."""
        text = self._say("sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=Name,MaxWall") or ""
        rows = (line.split("|") for line in text.splitlines() if line.count("|") == 1)
        return {name: limit_of(wall) for name, wall in rows}

    def trial(self, options: Sequence[str]) -> Trial | None:
        """Return what `sbatch --test-only` says of a job with these options. Nothing is submitted."""
        key = tuple(options)
        if key not in self._trials:
            self._trials[key] = self._trial(key)
        return self._trials[key]

    def _trial(self, options: tuple[str, ...]) -> Trial | None:
        answer = self._answer("sbatch", "--test-only", *options, "--wrap=true")
        if answer is None or answer.missing:
            return None
        text = answer.text.strip()
        if match := _STARTS.search(text):
            return Trial(match["start"], match["nodes"], None)
        if answer.code == 0:
            return Trial(None, "", None)
        if is_unreachable(text):
            self._note("sbatch", text)
            return None
        lines = (re.sub(r"^sbatch: (error: )?", "", line) for line in text.splitlines())
        return Trial(None, "", "; ".join(line.strip() for line in lines if line.strip()))

    def _say(self, *command: str) -> str | None:
        answer = self._answer(*command)
        if answer is None or answer.missing:
            return None
        if answer.code != 0:
            self._note(command[0], answer.text)
            return None
        return answer.out

    def _answer(self, *command: str) -> Answer | None:
        if self._hangs:
            return None
        try:
            answer = self._run(command, timeout=_SECONDS)
        except ExternalError as error:
            self._hangs = True
            self._note(command[0], str(error))
            return None
        if answer.missing:
            self._note(command[0], "it is not on this machine")
        return answer

    def _note(self, command: str, error: str) -> None:
        line = f"{command}: {error.strip().splitlines()[0] if error.strip() else 'no answer'}"
        if line not in self.silent:
            self.silent.append(line)


def _capped(number: int, most: str | None) -> int:
    """Return a number, or a limit as Slurm prints it if that is lower."""
    return min(number, limit(most) or number)


def limit(text: str | None) -> int | None:
    """Return a number that Slurm prints for a limit; None for UNLIMITED, or where there is none."""
    return int(text) if text and text.isdigit() else None


def _number(text: str) -> int:
    """sinfo prints `4+` where nodes of one line differ."""
    return int(re.sub(r"\D", "", text) or 0)
