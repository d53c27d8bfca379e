"""Whether ranks that should hold the same parameters do: a cheap hash of them, compared across ranks."""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from slurmddp.runtime.errors import ReplicasDifferError
from slurmddp.runtime.parallel.model import local
from slurmddp.runtime.world import World

_MODULUS = 2**61 - 1


class Agreement:
    """Compares replicas without holding up a step: `begin` sends this rank's hash, `check` a step later reads all.

    Every rank has to call both, at the same steps. `groups`: the ranks that hold the same parameters, each group for
    itself (under sharding, ranks of different shards differ by right).
    """

    def __init__(self, world: World, model: nn.Module, groups: Sequence[Sequence[int]]) -> None:
        self._world = world
        self._model = model
        self._groups = [group for group in groups if len(group) > 1]
        self._values = [torch.zeros(1, dtype=torch.int64) for _ in range(world.size)]
        self._pending: tuple[int, dist.Work] | None = None

    def begin(self, step: int) -> None:
        """Send the hash of the parameters as they are after `step`; an older one on its way is checked first.

        That of the same step, sent already, stands.
        """
        if self._pending is not None and self._pending[0] == step:
            return
        self.check()
        if self._groups:
            own = torch.tensor([fingerprint(self._model.parameters())])
            work = dist.all_gather(self._values, own, group=self._world.coordination, async_op=True)
            assert work is not None
            self._pending = (step, work)

    def check(self) -> None:
        """Compare what `begin` has sent since the last call. Raises ReplicasDifferError on all ranks."""
        if self._pending is None:
            return
        (step, work), self._pending = self._pending, None
        work.wait()
        values = [int(value) for value in self._values]
        if any(len({values[rank] for rank in group}) > 1 for group in self._groups):
            self._refuse(step, values)

    def _refuse(self, step: int, values: list[int]) -> None:
        nodes = self._world.gather(self._world.node)
        lines = [line for group in self._groups for line in _odd_ones(group, values, nodes)]
        raise ReplicasDifferError(
            f"step {step}: the parameters differ between ranks, so this step is not saved. Likely causes: a "
            f"failing GPU or memory, or an update that differs between ranks:\n  " + "\n  ".join(lines),
            shared=True,
        )


def _odd_ones(group: Sequence[int], values: Sequence[int], nodes: Sequence[str]) -> list[str]:
    counted = Counter(values[rank] for rank in group).most_common()
    if len(counted) == 1:
        return []
    (usual, most), (_, second) = counted[:2]
    names = {rank: f"rank {rank} on {nodes[rank]}" for rank in group}
    if most == second:
        listed = ", ".join(f"{names[rank]} has {values[rank]:016x}" for rank in group)
        return [f"no majority, so it is unknown which ranks are right: {listed}"]
    return [f"{names[rank]} differs from {most} of {len(group)} ranks" for rank in group if values[rank] != usual]


def fingerprint(parameters: Iterable[torch.Tensor]) -> int:
    """Return a hash of 61 bits of the bytes of some tensors (of this rank's shards, where they are sharded).

    Any one changed value changes it: each tensor is summed as integers that wrap around, and the sums are mixed with
    their place. About as fast as reading the memory once. One wait for the device.
    """
    sums = [_sum(local(tensor).detach()) for tensor in parameters]
    result = 0
    for number in torch.stack(sums).tolist() if sums else ():
        result = (result * 1_000_003 + number) % _MODULUS
    return result


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.contiguous().view(-1)
    if flat.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    content = flat.view(torch.uint8)
    whole = content.numel() // 8 * 8
    # A storage offset that is no multiple of eight cannot be seen as eight-byte words.
    words = content[:whole] if content.storage_offset() % 8 == 0 else content[:whole].clone()
    total = words.view(torch.int64).sum()
    return total + content[whole:].sum(dtype=torch.int64)
