"""The process from which an agent forks its ranks: it has imported torch, and waits in front of the script.

hooks/sitecustomize.py calls `serve` in an interpreter that was started like a rank's own, but has not reached the
script yet. In each fork, `serve` returns, and Python itself continues to the script. So argv, sys.path, __main__,
tracebacks and exit codes are those of a plain start. The rest of what a fork inherits is corrected here.

Standard library only, until torch is loaded.
"""

import contextlib
import ctypes
import importlib
import json
import multiprocessing
import os
import signal
import socket
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from slurmddp.records.rank_events import NotForked
from slurmddp.runtime import begin, environment
from slurmddp.runtime.agent import warm
from slurmddp.runtime.journal import Events
from slurmddp.shared.run_folder import RunFolder

#: What the first steps of plain DDP and FSDP ranks import of torch (sys.modules, torch 2.13). A version may lack some.
_LATE = (
    "torch.distributed", "torch._dynamo", "torch._inductor.config", "torch.distributed.algorithms.join",
    "torch.distributed.optim", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.profiler._cupti_monitor",
)  # fmt: skip
#: AMD's driver, with which forks were not tried.
_AMD = "/dev/kfd"
#: A process that has one of these open must never be forked.
_DEVICES = ("/dev/nvidia", _AMD, "/dev/dri/")
#: What a script may set before it imports torch: nothing in torch reads these during the import.
_READ_LATER = ("CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH", "TOKENIZERS_PARALLELISM")
_READ_LATER_PREFIXES = ("NCCL_", "GLOO_", "WANDB_", "HF_")
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14


class Loaded:
    """torch, as the template has imported it, until the script asks for it.

    It is out of sys.modules until then, so that the script is observed from its own import on, and so that what
    it has set in its environment before that is seen.
    """

    def __init__(self) -> None:
        names = [name for name in sys.modules if name.partition(".")[0] == "torch"]
        self._modules = {name: sys.modules.pop(name) for name in names}
        self._environment, self._pid = dict(os.environ), os.getpid()

    @property
    def torch(self) -> ModuleType:
        return self._modules["torch"]

    def give_back(self) -> None:
        """Put the modules back. Where the script has set what torch reads as it is imported: start it again, fresh."""
        before, now = self._environment, dict(os.environ)
        changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        changed = [name for name in changed if name not in _READ_LATER and not name.startswith(_READ_LATER_PREFIXES)]
        if changed and os.getpid() == self._pid:  # not a child of the script's own
            _tell(f"the script sets {', '.join(changed)} before it imports torch")
            _start_fresh(before)
        sys.modules.update(self._modules)


def serve(where: str) -> Loaded:
    """Import torch, tell the agent, and fork a rank for each of its requests, until it is gone. Returns in ranks only.

    where: the file descriptor of the connection to the agent; warm.PARENT: each agent is forked from here, too.
    """
    if where == warm.PARENT:
        from slurmddp.runtime.agent import warm_parent

        agent, why = warm_parent.serve(), ""
    else:
        begin.die_with_parent()
        agent = socket.socket(fileno=int(where))
        agent.set_inheritable(False)
        why = load()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, warm.SIGNALS)
    lines = agent.makefile("rb")
    _answer(agent, why)
    while True:
        first, files, _, _ = socket.recv_fds(agent, 1, 2)
        if not first:
            os._exit(0)
        variables = json.loads(lines.readline())
        middle, pid = _fork()
        if middle:
            break
        _answer(agent, str(pid))
        for file in files:
            os.close(file)
    lines.close()
    agent.close()
    try:
        _become_rank(middle, files, variables)
    except SystemExit as error:
        _exit(error.code if isinstance(error.code, int) else 1)
    except BaseException:  # noqa: BLE001 - as the interpreter would end
        traceback.print_exc()
        _exit(1)
    for name in [name for name in sys.modules if name.partition(".")[0] == "slurmddp"]:
        del sys.modules[name]
    loaded = Loaded()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return loaded


def _answer(agent: socket.socket, text: str) -> None:
    agent.sendall(text.replace("\n", " ").encode(errors="backslashreplace") + b"\n")


