"""DDP's buckets of gradients: how they are added up over the ranks, and what can be done with them as a whole."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

#: Told the number of a gradient bucket that is ready, whose exchange starts now, and whether it is a step's last one.
#: Called within the backward pass: has to be quick, and must not raise.
OnBucket = Callable[[int, bool], None]

Future = torch.futures.Future[torch.Tensor]

# Longer ones are summed up less exactly on a CPU: 32,768 fp32 squares to 1e-6, a million to 3e-5.
_PIECE = 1 << 15


class Buckets:
    """What DDP's hook is told of: it adds up each bucket over all ranks as soon as it is ready.

    The sum is not divided, so that rounding is as in one process.
    """

    def __init__(
        self, model: DistributedDataParallel, device: torch.device, on_bucket: OnBucket | None, *, bf16: bool
    ) -> None:
        """Registers the hook. `bf16`: sums are rounded to it on the way, half the bytes."""
        assert dist.group.WORLD is not None
        self._world = dist.group.WORLD
        self._on_bucket = on_bucket
        self._on_cpu = device.type == "cpu"
        self._begun: list[dist.Work] = []
        self._buffers: list[torch.Tensor] = []
        self._places: list[int] = []
        self._pieces: list[torch.Tensor] | None = None
        model.register_comm_hook(self, _sum_in_bf16 if bf16 else _begin_sum if self._on_cpu else _sum)

    def arrive(self) -> None:
        """After a backward pass that exchanges gradients: wait for what of it is still on its way."""
        for work in self._begun:
            work.wait()
        self._begun.clear()

    def pieces(self, parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor] | None:
        """The buckets of the last pass, in pieces of which a norm is quick and exact on a CPU; None on a GPU, and where
        the gradients of `parameters` are not all in them.
        """
        places = [buffer.untyped_storage().data_ptr() for buffer in self._buffers]
        if places != self._places:  # DDP has made them anew: after its first pass, and never again.
            gradients = [item.grad for item in parameters if item.grad is not None]
            apart = any(item.untyped_storage().data_ptr() not in places for item in gradients)
            pieces = [piece for buffer in self._buffers for piece in torch.split(buffer, _PIECE)]
            self._pieces = None if apart or not self._on_cpu else pieces
            self._places = places
        return self._pieces

    def tell(self, bucket: dist.GradBucket) -> torch.Tensor:
        """For the hook: a bucket is ready. Returns its gradients."""
        index = bucket.index()
        if self._on_bucket is not None:
            self._on_bucket(index, bucket.is_last())
        buffer: torch.Tensor = bucket.buffer()
        if index == 0:
            self._buffers = []
        self._buffers.append(buffer)
        return buffer

    def begin(self, buffer: torch.Tensor) -> None:
        """For the hook: start to add up in place; `arrive` waits."""
        self._begun.append(self._world.allreduce([buffer]))


def _begin_sum(buckets: Buckets, bucket: dist.GradBucket) -> Future:
    """Start to add up a bucket over all ranks, in place, and tell DDP that it is done.

    What DDP does after that moves no number, since gradients are views of the buckets. A callback that gives it the
    result later would run in gloo's thread, and wait there for the interpreter that the backward pass holds.
    """
    buffer = buckets.tell(bucket)
    buckets.begin(buffer)
    done = Future()
    done.set_result(buffer)
    return done


def _sum(buckets: Buckets, bucket: dist.GradBucket) -> Future:
    """Add up a bucket over all ranks."""
    return _added_up(buckets.tell(bucket)).then(_first)


def _sum_in_bf16(buckets: Buckets, bucket: dist.GradBucket) -> Future:
    """As `_sum`, rounded to bf16 on the way: half the bytes."""
    buffer = buckets.tell(bucket)
    return _added_up(buffer.to(torch.bfloat16)).then(lambda future: buffer.copy_(_first(future)))


def _added_up(tensor: torch.Tensor) -> Future:
    """Whose value is a list of the one tensor."""
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    future: Future = work.get_future()
    return future


def _first(future: Future) -> torch.Tensor:
    return future.value()[0]
