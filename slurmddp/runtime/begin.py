"""What torchrun starts in place of a program of the user's own: python -m slurmddp.runtime.begin PROGRAM [ARGS ...]

PROGRAM: a Python script, `-m MODULE`, or `bash SCRIPT`. This process arranges that it ends with its agent, and becomes
`python SCRIPT ARGS` (execv): same process, same interpreter and options, so argv, sys.path, __main__, standard streams,
signals and exit code are those of a plain start. Without it, ranks whose agent was killed run on as orphans, and hold
GPUs and ports. Standard library only.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from slurmddp.records.rank_events import RankStarted
from slurmddp.runtime import environment
from slurmddp.runtime.journal import Events
from slurmddp.runtime.watch import failures
from slurmddp.shared.run_folder import RunFolder

_PR_SET_PDEATHSIG = 1
#: A variable that the agent has from node.sh, and whatever adopts an orphan has not.
_MARK = b"SLURMDDP_RUN="
#: The rank, where a command of launch.wrap has started it (slurmddp/runtime/wrap.py).
WRAPPED = "SLURMDDP_WRAPPED_RANK"


def tell_start() -> None:
    """Write the event `rank_started` on rank 0 of a run: job.sh learns from it how long a start takes."""
    root, attempt = os.environ.get("SLURMDDP_RUN"), os.environ.get("SLURMDDP_ATTEMPT", "")
    if not root or not attempt.isdecimal() or os.environ.get("RANK") != "0":
        return
    events = Events(RunFolder(Path(root)).events, attempt=int(attempt), node=environment.own_node(), rank=0)
    events.write(RankStarted(round(environment.seconds_since_start(), 3)))


#: Called before the script starts, in order; one that raises SystemExit keeps it from starting.
CHECKS: list[Callable[[], None]] = [environment.number_start, failures.check, tell_start]


def main(words: list[str]) -> NoReturn:
    """Become the program with its arguments. words: the command line behind this module's name."""
    if not words[len({"-m", "bash"} & {*words[:1]}) :]:
        usage = "python -m slurmddp.runtime.begin {SCRIPT | -m MODULE | bash SCRIPT} [ARGS ...]"
        print(f"slurmddp: error: usage: {usage}", file=sys.stderr)
        raise SystemExit(2)
    check_start()
    sys.stdout.flush()
    sys.stderr.flush()
    add_hooks()
    options = interpreter_options(words)
    words = [*words, *resume_args()]
    if words[0] == "bash":
        # The errors of other programs that it starts are not the rank's. This id stays with `exec python` in it.
        os.environ["SLURMDDP_RANK_PID"] = str(os.getpid())
        os.execvp("bash", words)
    os.execv(sys.executable, [sys.executable, *options, *script_words(words)])


def check_start() -> None:
    """Have this rank end with its agent, and do what comes before a script. Raises SystemExit if it must not start."""
    if has_agent():
        stay_with_agent()
    for check in CHECKS:
        check()


def with_hooks(variables: Mapping[str, str]) -> dict[str, str]:
    """Return them such that an interpreter loads hooks/sitecustomize.py, which restores PYTHONPATH at once."""
    hooks = str(Path(__file__).resolve().parent / "hooks")
    before = variables.get("PYTHONPATH")
    return {**variables, "PYTHONPATH": hooks if before is None else hooks + os.pathsep + before}


def add_hooks() -> None:
    """Do so for the script's interpreter."""
    os.environ["PYTHONPATH"] = with_hooks(os.environ)["PYTHONPATH"]


def script_words(words: Sequence[str]) -> list[str]:
    """Return what stands behind the interpreter's options: a module's file, where it is one, and the arguments."""
    return [str(Path(__file__).with_name("run_module.py")), *words[1:]] if words[0] == "-m" else [*words]


def resume_args() -> list[str]:
    """Return train.resume_args, if there is a save to load: the agent has chosen it, for all ranks of this start."""
    checkpoint = os.environ.get(environment.CHECKPOINT)
    if not checkpoint:
        return []
    args: list[str] = json.loads(os.environ[environment.RESUME])["args"]
    return [arg.replace("{checkpoint}", checkpoint) for arg in args]


def has_agent() -> bool:
    """Return whether torchrun has started this process: not Slurm, which ends it, nor a command of launch.wrap."""
    return "TORCHELASTIC_RUN_ID" in os.environ and WRAPPED not in os.environ


def stay_with_agent() -> None:
    """Have this process end with torchrun. Raises SystemExit if torchrun has ended already."""
    agent = os.getppid()
    die_with_parent()
    # The agent may have died before the kernel knew of the wish: then nobody will ever send the signal.
    if os.getppid() != agent or not is_agent(agent):
        print("slurmddp: the torchrun agent has exited, so this rank does not start", file=sys.stderr)
        raise SystemExit(1)


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL once the parent is gone. It holds beyond exec, not for children (prctl(2)).

    It is the parent's *thread* that counts: torchrun starts its workers from the main thread. Where the kernel
    refuses, nothing happens.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def is_agent(pid: int) -> bool:
    """Return whether this process started us, and did not adopt us: it is of our interpreter, or has our run's
    variable.

    What adopts orphans (init, slurmstepd, a container's shim) is neither. True where there is no telling.
    """
    try:
        if os.path.samefile(f"/proc/{pid}/exe", "/proc/self/exe"):
            return True
    except OSError:
        pass
    mine = [line for line in Path("/proc/self/environ").read_bytes().split(b"\0") if line.startswith(_MARK)]
    if not mine:
        return True
    try:
        return mine[0] in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def interpreter_options(words: list[str]) -> list[str]:
    """Return the interpreter's own options (-u, -X ...) of this process: what stands before `-m MODULE`."""
    before = sys.orig_argv[1 : len(sys.orig_argv) - len(words)]
    return before[:-2] if before[-2:-1] == ["-m"] else []


if __name__ == "__main__":
    main(sys.argv[1:])
