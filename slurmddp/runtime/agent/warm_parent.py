"""The warm process of a node (recovery.spares_warm): it has imported torch once, and forks the agent of each attempt.

It waits in front of the script, like the process from which ranks are forked (forking_template.py), and each agent
forks such a template from itself: so no start of an attempt imports torch. Between it and the agent stands a process
that knows both: it passes signals on, tells the exit code, and kills the agent once warm.py is gone.
"""

import atexit
import contextlib
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import BinaryIO, NoReturn

from slurmddp.runtime import begin
from slurmddp.runtime.agent import forking, warm
from slurmddp.runtime.agent.forking_template import load, quiet_fork, show

#: What may differ between attempts: nothing reads these as torch is imported.
_OF_ATTEMPT = (
    *("SLURM", "PMI", "NCCL_", "GLOO_", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "SHLVL"),
    *("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"),
    *("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"),  # where image_mount.py has mounted the same image
)
#: Seconds between two looks for a signal.
_LOOK = 1.0


def become(words: Sequence[str]) -> NoReturn:
    """Make this process a warm one: an interpreter that is started like a rank's. Raises NotPossible, OSError."""
    variables = begin.with_hooks({**os.environ, forking.TEMPLATE: warm.PARENT})
    program = forking.program_of(words)
    os.execve(sys.executable, [sys.executable, "-u", *begin.script_words(program)], variables)


def serve() -> socket.socket:
    """Import torch, and fork agents. Returns in the template of each: with the connection to its agent."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(warm.address())
    listener.listen()
    # Slurm signals all processes of the job as it ends: those that train may need time for a last save.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, warm.SIGNALS)
    before = dict(os.environ)
    why = load()
    if not why:
        importlib.import_module("slurmddp.runtime.agent.torchrun")
    while True:
        over = signal.SIGTERM in signal.sigpending()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, 0 if over else os.WNOHANG)[0]:
                pass
        if over:
            os._exit(0)
        if not select.select([listener], [], [], _LOOK)[0]:
            continue
        connection, _ = listener.accept()
        if not warm.is_mine(connection) or quiet_fork():
            connection.close()
            continue
        listener.close()
        with contextlib.suppress(OSError):  # warm.py was killed
            return _attend(connection, why, before, mask)
        os._exit(1)


def _attend(
    connection: socket.socket, why: str, before: Mapping[str, str], mask: set[int | signal.Signals]
) -> socket.socket:
    """Fork the agent for one request, and attend to it. Returns in its template.

    before: variables at the import. mask: of signals, for the agent.
    """
    _, files, _, _ = socket.recv_fds(connection, 1, 3)
    lines = connection.makefile("rb")
    words, folder, variables = json.loads(lines.readline())
    names = sorted(name for name in before.keys() | variables.keys() if before.get(name) != variables.get(name))
    changed = [name for name in names if not name.startswith(_OF_ATTEMPT)]
    if changed and not why:
        why = f"{', '.join(changed)} changed since the warm process began"
    connection.sendall(why.replace("\n", " ").encode(errors="backslashreplace") + b"\n")
    if why:
        os._exit(0)
    agent = quiet_fork()
    if agent:
        threading.Thread(target=_pass_on, args=(lines, agent), daemon=True).start()
        code = os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])
        connection.sendall(b"%d\n" % code)
        os._exit(0)
    begin.die_with_parent()
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    lines.close()
    connection.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    own, others = socket.socketpair()
    template = quiet_fork()
    if template:
        others.close()
        show([sys.executable, "-m", "slurmddp.runtime.agent", *words], os.environ)
        _be_agent(words, own, template)
    own.close()
    begin.die_with_parent()
    show(sys.orig_argv, os.environ)
    return others


def _pass_on(lines: BinaryIO, agent: int) -> None:
    """Send the agent the signals that come, and SIGKILL once nobody is there any more."""
    with contextlib.suppress(OSError):
        while numbers := lines.read1(64):  # type: ignore[attr-defined]
            for number in numbers:
                os.kill(agent, number)
    with contextlib.suppress(OSError):
        os.kill(agent, signal.SIGKILL)


def _be_agent(words: Sequence[str], connection: socket.socket, template: int) -> NoReturn:
    """Do what `python -m slurmddp.runtime.agent` does, up to its exit."""
    from slurmddp.runtime.agent import __main__ as agent

    sys.argv = [agent.__file__, *words]
    code: object = 0
    try:
        agent.main([*words], (connection, template))
    except SystemExit as error:
        code = error.code
    except BaseException:  # noqa: BLE001 - as the interpreter would end
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
