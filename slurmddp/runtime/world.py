"""The process group, and how ranks talk to each other about anything but gradients."""

import datetime
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from slurmddp.runtime import torch_private
from slurmddp.runtime.environment import Environment
from slurmddp.runtime.errors import PeerError, UserError

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """All ranks of the run, and this one's place among them.

    `coordination` is a gloo group of its own: objects, checkpoint plans and, on CPUs, a step's sums travel there. They
    can neither overtake nor hold up the gradients' group.
    """

    rank: int
    size: int
    local_rank: int
    node: str
    attempt: int
    device: torch.device
    backend: str
    coordination: dist.ProcessGroup

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def broadcast(self, value: Any) -> Any:
        """Return Rank 0's value, on every rank, as `encode` takes it."""
        return self._broadcast(encode(value) if self.is_main else b"")

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank, on every rank, as `encode` takes it."""
        content = encode(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(content)]), group=self.coordination)
        largest = max(map(int, sizes))
        parts = [_buffer(b"", largest) for _ in range(self.size)]
        dist.all_gather([tensor for _, tensor in parts], _buffer(content, largest)[1], group=self.coordination)
        return [json.loads(buffer) for buffer, _ in parts]

    def _broadcast(self, content: bytes) -> Any:
        size = torch.tensor([len(content)])
        dist.broadcast(size, src=0, group=self.coordination)
        buffer, tensor = _buffer(content, int(size))
        dist.broadcast(tensor, src=0, group=self.coordination)
        return json.loads(buffer)

    def together(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank; if it fails on one, every rank raises, and none is left waiting.

        Raises a shared UserError where all failures are the user's to put right, else this rank's own
        exception, or PeerError where only others failed.
        """
        failure: tuple[int, str, str, bool] | None = None
        own: Exception | None = None
        result: Any = None
        try:
            result = action()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks have to hear of it
            own = error
            failure = (self.rank, self.node, str(error) or repr(error), isinstance(error, UserError))
        failures = [(*item,) for item in self.gather(failure) if item is not None]
        if not failures:
            return cast(T, result)
        if all(by_user for *_, by_user in failures):
            raise UserError(_summary(failures, self.size), shared=True) from own
        if own is not None:
            raise own
        rank, node, message, _ = next(item for item in failures if not item[3])
        raise PeerError(f"rank {rank} on {node} failed: {message}")

    def on_main(self, action: Callable[[], Any]) -> Any:
        """Run `action` on rank 0, and give its result, as `encode` takes it, to every rank; a failure is raised on
        all.
        """
        return self._broadcast(self.together(lambda: encode(action()) if self.is_main else b""))


def encode(value: Any) -> bytes:
    """Return a value as JSON: None, bool, int, float, str, lists, and dicts with names for keys. A tuple arrives as a
    list.

    Never pickle: who gets in between two ranks could run code on them. Raises TypeError for anything else.
    """
    _check(value)
    return json.dumps(value).encode()


def _check(value: Any) -> None:
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"the keys of an exchanged dict must be strings, not {value!r:.200}")
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            _check(item)
    elif value is not None and not isinstance(value, bool | int | float | str):
        kind = type(value).__name__
        raise TypeError(
            f"ranks can exchange only JSON values, not {kind}: use numbers, strings, lists (.tolist()) or dicts"
        )


def _buffer(content: bytes, size: int) -> tuple[bytearray, torch.Tensor]:
    """`content`, padded with blanks to `size` bytes, and a tensor over the same memory.

    torch's own object collectives turn tensors to bytes through numpy, which need not be installed.
    """
    buffer = bytearray(content.ljust(size))
    return buffer, torch.frombuffer(buffer, dtype=torch.uint8)


def _summary(failures: list[tuple[int, str, str, bool]], size: int) -> str:
    """One message for all; ranks are named where not all of them failed, or not all for the same reason."""
    rank, node, message, _ = failures[0]
    if len(failures) == size or (rank == 0 and len(failures) == 1):
        return message
    return f"{message} (rank {rank} on {node}; {len(failures)} of {size} ranks failed)"


def start(
    environment: Environment, *, timeout: float, store: dist.Store | None = None, size: int | None = None
) -> World:
    """Choose the device, and join the process group described by torchrun's environment.

    `timeout` in seconds holds for the collectives of training. nccl where there are GPUs, gloo where there are none.
    `store`, `size`: of a group of the first ranks alone.
    Raises UserError where a node has fewer GPUs than ranks; errors of the rendezvous pass through.
    """
    limit = datetime.timedelta(seconds=timeout)
    options: dict[str, Any] = {}
    if torch.cuda.is_available():
        if environment.local_world > torch.cuda.device_count():  # Said by all of its ranks, so by the one that speaks.
            raise UserError(
                f"node {environment.node} has {torch.cuda.device_count()} GPU(s) for {environment.local_world} ranks: "
                f"each rank needs one; change resources.gpus_per_node or resources.ranks_per_node"
            )
        device, backend = torch.device("cuda", environment.local_rank), "nccl"
        torch.cuda.set_device(device)
        options["device_id"] = device  # Binds the communicator to its GPU: no guessing at the first barrier.
    else:
        device, backend = torch.device("cpu"), "gloo"
    if store is not None:
        options |= {"store": store, "rank": environment.rank, "world_size": size}
    torch_private.meet_privately()
    dist.init_process_group(backend, timeout=limit, **options)
    return around(environment, device, limit)


def around(env: Environment, device: torch.device, limit: datetime.timedelta = datetime.timedelta()) -> World:
    """Return the world of a process group that exists; every rank has to call it."""
    # A wait here is mostly for somebody's disk, and gloo notices a peer that is gone without any limit.
    coordination = dist.new_group(backend="gloo", timeout=max(limit, datetime.timedelta(minutes=30)))
    assert coordination is not None  # None is for ranks outside the group; all are in it.
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        local_rank=env.local_rank,
        node=env.node,
        attempt=env.attempt,
        device=device,
        backend=dist.get_backend(),
        coordination=coordination,
    )


def finish() -> None:
    """Leave the process group after a clean end."""
    dist.destroy_process_group()


def be_deterministic() -> None:
    """Ask torch for the same bits every time; an operation that cannot raises RuntimeError."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # Read when cuBLAS starts.
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
