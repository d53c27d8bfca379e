"""What torchrun and our own scripts tell a rank through environment variables. Standard library only."""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmddp.runtime.errors import UserError

#: Which start of the ranks this is within the attempt, from 0; the same on all nodes. Set by slurmddp.runtime.agent.
START = "SLURMDDP_START"
#: What the job says of the saves of a script of the user's own, and of the arguments with which it loads one: an object
#: of JSON. And the save that this start may load, which slurmddp.runtime.agent has chosen.
RESUME, CHECKPOINT = "SLURMDDP_RESUME", "SLURMDDP_CHECKPOINT"
#: Where the ranks of one start meet, past strangers. On one node, the folder of a file, which nobody else can enter;
#: set by the agent, or by node.sh with launch.mode srun. On several nodes with TLS, HOST:PORT of the node's agent.
STORE = "SLURMDDP_STORE"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """This process's place in the job.

    `attempt` is the number of the job's start, from SLURMDDP_ATTEMPT: TORCHELASTIC_RESTART_COUNT is not the
    same on all nodes after a restart. `start`: which start of the ranks within it. `local_world`: ranks on this node.
    """

    rank: int
    local_rank: int
    local_world: int
    world: int
    attempt: int
    node: str
    stop_file: Path | None
    start: str = "0"


def read(environ: Mapping[str, str] = os.environ) -> Environment:
    """Read the environment. Raises UserError if a variable is missing or not a number."""
    stop_file = environ.get("SLURMDDP_STOP_FILE")
    rank, local_rank = _number(environ, "RANK"), _number(environ, "LOCAL_RANK")
    return Environment(
        rank=rank,
        local_rank=local_rank,
        local_world=_number(environ, "LOCAL_WORLD_SIZE", default=str(local_rank + 1)),
        world=_number(environ, "WORLD_SIZE"),
        attempt=_number(environ, "SLURMDDP_ATTEMPT", default="0"),
        node=own_node(environ),
        stop_file=Path(stop_file) if stop_file else None,
        start=which_start(environ),
    )


def own_node(environ: Mapping[str, str] = os.environ) -> str:
    """Return this node's name, as node.sh gives it; outside of a run, the host's."""
    return environ.get("SLURMDDP_NODE") or socket.gethostname()


def local_store(environ: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """Return where the ranks of this node reach the store of several nodes that use TLS; None if they do not."""
    host, _, port = environ.get(STORE, "").rpartition(":")
    return (host, int(port)) if host and port.isdecimal() and "/" not in host else None


def earlier_checkpoints(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Return older runs' folders of checkpoints, newest first."""
    return [Path(path) for path in environ.get("SLURMDDP_RESUME_FROM", "").split(":") if path]


def own_gpus(uuids: Sequence[str], environ: Mapping[str, str]) -> list[int]:
    """Return the indexes of this job's GPUs among all that the driver lists; all if CUDA_VISIBLE_DEVICES names none."""
    words = [word.strip() for word in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    every = list(range(len(uuids)))
    if len(words) >= len(uuids):
        return every
    found = [index for index in every if str(index) in words or uuids[index].startswith(tuple(words))]
    return found or every  # parts of GPUs have names of their own


def which_start(environ: Mapping[str, str] = os.environ) -> str:
    """Return which start of the ranks this is within the attempt: the same text on all nodes."""
    return environ.get(START) or environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def number_start() -> None:
    """Give TORCHELASTIC_RESTART_COUNT the same value on all nodes, before torch reads it.

    torchrun counts on each node the restarts that began there. torch 2.4 makes it part of the names in the ranks'
    store, so that ranks of two nodes never met.
    """
    if START in os.environ:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = os.environ[START]


def stat_fields(process: int | str) -> list[str]:
    """Return what the kernel tells of a process, from its state on (proc(5), stat). Raises OSError."""
    return Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()


def seconds_since_start() -> float:
    """Return seconds since this process started, imports included (proc(5), stat); 0 if that cannot be read."""
    try:
        started = int(stat_fields("self")[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError):
        return 0.0


def _number(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environ.get(name, default)
    if text is None:
        raise UserError(
            f"{name} is not set: start this program with torchrun "
            "(python -m torch.distributed.run ... -m slurmddp.runtime.train RUN_DIR)"
        )
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name} must be a whole number, not {text!r}") from None
