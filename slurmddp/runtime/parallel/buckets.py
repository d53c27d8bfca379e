"""How DDP adds up its buckets of gradients over the ranks."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

#: Gets the number of a gradient bucket that is ready, whose exchange starts now, and whether it is a step's last one.
#: DDP calls it within the backward pass: it has to be quick, and must not raise.
OnBucket = Callable[[int, bool], None]

Future = torch.futures.Future[torch.Tensor]


def sum_buckets(model: DistributedDataParallel, on_bucket: OnBucket | None, *, bf16: bool) -> None:
    """Make DDP add up each bucket over all ranks as soon as it is ready.

    The sum is not divided, so that rounding is as in one process. With `bf16` the ranks exchange bf16, half the bytes.
    """
    model.register_comm_hook(on_bucket, _sum_in_bf16 if bf16 else _sum)


def _sum(on_bucket: OnBucket | None, bucket: dist.GradBucket) -> Future:
    return _added_up(_gradients(on_bucket, bucket)).then(_first)


def _sum_in_bf16(on_bucket: OnBucket | None, bucket: dist.GradBucket) -> Future:
    gradients = _gradients(on_bucket, bucket)
    return _added_up(gradients.to(torch.bfloat16)).then(lambda future: gradients.copy_(_first(future)))


def _gradients(on_bucket: OnBucket | None, bucket: dist.GradBucket) -> torch.Tensor:
    if on_bucket is not None:
        on_bucket(bucket.index(), bucket.is_last())
    gradients: torch.Tensor = bucket.buffer()
    return gradients


def _added_up(tensor: torch.Tensor) -> Future:
    """Return a future whose value is a list of the one tensor."""
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    future: Future = work.get_future()
    return future


def _first(future: Future) -> torch.Tensor:
    return future.value()[0]
