"""Reads pickles of others: text, small numbers, lists, tuples and dictionaries, and nothing else.

Python's own loader allocates what a file asks for, and hashes whatever is a key: 20 bytes can fill the memory, and
tuples in tuples take forever. Here, each operation makes at most one small object, and keys are text or small numbers.
"""

from __future__ import annotations

import struct
from typing import Any

#: Operations of a file: a dump of 2000 collectives with their stacks has a million.
_MOST = 5_000_000
_KEYS = 2**31
#: Bytes of the number that follows an operation, and of the length in front of a text.
_NUMBERS = {b"K": 1, b"M": 2, b"J": 4}
_TEXTS = {b"\x8c": 1, b"X": 4}
_CONSTANTS = {b"N": None, b"\x88": True, b"\x89": False, b")": ()}
_TUPLES = {b"\x85": 1, b"\x86": 2, b"\x87": 3}
#: Bytes of a place in the memo, and of what has no meaning here: protocol and frames.
_PUTS = {b"q": 1, b"r": 4}
_GETS = {b"h": 1, b"j": 4}
_SKIPPED = {b"\x80": 1, b"\x95": 8}


def load(data: bytes) -> Any:
    """Return the value of a pickle. Raises ValueError, IndexError or KeyError if it is damaged or has anything else."""
    machine = _Machine(data)
    for _ in range(_MOST):
        if machine.step():
            return machine.stack.pop()
    raise ValueError(f"it has more than {_MOST} operations")


class _Machine:
    """One pickle while it is read. marks: where the stack was at each open mark."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def step(self) -> bool:
        """Do one operation; return whether it was the last."""
        op = self._take(1)
        stack = self.stack
        if op in _TEXTS:
            stack.append(self._take(self._number(_TEXTS[op])).decode("utf-8", errors="replace"))
        elif op in _PUTS:
            self._memo[self._number(_PUTS[op])] = stack[-1]
        elif op == b"\x94":
            self._memo[len(self._memo)] = stack[-1]
        elif op in _GETS:
            stack.append(self._memo[self._number(_GETS[op])])
        elif op in _NUMBERS:
            stack.append(self._number(_NUMBERS[op], signed=op == b"J"))
        elif op == b"\x8a" and (size := self._number(1)) <= 8:
            stack.append(self._number(size, signed=True))
        elif op == b"G":
            stack.append(struct.unpack(">d", self._take(8))[0])
        elif op in _CONSTANTS:
            stack.append(_CONSTANTS[op])
        elif op in _SKIPPED:
            self._take(_SKIPPED[op])
        elif op != b".":
            self._containers(op)
        return op == b"."

    def _containers(self, op: bytes) -> None:
        stack = self.stack
        if op == b"}":
            stack.append({})
        elif op == b"]":
            stack.append([])
        elif op == b"(":
            self._marks.append(len(stack))
        elif op in _TUPLES:
            stack.append(tuple(self._above(len(stack) - _TUPLES[op])))
        elif op == b"t":
            stack.append(tuple(self._above(self._marks.pop())))
        elif op in (b"a", b"e"):
            items = self._above(self._marks.pop() if op == b"e" else len(stack) - 1)
            self._last(list).extend(items)
        elif op in (b"s", b"u"):
            items = self._above(self._marks.pop() if op == b"u" else len(stack) - 2)
            for key, value in zip(items[::2], items[1::2], strict=True):
                if not isinstance(key, str) and not (isinstance(key, int) and abs(key) < _KEYS):
                    raise ValueError("a key is neither text nor a small number")
                self._last(dict)[key] = value
        else:
            raise ValueError(f"it has the operation {op!r}")

    def _take(self, size: int) -> bytes:
        taken = self._data[self._at : self._at + size]
        if len(taken) < size:
            raise ValueError("it is cut")
        self._at += size
        return taken

    def _number(self, size: int, *, signed: bool = False) -> int:
        return int.from_bytes(self._take(size), "little", signed=signed)

    def _above(self, begin: int) -> list[Any]:
        """Take what is on the stack from `begin` on."""
        if begin < 0:
            raise ValueError("its stack is empty")
        items = self.stack[begin:]
        del self.stack[begin:]
        return items

    def _last(self, kind: type) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise ValueError(f"{kind.__name__} expected")
        return self.stack[-1]
