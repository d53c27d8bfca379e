"""The order of the samples: an endless row of epochs, each a permutation of the dataset, addressed by
position.

Global batch b covers positions b*G .. (b+1)*G-1 of that row, so a global batch may span two epochs, and
nothing is dropped or repeated. Any number of ranks that deals out the same positions sees the same samples.

The permutation is computed, not stored: a Feistel network keyed by (seed, epoch), walked until it lands
inside the dataset. It costs no memory (torch.randperm of 10^9 windows takes 8 GB in every rank), can start
anywhere, and consists of integer arithmetic alone, so no version of torch or Python can change it under a
run that resumes.

Samples of variable length can be taken in another order (`ByLength`), in which the samples of one global batch
are about equally long.
"""

import hashlib
from collections.abc import Sequence

import torch

from slurmddp.runtime.errors import UserError

_ROUNDS = 6
_MASK32 = 0xFFFFFFFF


class SampleOrder:
    """Sample ids by global position, for a dataset of `length` samples. At most 2**62 samples."""

    def __init__(self, length: int, seed: int) -> None:
        if length < 1:
            raise ValueError("the dataset is empty")
        self.length = length
        self.seed = seed

    @property
    def lengths(self) -> torch.Tensor | None:
        """Lengths of the samples by id, where they matter: a global batch is then dealt out by them."""
        return None

    def ids(self, positions: torch.Tensor) -> list[int]:
        """Return the sample ids at ascending global positions, int64 [n], which count on through the epochs."""
        ids: list[int] = self.samples(positions)[0].tolist()
        return ids

    def samples(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample ids and their epochs, int64 [n] each, at ascending global positions, int64 [n].

        A call costs about as much for one position as for a thousand: ask for many at once.
        """
        epochs = positions // self.length
        ids = [
            permute(positions[epochs == epoch] - epoch * self.length, self.length, keys(self.seed, epoch))
            for epoch in (range(int(epochs[0]), int(epochs[-1]) + 1) if len(positions) else ())
        ]
        return torch.cat(ids) if ids else positions, epochs


class ByLength(SampleOrder):
    """The same samples, those of so many global batches together sorted by length.

    A window is `batches` * `total` positions of the row, counted from position `origin` on. Its samples are sorted by
    length (ties: by position), cut into global batches, and these are put in an order of their own, drawn from
    (seed, window). So a window holds the same samples as without sorting; where a run ends in the middle of one, it has
    not seen the rest of it. A window is full at the end of an epoch, too: the sequence continues.
    """

    def __init__(
        self,
        length: int,
        seed: int,
        lengths: Sequence[int] | torch.Tensor,
        *,
        total: int,
        batches: int,
        origin: int = 0,
    ) -> None:
        """`lengths`: of each sample; `total`: samples per global batch; `batches`: global batches per window."""
        super().__init__(length, seed)
        if total < 1 or batches < 1:
            raise ValueError(f"a window needs at least one batch of one sample, not {batches} of {total}")
        if len(lengths) != length:
            raise ValueError(f"{length} samples, but {len(lengths)} lengths")
        self._lengths = as_tensor(lengths)
        self._total, self._batches, self._origin = total, batches, origin
        self._kept: tuple[int, torch.Tensor, torch.Tensor] | None = None

    @property
    def lengths(self) -> torch.Tensor:
        return self._lengths

    def samples(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return as SampleOrder.samples does. A window is computed once for all calls that stay in it."""
        if len(positions) and int(positions[0]) < self._origin:
            raise ValueError(f"position {int(positions[0])} is before {self._origin}, where the windows begin")
        size = self._total * self._batches
        windows = (positions - self._origin) // size
        parts = []
        for number in range(int(windows[0]), int(windows[-1]) + 1) if len(positions) else ():
            start = self._origin + number * size
            ids, epochs = self._window(start, size)
            offsets = positions[windows == number] - start
            parts.append((ids[offsets], epochs[offsets]))
        if not parts:
            return positions, positions
        return torch.cat([ids for ids, _ in parts]), torch.cat([epochs for _, epochs in parts])

    def _window(self, start: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._kept is None or self._kept[0] != start:
            ids, epochs = super().samples(torch.arange(start, start + size))
            by_length = torch.argsort(self._lengths[ids], stable=True).view(self._batches, self._total)
            mixed = permute(torch.arange(self._batches), self._batches, keys(self.seed, f"window {start}"))
            offsets = by_length[mixed].flatten()
            self._kept = start, ids[offsets], epochs[offsets]
        return self._kept[1:]


def window_origin(
    position: int, *, saved: tuple[int, int | None, int], total: int, by_length: int | None, where: str = ""
) -> int:
    """Return the position from which windows count in a run that continues at `position`.

    `saved`: global batch, by_length and origin at which the run came there. Where they stay, so does the origin.
    Where one changes, windows count from here on. Raises UserError if that is the middle of an old window: its first
    batches would come again, or its last ones never. `where`: file and line of the keys, for the message.
    """
    old_total, old_batches, origin = saved
    if (old_total, old_batches) == (total, by_length):
        return origin
    if old_batches is None or aligned(position, old_total, old_batches, origin):
        return position
    left = old_batches - (position - origin) // old_total % old_batches
    raise UserError(
        f"{where}cannot change to global {total}, by_length {by_length} at this checkpoint: samples would be lost or "
        f"repeated. It is in the middle of {old_batches} global batches that are sorted by length together. Set "
        f"global {old_total} and by_length {old_batches} again. To change them, first train {left} more "
        f"step{'s' * (left > 1)}",
        shared=True,
    )


def aligned(position: int, total: int, batches: int | None, origin: int = 0) -> bool:
    """Return whether global batch or by_length can change at `position` without losing or repeating samples."""
    return batches is None or (position - origin) % (total * batches) == 0


def as_tensor(numbers: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """Return an integer tensor [n], if possible without a copy. No number may have its top bit set."""
    if isinstance(numbers, torch.Tensor):
        return numbers
    try:
        view = memoryview(numbers)  # type: ignore[arg-type]
    except TypeError:
        return torch.tensor(numbers, dtype=torch.int64)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if view.readonly or view.format.upper() not in "BHILQ":
        return torch.tensor(view.tolist(), dtype=torch.int64)
    return torch.frombuffer(view, dtype=kinds[view.itemsize])


def keys(seed: int, epoch: int | str) -> list[int]:
    """Round keys of 32 bits for the permutation of one epoch, or of something else that has a name."""
    digest = hashlib.sha256(f"slurmddp order {seed} {epoch}".encode()).digest()
    return [int.from_bytes(digest[4 * n : 4 * n + 4], "little") for n in range(_ROUNDS)]


def permute(index: torch.Tensor, length: int, round_keys: list[int]) -> torch.Tensor:
    """Return where each index below `length` goes in the permutation, a bijection: int64 [n] to int64 [n]."""
    bits = max(2, (length - 1).bit_length())
    result = _feistel(index, bits, round_keys)
    # The network permutes 0..2**bits-1. Following the cycle until it is back below `length` permutes that
    # part alone.
    outside = (result >= length).nonzero().flatten()
    while len(outside):
        result[outside] = _feistel(result[outside], bits, round_keys)
        outside = outside[result[outside] >= length]
    return result


def _feistel(index: torch.Tensor, bits: int, round_keys: list[int]) -> torch.Tensor:
    left_bits, right_bits = bits - bits // 2, bits // 2
    left, right = index >> right_bits, index & ((1 << right_bits) - 1)
    for key in round_keys:
        mixed = _mix(right, key).bitwise_and_((1 << left_bits) - 1).bitwise_xor_(left)
        left, right = right, mixed
        left_bits, right_bits = right_bits, left_bits
    return (left << right_bits).bitwise_or_(right)


def _mix(value: torch.Tensor, key: int) -> torch.Tensor:
    """32 well mixed bits of a value below 2**32. Factors stay below 2**31: int64 never overflows."""
    value = value.bitwise_xor(key).mul_(0x45D9F3B).bitwise_and_(_MASK32)
    value.bitwise_xor_(value >> 16).mul_(0x45D9F3B).bitwise_and_(_MASK32)
    return value.bitwise_xor_(value >> 16)
