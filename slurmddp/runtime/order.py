"""The order of the samples: an endless row of epochs, each a permutation of the dataset, addressed by
position.

Global batch b covers positions b*G .. (b+1)*G-1 of that row, so a global batch may span two epochs, and
nothing is dropped or repeated. Any number of ranks that deals out the same positions sees the same samples.

The permutation is computed, not stored: a Feistel network keyed by (seed, epoch), walked until it lands
inside the dataset. It costs no memory (torch.randperm of 10^9 windows takes 8 GB in every rank), can start
anywhere, and consists of integer arithmetic alone, so no version of torch or Python can change it under a
run that resumes.
"""

import hashlib

import torch

_ROUNDS = 6
_MASK32 = 0xFFFFFFFF


class SampleOrder:
    """Sample ids by global position, for a dataset of `length` samples. At most 2**62 samples."""

    def __init__(self, length: int, seed: int) -> None:
        if length < 1:
            raise ValueError("the dataset is empty")
        self.length = length
        self.seed = seed

    def ids(self, positions: torch.Tensor) -> list[int]:
        """The sample ids at ascending global positions, int64 [n], which count on through the epochs.

        A call costs about as much for one position as for a thousand: ask for many at once.
        """
        ids: list[int] = []
        epochs = positions // self.length
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1) if len(positions) else ():
            offsets = positions[epochs == epoch] - epoch * self.length
            ids += permute(offsets, self.length, keys(self.seed, epoch)).tolist()
        return ids


def keys(seed: int, epoch: int) -> list[int]:
    """Round keys of 32 bits for one epoch's permutation."""
    digest = hashlib.sha256(f"slurmddp order {seed} {epoch}".encode()).digest()
    return [int.from_bytes(digest[4 * n : 4 * n + 4], "little") for n in range(_ROUNDS)]


def permute(index: torch.Tensor, length: int, round_keys: list[int]) -> torch.Tensor:
    """Where each index below `length` goes in the permutation: int64 of any shape [n] to int64 [n], a
    bijection.
    """
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