def _exit(code: int) -> NoReturn:
    """End this process, before the interpreter has got to its script: SystemExit would be an error of `site`."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _devices() -> list[str]:
    """Return the GPUs that this process has open."""
    files = {os.readlink(entry.path) for entry in os.scandir("/proc/self/fd")}
    return sorted(file for file in files if file.startswith(_DEVICES))


def load() -> str:
    """Import torch and what ranks import late. Return why ranks cannot be forked from this process, or nothing."""
    if os.path.exists(_AMD):
        return "this node has AMD GPUs, with which forked ranks were not tried"
    if _threads() > 1:
        return "the image's Python starts a thread before the script (a .pth file)"
    try:
        importlib.import_module("torch")
        for name in _LATE:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - the ranks, started fresh, will show it
        return f"torch cannot be imported: {type(error).__name__}: {error}"
    if used := _devices():
        return f"the import of torch opens a GPU ({', '.join(used)})"
    try:
        trial = quiet_fork()
    except OSError as error:
        return f"no further process may be started ({error.strerror})"
    # OpenBLAS ends its threads before a fork; whatever still runs does not know of forks.
    if trial == 0:
        os._exit(0)
    os.waitpid(trial, 0)
    if _threads() > 1:
        return f"threads run once torch is imported ({_threads() - 1})"
    try:
        show(sys.orig_argv, os.environ)
    except OSError as error:
        return f"this kernel does not let a process change what /proc shows of it ({error.strerror})"
    return ""


def _fork() -> tuple[int, int]:
    """Fork twice: return 0 and the rank's process id, 0 if it failed; and in the rank, the one between, and 0.

    With the process between gone, the rank is a child of the agent, which has asked for orphans (forking.py).
    """
    reader, writer = os.pipe()
    try:
        first = quiet_fork()
    except OSError:
        os.close(reader)
        os.close(writer)
        return 0, 0
    if first == 0:
        middle = os.getpid()
        try:
            rank = quiet_fork()
        except OSError:
            os._exit(1)
        if rank:
            os._exit(0)
        os.setsid()
        os.close(reader)
        os.write(writer, b"%d" % os.getpid())
        os.close(writer)
        return middle, 0
    os.close(writer)
    pid = os.read(reader, 32)
    os.close(reader)
    os.waitpid(first, 0)
    return 0, int(pid or 0)


def quiet_fork() -> int:
    """os.fork, without Python 3.12's warning that this process has threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _become_rank(middle: int, files: Sequence[int], variables: Mapping[str, str]) -> None:
    """Correct what this process has of its parent. Raises SystemExit if the rank is not to start."""
    while os.getppid() == middle:
        time.sleep(0.0005)
    for file, number in zip(files, (1, 2), strict=True):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(variables)
    _seed()
    importlib.invalidate_caches()
    begin.check_start()
    more = begin.resume_args()
    sys.argv += more
    sys.orig_argv += more
    begin.add_hooks()
    try:
        show(sys.orig_argv, os.environ)
    except OSError:
        _start_fresh(os.environ)


def _seed() -> None:
    """Draw what a fresh process draws at its start. Python's `random` does so by itself."""
    multiprocessing.current_process().authkey = os.urandom(32)
    sys.modules["torch"].default_generator.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def show(argv: Sequence[str], variables: Mapping[str, str]) -> None:
    """Have /proc/self/cmdline and environ show these, as they would after an exec: others find ranks there.

    Needs no privilege (prctl(2), PR_SET_MM_MAP), but CONFIG_CHECKPOINT_RESTORE. Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = libc.malloc.restype = ctypes.c_void_p
    words = b"".join(os.fsencode(word) + b"\0" for word in argv)
    text = words + b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in variables.items())
    start = libc.malloc(ctypes.c_size_t(len(text)))  # never freed: it belongs to the kernel's view of this process
    ctypes.memmove(start, text, len(text))
    fields = environment.stat_fields("self")
    # proc(5): startcode and endcode, start_data, end_data and start_brk, startstack
    code, data, stack = fields[23:25], fields[42:45], fields[25]
    middle, end = start + len(words), start + len(text)
    numbers = [*map(int, (*code, *data)), libc.sbrk(0), int(stack), start, middle, middle, end]
    layout = struct.pack("=12QIi", *numbers, 0, 0, -1)
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, layout, ctypes.c_ulong(len(layout)), ctypes.c_ulong(0)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _start_fresh(variables: Mapping[str, str]) -> NoReturn:
    """Become the same rank, as a process that was not forked."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, sys.orig_argv, dict(variables))


def _tell(why: str) -> None:
    """Write the event `not_forked`: the next start of the agent's ranks is fresh from the beginning."""
    root, attempt = os.environ.get("SLURMDDP_RUN"), os.environ.get("SLURMDDP_ATTEMPT", "")
    if root and attempt.isdecimal() and os.environ.get("LOCAL_RANK") == "0":
        rank = int(os.environ["RANK"])
        events = Events(RunFolder(Path(root)).events, attempt=int(attempt), node=environment.own_node(), rank=rank)
        events.write(NotForked(why))
