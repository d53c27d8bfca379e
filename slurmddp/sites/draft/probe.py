"""`sites init --probe`: one small job per node type, which says what is on a node."""

import getpass
import secrets
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slurmddp.assets import asset_folder
from slurmddp.cluster.base import JobId, JobView
from slurmddp.cluster.client import Slurm, ask
from slurmddp.errors import ExternalError, SlurmddpError, UserError
from slurmddp.job.types import slurm_time
from slurmddp.launch.build_on_node import ASK_EVERY, LATE, LOOK_EVERY
from slurmddp.sites.draft.live import Live, NodeType
from slurmddp.sites.draft.seen import Seen, read_log

#: At most so many jobs, each of so many seconds.
MOST_JOBS = 8
_TIME = 300
_NOT_ASKED = f"left out: a probe submits {MOST_JOBS} jobs at most; --partition selects"


def probe(live: Live, account: str | None, wait: float, say: Callable[[str], None]) -> list[Seen]:
    """Submit a job for each node type, wait for them, and return what they saw.

    wait: seconds for all together; jobs that have not run by then are cancelled, as on Ctrl-C. Raises ExternalError.
    """
    chosen, rest = _chosen(live)
    token = secrets.token_hex(4)
    with (
        tempfile.TemporaryDirectory(prefix=".slurmddp-probe-", dir=Path.home(), ignore_cleanup_errors=True) as folder,
        _cancelled(token, say),
    ):
        jobs = [_Job(kind, partition, Path(folder, f"{number}.log")) for number, (kind, partition) in enumerate(chosen)]
        for job in jobs:
            job.submit(live, account, token, say)
        _wait(jobs, wait, say)
        return [*(job.seen() for job in jobs), *rest]


def _chosen(live: Live) -> tuple[list[tuple[NodeType, str]], list[Seen]]:
    """Return the types to probe with a partition of each, the most telling first, and those that are not probed."""
    first: list[tuple[NodeType, str]] = []
    again: list[tuple[NodeType, str]] = []
    rest: list[Seen] = []
    known = set()
    for kind in sorted(live.types(), key=lambda kind: (-sum(kind.node.gpus.values()), -len(kind.nodes))):
        partition = live.partition_of(kind)
        if not kind.node.usable:
            rest.append(Seen(kind, partition, "", {}, "none of its nodes is up"))
            continue
        # Nodes that differ in their features only are probed after those that differ in what they are made of.
        hardware = kind.shape[:-1]
        (again if hardware in known else first).append((kind, partition))
        known.add(hardware)
    ordered = [*first, *again]
    rest += [Seen(kind, partition, "", {}, _NOT_ASKED) for kind, partition in ordered[MOST_JOBS:]]
    return ordered[:MOST_JOBS], rest


class _Job:
    """A probe. It asks for all of one node, as jobs of the profile will: so the profile's request is tried, too."""

    def __init__(self, kind: NodeType, partition: str, log: Path) -> None:
        self.kind, self.partition, self.log = kind, partition, log
        self.id: JobId | None = None
        self.why = ""
        self._facts: dict[str, list[str]] | None = None
        self._state = ""
        self._over_since: float | None = None

    def submit(self, live: Live, account: str | None, token: str, say: Callable[[str], None]) -> None:
        """Print the command and run it; a refusal is kept."""
        script = asset_folder("templates") / "sbatch" / "site_probe.sh"
        command = Slurm().command(
            _options(live, self.kind, self.partition, account, token), str(script), (), log=str(self.log)
        )
        say(shlex.join(command))
        try:
            self.id = Slurm().submit(command, self.log.parent)
            say(f"  job {self.id.id}: {self.kind}")
        except UserError as error:
            self.why = f"sbatch refused the probe: {error.what.partition(chr(10))[2] or error.what}"
            say(f"  {self.why}")

    def look(self) -> bool:
        """Return whether nothing more will come of it: it was refused, or its output is whole."""
        if not self.why and self._facts is None:
            with suppress(OSError):  # not there yet
                self._facts = read_log(self.log.read_text(encoding="utf-8", errors="replace"))
        return bool(self.why) or self._facts is not None

    def hear(self, view: JobView | None, say: Callable[[str], None]) -> None:
        """Take what Slurm says. The output of a job that is over may still be on its way."""
        state = f"{view.word} {view.reason}".strip() if view else "unknown to Slurm"
        if state != self._state:
            say(f"  job {self._number}: {state}")
            self._state = state
        if view is None or view.state.over:
            self._over_since = self._over_since or time.monotonic()
            if time.monotonic() - self._over_since > LATE:
                problem = f"job {self._number} is {state}, and its output in {self.log.parent} is not whole"
                self.why = f"{problem}: is your home folder on the nodes?"

    def give_up(self, wait: float) -> None:
        """Say why it saw nothing: the time is over."""
        self.why = f"job {self._number} was {self._state or 'submitted'} after {wait:.0f} s"

    @property
    def _number(self) -> str:
        return self.id.id if self.id else ""

    def seen(self) -> Seen:
        return Seen(self.kind, self.partition, self._number, self._facts or {}, self.why)


def _options(live: Live, kind: NodeType, partition: str, account: str | None, token: str) -> tuple[str, ...]:
    row, gpus = live.partitions[partition], kind.node.gpus
    memory = live.cluster.memory(kind.node, row)
    request = None
    if len(gpus) == 1:
        ((name, count),) = gpus.items()
        number = f"{name}:{count}" if name else str(count)
        request = f"--gres=gpu:{number}" if live.gpu_request == "gres" else f"--gpus-per-node={number}"
    options = (
        f"--job-name=slurmddp-probe-{token}",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={live.cluster.cpus(kind.node, row)}",
        request,
        f"--mem={memory}M" if memory > 1 else None,
        f"--account={account}" if account else None,
        f"--time={slurm_time(min(_TIME, live.max_time(row)[0] or _TIME))}",
        f"--partition={partition}",
        # Without it, Slurm takes any node of the partition.
        f"--nodelist={kind.inside(partition).node.name}" if len(live.types(partition)) > 1 else None,
        "--no-requeue",
    )
    return tuple(option for option in options if option is not None)


@contextmanager
def _cancelled(token: str, say: Callable[[str], None]) -> Iterator[None]:
    """At the end, and on Ctrl-C, cancel by name: also a job whose sbatch had not answered yet."""
    try:
        yield
    except BaseException:
        say("cancelling the probes")
        raise
    finally:
        with suppress(SlurmddpError):
            ask(("scancel", f"--user={getpass.getuser()}", f"--name=slurmddp-probe-{token}"))


def _wait(jobs: list[_Job], wait: float, say: Callable[[str], None]) -> None:
    """Wait until all are over. Slurm is asked now and then: a log that has its end needs no question."""
    deadline, ask_at = time.monotonic() + wait, 0.0
    while waiting := [job for job in jobs if not job.look()]:
        if time.monotonic() > deadline:
            for job in waiting:
                job.give_up(wait)
            return
        if time.monotonic() >= ask_at:
            with suppress(ExternalError):  # a controller that is busy is asked again
                views = Slurm().jobs([job.id for job in waiting if job.id])
                for job in waiting:
                    job.hear(views.get(job.id) if job.id else None, say)
            ask_at = time.monotonic() + ASK_EVERY
        time.sleep(LOOK_EVERY)
