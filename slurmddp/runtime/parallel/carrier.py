"""Sums that travel in a bucket of gradients, exactly, instead of in a message of their own.

A message of its own costs a third of a millisecond over gloo, however small it is. Gradients are fp32 numbers that are
added up, and so has to be whatever goes with them. So each float64 is written as a whole number of units of 2**-60, in
digits of 12 bits, each digit an fp32: up to 4096 ranks' digits add up without rounding. The sum is exact, whatever the
number and the order of the ranks.
"""

import math
from collections.abc import Sequence

import torch

_BITS = 12
_BASE = 1 << _BITS
_UNIT = 60
_DIGITS = 9
_LARGEST = float(2 ** (_BITS * _DIGITS - _UNIT))
_LANES = _DIGITS + 1  # The last one counts what cannot be written: nan, infinity, 2**48 and above.

#: With more ranks than this, digits may be rounded.
MOST_RANKS = 4096


def encode(values: Sequence[float]) -> torch.Tensor:
    """fp32 [10 * values]: what each rank adds to the sum."""
    lanes: list[float] = []
    for value in values:
        if not abs(value) < _LARGEST:
            lanes += [0.0] * _DIGITS + [1.0]
            continue
        rest = round(abs(math.ldexp(value, _UNIT)))
        sign = -1.0 if value < 0 else 1.0
        for _ in range(_DIGITS):
            rest, digit = divmod(rest, _BASE)
            lanes.append(sign * digit)
        lanes.append(0.0)
    return torch.tensor(lanes, dtype=torch.float32)


def decode(summed: torch.Tensor) -> list[float]:
    """The sums of the values, from the sum of the ranks' tensors; nan where a rank's value could not be written."""
    lanes = summed.tolist()
    values = []
    for first in range(0, len(lanes), _LANES):
        *digits, unwritten = lanes[first : first + _LANES]
        whole = sum(int(digit) << (_BITS * place) for place, digit in enumerate(digits))
        values.append(math.nan if unwritten else math.ldexp(whole, -_UNIT))
    return values


class Carrier:
    """What the hook of the gradients' buckets takes along once, in the bucket that was the smallest last time.

    What goes along is copied with the bucket and back: in one of 25 MB that took longer than a message of its own.
    """

    def __init__(self) -> None:
        self._load: torch.Tensor | None = None
        self._came: torch.Tensor | None = None
        self._smallest = 0
        self._sizes: dict[int, int] = {}

    def load(self, values: Sequence[float]) -> "Carried":
        """Give it this rank's values, before the backward pass that exchanges gradients; every rank has to."""
        self._load, self._came = encode(values), None
        return Carried(self)

    def take(self, bucket: int, size: int, last: bool) -> torch.Tensor | None:
        """For the hook, with each bucket's number and size: what is to go with it, once a pass. The last one takes it
        where none did before: DDP may have made other buckets since.
        """
        self._sizes[bucket] = size
        load = None
        if last or bucket == self._smallest:
            load, self._load = self._load, None
        if last:
            self._smallest = min(self._sizes, key=lambda number: self._sizes[number])
            self._sizes = {}
        return load

    def arrive(self, summed: torch.Tensor) -> None:
        """For the hook: what came of it."""
        self._came = summed

    def came(self) -> list[float]:
        """The sums over all ranks, after the backward pass."""
        assert self._came is not None, "no bucket was exchanged"
        return decode(self._came)


class Carried:
    """A sum over ranks on its way with the gradients."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier

    def wait(self) -> list[float]:
        """The sums, the same on every rank; after the backward pass."""
        return self._carrier.came()
