"""torch's private names that agents and ranks use; no other module uses one.

Unless a line says otherwise, each was seen in torch 2.4 to 2.13. Where a version lacks one, the job is refused with its
name, or does without what it is for: each function says which.
"""

import contextlib
import datetime
import importlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from types import FrameType
from typing import Any, BinaryIO, NoReturn

import torch

from slurmddp.runtime.environment import STORE, local_store, stat_fields
from slurmddp.runtime.errors import UserError

#: Makes the store of `env://` and `tcp://`: torch 2.2 to 2.15. `register_rendezvous_handler` refuses both names.
_MAKER = "_create_c10d_store"


def meet_privately() -> None:
    """Let this process meet the other ranks where no stranger is: see STORE, without which it does nothing.

    Call it when torch.distributed is loaded.
    """
    folder = os.environ.get(STORE, "")
    if (agent := local_store()) is not None:
        _meet_through(*agent)
    elif folder and os.path.isdir(folder):  # else such as in a container that a script of the user's starts
        _meet_in_file(folder)


def _meet_through(local: str, local_port: int) -> None:
    """Let clients of the ranks' store connect with this node's agent, which connects with the head through TLS.

    MASTER_ADDR stays the head's, on which a script may have ports of its own.
    """
    kind: Any = importlib.import_module("torch.distributed").TCPStore
    plain = kind.__init__
    if hasattr(plain, "slurmddp"):
        return

    def init(self: Any, host_name: str, port: int, *more: Any, **options: Any) -> None:
        if (host_name, str(port)) == (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")):
            host_name, port = local, local_port
        plain(self, host_name, port, *more, **options)

    init.slurmddp = True  # type: ignore[attr-defined]
    kind.__init__ = init


def _meet_in_file(folder: str) -> None:
    """Let `env://` of this process meet the other ranks in a file, which no other user can open.

    Everybody on the node reaches the TCP store of torch, and whoever writes there can join as a rank. If torch lacks
    the private name, it says so, and the ranks meet as torch has it.
    """
    module: Any = sys.modules.get("torch.distributed.rendezvous")
    plain = getattr(module, _MAKER, None)
    if plain is None:
        import torch

        print(
            f"slurmddp: note: torch {torch.__version__} has no {_MAKER}, so the ranks meet in its TCP store, which any "
            f"user of this node can reach",
            file=sys.stderr,
            flush=True,
        )
        return
    if hasattr(plain, "slurmddp"):
        return
    numbers = itertools.count()

    def make(hostname: str, port: int, rank: int, world_size: int, timeout: Any, *more: Any, **options: Any) -> Any:
        asked = (hostname, str(port), str(rank), str(world_size))
        ours = tuple(os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))
        if asked != ours:  # a group of the script's own, such as of processes that a rank started
            return plain(hostname, port, rank, world_size, timeout, *more, **options)
        from torch.distributed import FileStore

        # A file for each time: keys of a group that was destroyed would mislead the next one. No number of ranks, at
        # which the last one would remove the file.
        store = FileStore(os.path.join(folder, f"group-{next(numbers)}"), -1)
        store.set_timeout(timeout)
        return store

    make.slurmddp = True  # type: ignore[attr-defined]
    setattr(module, _MAKER, make)


def _lacks(name: str) -> NoReturn:
    raise UserError(
        f"torch {torch.__version__} has no {name}, which slurmddp needs (seen in torch 2.4 to 2.13): use an image with "
        f"another torch, or a newer slurmddp",
        shared=True,
    )


def _private(owner: Any, name: str) -> Any:
    """Return what torch keeps under a private name. Raises UserError if this version lacks it."""
    found = getattr(owner, name, None)
    return _lacks(f"{getattr(owner, '__name__', type(owner).__name__)}.{name}") if found is None else found


def _of_module(module: str, name: str) -> Any:
    """Return what a module of torch has under a private name. Raises UserError if this version lacks it."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        _lacks(f"{module}.{name}")


# --- tensors and modules


def foreach(name: str) -> Callable[..., Any]:
    """Return what works on all tensors of a list with few kernels: mul_, norm or copy_. Raises UserError."""
    return _private(torch, f"_foreach_{name}")  # type: ignore[no-any-return]


def compiled_module(module: Any) -> Any:
    """Return the script's own module in one that torch.compile has made; None for any other."""
    return getattr(module, "_orig_mod", None)


