"""Reads pickles of others: text, small numbers, lists, tuples and dictionaries, and nothing else.

Python's own loader allocates what a file asks for, and hashes whatever is a key: 20 bytes can fill the memory, and
tuples in tuples take forever. Here, each operation makes at most one small object, and keys are text or small numbers.
"""

from pickletools import genops
from typing import Any

#: Operations of a file: a dump of 2000 collectives with their stacks has a million.
_MOST = 5_000_000
_KEYS, _NUMBERS = 2**31, 2**63
_VALUES = ("SHORT_BINUNICODE", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT")
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def load(data: bytes) -> Any:
    """Return the value of a pickle. Raises ValueError, IndexError or KeyError if it is damaged or has anything else."""
    stack: list[Any] = []
    marks: list[int] = []  # where the stack was at each open mark
    memo: dict[Any, Any] = {}
    for number, (operation, value, _) in enumerate(genops(data)):
        name = operation.name
        if number == _MOST:
            raise ValueError(f"it has more than {_MOST} operations")
        if name in _VALUES:
            if isinstance(value, int) and not -_NUMBERS <= value < _NUMBERS:
                raise ValueError("it has a large number")
            stack.append(value)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("EMPTY_DICT", "EMPTY_LIST"):
            stack.append({} if name == "EMPTY_DICT" else [])
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            memo[len(memo) if name == "MEMOIZE" else int(value or 0)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[int(value or 0)])
        elif name == "TUPLE" or name in _TUPLES:
            items = _above(stack, len(stack) - _TUPLES[name] if name in _TUPLES else marks.pop())
            stack.append(tuple(items))
        elif name in ("APPEND", "APPENDS"):
            items = _above(stack, marks.pop() if name == "APPENDS" else len(stack) - 1)
            _last(stack, list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = _above(stack, marks.pop() if name == "SETITEMS" else len(stack) - 2)
            for key, item in zip(items[::2], items[1::2], strict=True):
                if not isinstance(key, str) and not (isinstance(key, int) and abs(key) < _KEYS):
                    raise ValueError("a key is neither text nor a small number")
                _last(stack, dict)[key] = item
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise ValueError(f"it has the operation {name}")
    return stack.pop()


def _above(stack: list[Any], begin: int) -> list[Any]:
    """Take what is on the stack from `begin` on."""
    if begin < 0:
        raise ValueError("its stack is empty")
    items = stack[begin:]
    del stack[begin:]
    return items


def _last(stack: list[Any], kind: type) -> Any:
    if not isinstance(stack[-1], kind):
        raise ValueError(f"{kind.__name__} expected")
    return stack[-1]
