"""Sums that travel in a bucket of gradients, exactly, instead of in a message of their own.

A message of its own costs a third of a millisecond over gloo, however small it is. Gradients are fp32 numbers that are
added up, and so has to be whatever goes with them. So each float64 is written as a whole number of units of 2**-60, in
the bytes of its two's complement, each byte an fp32: up to 65536 ranks' bytes add up without rounding. The sum is
exact, whatever the number and the order of the ranks.
"""

import math
from collections.abc import Sequence

import torch
from torch import nn

_UNIT = 60
_BYTES = 16
_LANES = _BYTES + 1  # The last one counts what cannot be written: nan, infinity, 2**51 and above.

#: With more ranks than this, sums of bytes may be rounded, or the sum of the largest values overflow.
MOST_RANKS = 1 << 16
_LARGEST = float(2 ** (8 * _BYTES - 1 - 16 - _UNIT))


def encode(values: Sequence[float]) -> torch.Tensor:
    """fp32 [17 * values]: what each rank adds to the sum."""
    lanes = bytearray()
    for value in values:
        written = abs(value) < _LARGEST
        whole = round(math.ldexp(value, _UNIT)) if written else 0
        lanes += whole.to_bytes(_BYTES, "little", signed=True)
        lanes.append(not written)
    return torch.frombuffer(lanes, dtype=torch.uint8).float()


def decode(lanes: list[float]) -> list[float]:
    """The sums of the values, from the sum of the ranks' tensors; nan where a rank's value could not be written."""
    return [_number(lanes[first : first + _BYTES], lanes[first + _BYTES]) for first in range(0, len(lanes), _LANES)]


def _number(lanes: list[float], unwritten: float) -> float:
    if unwritten:
        return math.nan
    if not any(lanes):
        return 0.0
    whole = 0
    for lane in reversed(lanes):
        whole = (whole << 8) + int(lane)
    whole &= (1 << 8 * _BYTES) - 1
    if whole >> 8 * _BYTES - 1:
        whole -= 1 << 8 * _BYTES
    return math.ldexp(whole, -_UNIT)


class Carrier:
    """Room beside a model's parameters for sums that travel with its gradients.

    The room is a parameter of zeros. Its product with what is to be added up goes onto the loss: that adds 0, and the
    parameter's gradient is just what is to be added up, in its bucket from the beginning and without a copy. Being
    the last to come into the loss, it is the first to go.
    """

    #: Values that one step can take along.
    ROOM = 32

    def __init__(self, model: nn.Module) -> None:
        self._room = nn.Parameter(torch.zeros(self.ROOM * _LANES))
        self._load = torch.zeros_like(self._room)
        self._used = 0
        self._came: list[float] = []
        #: For DDP: the model, and the room.
        self.module = _WithRoom(model, self._room)

    def load(self, values: Sequence[float]) -> "Carried":
        """Give it this rank's values, ROOM at most, before the backward pass that exchanges gradients; every rank has
        to, the same number.
        """
        lanes = encode(values)
        self._used = len(lanes)
        self._load[: self._used] = lanes
        return Carried(self)

    def laden(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to be differentiated in a pass that exchanges gradients: of the same value, and with the load."""
        self._room.grad = None
        return loss + torch.dot(self._room, self._load)

    def unload(self) -> None:
        """After the gradients' exchange: the room is empty again."""
        assert self._room.grad is not None, "nothing was exchanged"
        self._came = self._room.grad[: self._used].tolist()
        self._room.grad.zero_()

    def came(self) -> list[float]:
        """The sums over all ranks, after the pass that took them along."""
        return decode(self._came)


class _WithRoom(nn.Module):
    def __init__(self, model: nn.Module, room: nn.Parameter) -> None:
        super().__init__()
        self.model = model
        self.room = room
        # In place of a forward that calls the model, which would take another few microseconds.
        self.forward = model.__call__


class Carried:
    """A sum over ranks on its way with the gradients."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier

    def wait(self) -> list[float]:
        """The sums, the same on every rank; after the backward pass."""
        return self._carrier.came()