def dispatch_mode() -> Any:
    """Return the base class of what sees each operator. Raises UserError."""
    return _of_module("torch.utils._python_dispatch", "TorchDispatchMode")


def operator_of(overload: Any) -> Any:
    """Return the operator of an overload, as flop_registry has it. Raises UserError."""
    return _private(overload, "_overloadpacket")


def in_backward() -> bool:
    """Return whether this thread is in a backward pass; False if torch does not tell."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return task is not None and task() != -1


def after_backward(action: Callable[[], None]) -> None:
    """Have autograd call it at the end of the backward pass that runs now. Raises UserError."""
    _private(torch.autograd.Variable, "_execution_engine").queue_callback(action)


# --- sharding and checkpoints


def earlier_fully_shard() -> Any:
    """Return FSDP2 of torch 2.4 and 2.5. Raises ImportError with a version that has it elsewhere."""
    from torch.distributed._composable.fsdp import fully_shard

    return fully_shard


def set_timeout(group: Any, seconds: float) -> None:
    """Give a process group another limit; without the name, it keeps its own."""
    change = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_set_pg_timeout", None)
    if change is not None:
        change(datetime.timedelta(seconds=seconds), group)


def storage_info(file: str, start: int, size: int) -> Any:
    """Return where torch.distributed.checkpoint finds a part of a file. Raises UserError."""
    return _of_module("torch.distributed.checkpoint.filesystem", "_StorageInfo")(file, start, size)


def file_view(file: BinaryIO, start: int, size: int) -> Any:
    """Return a part of an open file as a file of its own. Raises UserError."""
    return _of_module("torch.distributed.checkpoint.utils", "_create_file_view")(file, start, size)


# --- torchrun's agent


def replace_store(handler: Any, make: Callable[[Any, int], Any]) -> None:
    """Let a DynamicRendezvousHandler hand out what `make` makes of its store and the number of the rendezvous.

    torch has no public way to either. Raises UserError.
    """
    plain, holder = _private(handler, "_get_store"), _private(handler, "_state_holder")
    handler._get_store = lambda: make(plain(), holder.state.round)


def name_methods_by_frame() -> None:
    """Name the rendezvous' events without inspect.stack(), which looks for the sources of all frames in all modules.

    Without the private name, torch does so: over 1 s of CPU time for each rendezvous of a warm agent.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    if hasattr(dynamic_rendezvous, "get_method_name"):
        dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


def take_echoes_for_one(seconds: float) -> None:
    """Have torchrun's agent take each SIGTERM within so many seconds after the first for the same one.

    Slurm sends it to all processes of a step, and Apptainer passes on its own. At a second one, torchrun leaves while
    its ranks save. Without the private name, it does so.
    """
    api: Any = importlib.import_module("torch.distributed.elastic.multiprocessing.api")
    plain: Any = getattr(api, "_terminate_process_handler", None)
    first: list[float] = []

    def handler(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            first.append(time.monotonic())
            if len(first) > 1 and first[-1] - first[0] < seconds:
                return
        plain(number, frame)

    if plain is not None:
        api._terminate_process_handler = handler


def kill_stopped_ranks() -> None:
    """Have torchrun's agent end ranks that are stopped (SIGSTOP) with SIGKILL: they take no SIGTERM, and it waits 30 s.

    No private name, but a seam that torch does not promise.
    """
    api: Any = importlib.import_module("torch.distributed.elastic.multiprocessing.api")
    plain = api.PContext.close

    def close(self: Any, *words: Any, **options: Any) -> None:
        for pid in self.pids().values():
            with contextlib.suppress(OSError, IndexError):  # it has exited
                state, parent = stat_fields(pid)[:2]
                if state == "T" and int(parent) == os.getpid():
                    os.kill(pid, signal.SIGKILL)
        plain(self, *words, **options)

    api.PContext.close = close


def makes_optimizer_state() -> bool:
    """Return whether DCP's get_state_dict calls the optimizer's step, so as to have a state to load into.

    Without the private name, its call is taken for a step.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_init_optim_state":
        frame = frame.f_back
    return frame is not None


def see_failures(look: Callable[[Mapping[int, Any]], None]) -> None:
    """Call `look` with the failures, by rank, whenever torchrun's agent has looked at its ranks. Raises UserError."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    plain = _private(LocalElasticAgent, "_monitor_workers")

    def monitor(agent: Any, *words: Any) -> Any:
        result = plain(agent, *words)
        look(result.failures)
        return result

    LocalElasticAgent._monitor_workers = monitor  # type: ignore[method-assign]


def start_ranks_by(start: Callable[..., Any]) -> None:
    """Have torchrun start each rank by `start(args, variables, stdout, stderr)`, which returns what looks like a Popen.

    With None, torchrun starts it itself. The files are None where the rank has the agent's own. Tried with torch 2.13.
    Raises UserError.
    """
    module = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
    handler = _of_module(module, "SubprocessHandler")
    plain = _private(handler, "_popen")

    def popen(self: Any, args: Any, env: Any) -> Any:
        return start(args, env, self._stdout, self._stderr) or plain(self, args, env)

    handler._popen = popen


def end_epochs_after(batches: int) -> None:
    """Have each DataLoader end after so many batches, and say so as its length. Raises UserError."""
    from torch.utils.data import DataLoader, dataloader

    iterator: Any = _private(dataloader, "_BaseDataLoaderIter")
    plain_next, plain_len = iterator.__next__, DataLoader.__len__

    def next_(self: Any) -> Any:
        # What Accelerate and Trainer skip after a resume is a part of the epoch.
        if self._num_yielded >= batches - getattr(self._index_sampler, "skip_batches", 0):
            raise StopIteration
        return plain_next(self)

    iterator.__next__ = next_
    DataLoader.__len__ = lambda self: min(plain_len(self), batches)  # type: ignore[method-assign]


# --- what the observer of a script reads; without a name, it does without


def collectives_of(group: Any) -> int:
    """Return how many collectives this rank has issued in a group. Raises AttributeError, RuntimeError."""
    return group._get_sequence_number_for_group()  # type: ignore[no-any-return]


def groups(only: Collection[Any] | None = None) -> Iterator[tuple[str, dict[int, int], int]]:
    """Yield name, ranks and number of collectives of each process group, or of those in `only`.

    No group outlives its destruction here.
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(c10d, "_world", None)
    if world is None:
        return
    for group, ranks in tuple(world.pg_group_ranks.items()):
        try:
            if only is None or group in only:
                yield world.pg_names[group], ranks, collectives_of(group)
        except (KeyError, RuntimeError, AttributeError):  # gone by now, or its backend counts nothing
            continue


def collectives(only: Collection[Any] | None = None) -> dict[str, int]:
    """Return what this rank has issued by process group, as `groups`.

    A key is the same text on all ranks of a group, and another one for any other group.
    """
    return {
        f"{name}:{len(ranks)}:{min(ranks, default=0)}:{max(ranks, default=0)}": number
        for name, ranks, number in groups(only)
    }


def flight_recorder() -> bytes | None:
    """Return the newest collectives of this rank, without stacks; None if this torch has no recorder for them."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    # NCCL has a recorder of its own. Older versions of torch have no other one.
    nccl = c10d is not None and any("nccl" in str(name) for name, _ in c10d._world.pg_map.values())
    recorders = sys.modules.get("torch._C._distributed_c10d")
    take = getattr(recorders, "_dump_nccl_trace" if nccl else "_dump_fr_trace", None)
    return None if take is None else take(includeStackTraces=False)


def ddp_in_forward() -> Any:
    """Return the DistributedDataParallel that is in its forward pass; None if there is none, or torch does not tell."""
    return getattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None)


def ddp_data(module: Any) -> Any:
    """Return what DDP logs of itself. Raises AttributeError."""
    return module._get_ddp_logging_data()
